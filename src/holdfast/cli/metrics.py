"""holdfast metrics: the state of the outbox for Prometheus, once or as an endpoint."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated

import typer

from holdfast.cli import environment, logs
from holdfast.cli.environment import LogLevelOption
from holdfast.cli.options import Where, spread
from holdfast.observability import endpoint, prometheus
from holdfast.observability.endpoint import Scraper
from holdfast.observability.http import CannotListen, Site, address_of, is_loopback, unusable


@spread
def metrics(
    where: Where,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="[HOST:]PORT",
            help=f"Serve {endpoint.PATH} over HTTP until SIGTERM. Without a host only this machine can read it.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="With --listen: answer requests for this host too; may be repeated. "
            "Without it: for addresses, localhost and this machine's name.",
        ),
    ] = None,
    log_level: LogLevelOption = None,
) -> None:
    """Print the state of the outbox in the text format of Prometheus, or serve it. Delivered events are not counted."""
    prometheus.require()
    if listen is None:
        typer.echo(where.run(lambda operator: operator.metrics()), nl=False)
        return
    host, port = address_of(listen)
    schema = environment.schema(where.schema)
    addresses = where.several or {"": where.address}
    scrapers = {name: Scraper(address, schema) for name, address in addresses.items()}
    logs.configure(level=environment.log_level(log_level))
    try:
        asyncio.run(_serve(scrapers, host, port, allow_host or ()))
    finally:
        logs.flush()


async def _serve(scrapers: Mapping[str, Scraper], host: str, port: int, allowed: Iterable[str]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with endpoint.serve(scrapers, host, port, allowed) as bound:
            if not is_loopback(host):
                print(f"note: every client that reaches {host} port {bound} can read the metrics", file=sys.stderr)
            print(f"serving {Site(host, bound, {}).url}{endpoint.PATH}", file=sys.stderr, flush=True)
            await stop.wait()
    except CannotListen as error:
        raise unusable("--listen", host, port, error) from None
