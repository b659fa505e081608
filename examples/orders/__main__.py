"""Run the demo: watch it and press keys, or let it run by itself with --for."""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg

from examples.orders import live, unattended
from examples.orders.customers import Customers
from examples.orders.figures import Figures
from examples.orders.processes import ROOT, Stage
from holdfast import HoldfastError
from holdfast.embedded import EmbeddedPostgres, usable_data_dir
from holdfast.postgres import migrate
from servers import BROKERS, named

_WITHOUT_TERMINAL = 20.0


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev demo", description="Orders on an embedded Postgres.")
    parser.add_argument("--for", dest="seconds", type=float, metavar="SECONDS", help="run unattended for about so long")
    parser.add_argument("--json", action="store_true", help="with --for: print the result as one JSON object")
    parser.add_argument("--substrate", choices=sorted(BROKERS), help="a broker that carries the events, and is started")
    parser.add_argument("--data", type=Path, default=ROOT / ".demo", help="where the data stays (not with --for)")
    found = parser.parse_args(argv)
    if found.substrate:  # handlers that a broker carries events to wait for it, also in the next run
        found.data = found.data.with_name(f"{found.data.name}-{found.substrate}")
    if found.json and found.seconds is None:
        parser.error("--json needs --for SECONDS")
    if found.seconds is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        note = f"demo: no terminal to draw on or to read keys from, so running unattended (--for {_WITHOUT_TERMINAL:g})"
        print(note, file=sys.stderr, flush=True)
        found.seconds = _WITHOUT_TERMINAL
    return found


def main() -> int:
    started = time.monotonic()
    wanted = arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        print("demo: starting Postgres", file=sys.stderr, flush=True)
        data = None if wanted.seconds is not None else usable_data_dir(wanted.data)
        with EmbeddedPostgres(data) as server, _broker(wanted.substrate, data) as address:
            code = asyncio.run(_play(server, wanted, started, address))
            if data is None:
                server.stop("immediate")  # its data goes anyway
            return code
    except KeyboardInterrupt:
        return 130
    except (HoldfastError, unattended.NotReady) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _broker(name: str | None, data: Path | None) -> Iterator[str | None]:
    """Start the broker, with its data beside that of Postgres, and return its address."""
    if name is None:
        yield None
        return
    print(f"demo: starting {name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="orders-demo-") as temporary:
        folder = Path(temporary) if data is None else data.with_name(f"{data.name}-broker")
        with named(name, folder / name) as server:
            yield server.address


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


async def _play(server: EmbeddedPostgres, wanted: argparse.Namespace, started: float, substrate: str | None) -> int:
    me = asyncio.current_task()
    assert me is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, me.cancel, number)
    try:
        dsn = await _prepare(server)
        watched = wanted.seconds is None
        async with (
            Stage(dsn, substrate, with_console=watched) as stage,
            Figures(dsn, stage.sent, wanted.substrate or "") as figures,
            Customers(stage.url) as customers,
        ):
            if wanted.seconds is None:
                return await live.play(stage, figures, customers, server)
            run = unattended.Run(stage, figures, customers, started=started, seconds=wanted.seconds)
            return unattended.report(await run.play(), as_json=wanted.json)
    except asyncio.CancelledError as ended:
        if not ended.args:
            raise  # by Ctrl-C
        return 128 + int(ended.args[0])


async def _prepare(server: EmbeddedPostgres) -> str:
    dsn = server.database_dsn("shop")
    try:
        connection = await asyncpg.connect(dsn)
    except asyncpg.InvalidCatalogNameError:
        server.create_database("shop")
        connection = await asyncpg.connect(dsn)
    await migrate.apply(dsn)
    schema = Path(__file__).with_name("schema.sql").read_text()
    await connection.execute(schema)
    await connection.close()
    return dsn


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
