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
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--size", type=int, default=200)
    parser.add_argument("--kept", type=int, default=0)
    parser.add_argument("--handlers", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--notify", default="when_idle")
    parser.add_argument("--kind", default="")
    parser.add_argument("--hold", action="store_true")
    options = parser.parse_args()
    print(json.dumps(run(verbs[options.verb](options))))


def on_uvloop(coroutine: Any) -> Any:
    """How the peers run: the fastest loop there is, installed in each environment."""
    import uvloop

    return uvloop.run(coroutine)


def database_of(dsn: str) -> str:
    return dsn.rsplit("/", 1)[1].partition("?")[0]
