"""The shell of a system's process: options in, one JSON line out."""

import argparse
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

# Not an argument: those are for everybody to read.
DSN_VARIABLE = "HOLDFAST_BENCH_DSN"
Verb = Callable[[argparse.Namespace], Awaitable[Mapping[str, Any]]]


def main(verbs: Mapping[str, Verb], run: Callable[[Any], Any]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=sorted(verbs))
    parser.add_argument("--dsn", default=os.environ.get(DSN_VARIABLE), help=f"default: ${DSN_VARIABLE}")
    parser.add_argument("--count", type=int, default=10_000, help="events, or scrapes")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long producers publish")
    parser.add_argument("--connections", type=int, default=8, help="of producers")
    parser.add_argument("--rate", type=float, default=0.0, help="events per second; 0: as many as possible")
    parser.add_argument("--size", type=int, default=200, help="bytes of a payload")
    parser.add_argument("--kept", type=int, default=0, help="delivered events that are there already")
    parser.add_argument("--open", type=int, default=1_000, help="events that wait while somebody looks")
    parser.add_argument("--until", type=int, default=0, help="stop when so many are handled; 0: all")
    parser.add_argument("--handlers", type=int, default=1, help="per event")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a handler takes")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--notify", default="when_idle", help="when_idle, always or never")
    parser.add_argument("--kind", default="", help="a variant of the verb")
    parser.add_argument("--each", type=int, default=1, help="events per transaction")
    parser.add_argument("--concurrency", type=int, default=0, help="of a worker; 0: the default")
    parser.add_argument("--observed", default="default", help="what watches the worker, see benchmarks/observed.py")
    parser.add_argument("--bare", action="store_true", help="publish without a business row")
    parser.add_argument("--busy", action="store_true", help="while a worker drains a backlog")
    parser.add_argument("--hold", action="store_true", help="while another session holds a snapshot")
    options = parser.parse_args()
    print(json.dumps(run(verbs[options.verb](options))))


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as `main` reads them."""
    given = []
    for name, value in options.items():
        given += [f"--{name}"] if value is True else [] if value is False else [f"--{name}", str(value)]
    return given


def on_uvloop(coroutine: Any) -> Any:
    """How the peers run: the fastest loop there is, installed in each environment."""
    import uvloop

    return uvloop.run(coroutine)


def database_of(dsn: str) -> str:
    return dsn.rsplit("/", 1)[1].partition("?")[0]
