"""The orders demo, run as anybody would run it (RUN-1)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from examples.orders import unattended
from examples.orders.__main__ import arguments
from examples.orders.figures import HANDLERS, Account, Figures, Snapshot, percentile
from examples.orders.handlers import registry
from examples.orders.view import Scene, bars, draw
from tests.worker.support import drained, running, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "examples.orders"]


@pytest.fixture
def marked() -> Iterator[dict[str, str]]:
    """An environment by which the demo's processes can be told from all others; none of them may be left."""
    mark = f"ORDERS_DEMO_TEST={uuid4()}"
    name, _, value = mark.partition("=")
    yield {**os.environ, name: value}
    deadline = time.monotonic() + 20
    while (left := _processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _processes_with(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.nightly("demo")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("substrate", [None, "nats", "redis", "rabbitmq"])
def test_the_demo_loses_nothing_when_its_worker_is_killed(marked: dict[str, str], substrate: str | None) -> None:
    """Orders before, without and after the worker reach both handlers, in the ledger once (RUN-1, SCL-2, P1, P2)."""
    command = [*DEMO, "--for", "12", "--json", *(["--substrate", substrate] if substrate else [])]
    run = subprocess.run(command, cwd=ROOT, env=marked, capture_output=True, timeout=200)
    assert run.returncode == 0, run.stderr.decode()
    result = json.loads(run.stdout.decode().splitlines()[-1])
    assert result["lost"] == 0
    assert result["effect_duplicates"] == 0
    assert result["failed"] == 0
    assert result["kills"] == 1
    assert result["reacted"] == result["orders"], "the API was not killed: it reacted to every order"
    assert result["books_closed"] == result["books_recorded"], "whichever day it was in Berlin"
    assert result["slots_fired"] <= 1 and re.fullmatch(r"\d{4}-\d\d-\d\d 2[23]:00 UTC", result["next_slot"])
    assert result["delivered"] == result["orders"] >= 100
    assert result["latency_sample"] >= 50
    assert 0 < result["p50_ms"] <= result["p99_ms"]
    said = run.stderr.decode()
    assert "kill -9 of the worker" in said
    assert "the schedule that ends the day is triggered" in said
    placed = re.search(r"(\d+) orders placed without a worker", said)
    assert placed and int(placed[1]) > 10


@pytest.mark.nightly("demo")
@pytest.mark.timeout(120)
def test_ctrl_c_ends_everything(marked: dict[str, str]) -> None:
    """Whatever the demo was doing; the fixture looks for processes that are left (RUN-1)."""
    process = subprocess.Popen([*DEMO, "--for", "30"], cwd=ROOT, env=marked, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "placing" in line:
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    process.stderr.close()


@pytest.mark.nightly("demo")
@pytest.mark.timeout(180)
def test_a_person_at_the_keys(marked: dict[str, str]) -> None:
    """Stop the worker, create orders, start it, watch it drain; the terminal is as it was (RUN-1)."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)  # the server's user has to get there
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    before = termios.tcgetattr(terminal)
    environment = {**marked, "TERM": "xterm-256color"}
    command = [*DEMO, "--data", str(directory / "data")]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    shown = ""

    def see(pattern: str, within: float = 60) -> None:
        nonlocal shown
        deadline = time.monotonic() + within
        while not re.search(pattern, shown, re.DOTALL):
            assert time.monotonic() < deadline and process.poll() is None, f"{pattern} not on the screen:\n{shown}"
            if select.select([screen], [], [], 0.2)[0]:
                shown += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(screen, 65536).decode(errors="replace"))
        shown = ""

    try:
        see(r"● running")
        os.write(screen, b"w")
        see(r"● stopped")
        os.write(screen, b"b")
        see(r"500 orders placed")
        see(r"pending\s+1,000 .*orders\s+500 ")
        os.write(screen, b"w")
        see(r"in the ledger\s+500 ")
        see(r"everything is delivered")
        os.write(screen, b"k")
        see(r"● killed")
        os.write(screen, b"q")
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([screen], [], [], 0.1)[0]:
                os.read(screen, 65536)
        assert process.poll() == 0
        assert termios.tcgetattr(terminal) == before
    finally:
        process.kill()
        process.wait()
        os.close(screen)
        os.close(terminal)
        shutil.rmtree(directory, ignore_errors=True)


async def test_the_reckoning_is_honest(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """What was not delivered to both handlers is lost, and a second row in the ledger is a duplicate (RUN-1)."""
    await conn.execute((ROOT / "examples/orders/schema.sql").read_text())
    orders = [uuid4() for _ in range(4)]
    sent = tmp_path / "sent.txt"
    async with Figures(dsn, sent) as figures:
        for number, order in enumerate(orders):
            await conn.execute("INSERT INTO orders (id, customer, total_cents) VALUES ($1, 'Ada', 1)", order)
            for handler in HANDLERS[: 1 if number == 3 else 2]:  # the fourth reached one handler only
                await conn.execute(DELIVERED, order, handler, f"{order}")
            await conn.execute("INSERT INTO ledger (order_id, total_cents) VALUES ($1, 1)", order)
        lines = [*orders[:2], orders[3], orders[0]]  # the third was not confirmed, the first one twice
        sent.write_text("".join(f"{order} x Thank you\n" for order in lines))
        assert await figures.account(orders) == Account(2, 2, 0, 1)
        await conn.execute("INSERT INTO ledger (order_id, total_cents) VALUES ($1, 1)", orders[0])
        assert (await figures.account(orders)).effect_duplicates == 1
        assert await figures.account([*orders, uuid4()]) == Account(2, 3, 1, 1)
        await conn.execute("DELETE FROM core.event_handled WHERE idempotency_key = $1", str(orders[1]))
        assert (await figures.account(orders)).lost == 3


async def test_reactions_and_schedules_are_counted(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """By the inbox and by the books; what another handler did, or nobody, is not counted (RUN-1, IDM-3, IDM-4)."""
    await conn.execute((ROOT / "examples/orders/schema.sql").read_text())
    orders = [uuid4() for _ in range(3)]
    for order, handler in zip(orders, ("storefront.count_order", "storefront.count_order", HANDLERS[0]), strict=True):
        await conn.execute("INSERT INTO orders (id, customer, total_cents) VALUES ($1, 'Ada', 1)", order)
        await conn.execute("INSERT INTO ledger (order_id, total_cents) VALUES ($1, 1)", order)
        await conn.execute(DELIVERED, order, handler, f"{order}")
    async with Figures(dsn, tmp_path / "sent.txt") as figures:
        assert await figures.reacted(orders) == 2
        assert await figures.reacted(orders[1:]) == 1
        engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://", 1))
        async with running(dsn, registry, transactions=async_sessionmaker(engine)):
            await figures.end_the_day()
            await until(lambda: conn.fetchval("SELECT count(*) FROM closed_days"), what="the books are closed")
            await drained(conn)
        await engine.dispose()
        books = await figures.books()
        assert books.closed == books.recorded
        assert books.next_slot is not None
        day = "(now() AT TIME ZONE 'Europe/Berlin')::date"
        await conn.execute(f"INSERT INTO closed_days VALUES ({day} + 1, 7, 7)")
        assert ((await figures.books()).closed, (await figures.books()).recorded) == (7, 0)


DELIVERED = """
WITH row AS (
    INSERT INTO core.outbox (event_type, source, payload, domain_id, handler_name, idempotency_key, status, settled_at,
                             delivered_at)
    VALUES ('order.placed', 'orders', '{}', $1, $2, $3, 'delivered', now(), now()))
INSERT INTO core.event_handled (handler_name, idempotency_key, source) VALUES ($2, $3, 'orders')
"""


def test_a_loss_or_a_duplicate_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code says so (RUN-1)."""
    fine = {"orders": 1, "delivered": 1, "lost": 0, "effect_duplicates": 0, "confirmation_duplicates": 1, "kills": 1}
    times = {"p50_ms": 1.0, "p99_ms": 2.0, "latency_sample": 1}
    fine |= {"reacted": 17, "books_closed": 23, "slots_fired": 2, "next_slot": "2026-07-01 22:00 UTC"}
    assert unattended.report(fine | times, as_json=True) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["lost"] == 0
    assert unattended.report(fine | times | {"lost": 1}, as_json=False) == 1
    said = capsys.readouterr().out
    assert "WRONG" in said
    assert "    17  counted by the API after its commit" in said
    assert "    23  in the books of the day" in said and "2 slots fired by themselves" in said
    assert unattended.report(fine | times | {"effect_duplicates": 1}, as_json=True) == 1


def test_without_a_terminal_it_says_so_and_runs_by_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pipeline there is nobody to press keys (RUN-1)."""
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    assert arguments([]).seconds == 20
    assert "no terminal" in capsys.readouterr().err
    sys.stdin.close()
    with pytest.raises(SystemExit):
        arguments(["--json"])


def test_the_chart_shows_the_newest_values_at_the_right() -> None:
    assert bars([0, 4, 8], 4, 1) == ["  ▃▆"]
    assert bars([100, 50], 2, 2) == ["█ ", "██"]
    assert bars([], 3, 2) == ["   ", "   "]
    assert bars([1], 1, 3) == [" ", " ", "▂"]  # something is never drawn as nothing


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 10)])
def test_the_screen_can_be_drawn_at_any_size(size: tuple[int, int]) -> None:
    import io

    from rich.console import Console

    dsn = f"postgresql://postgres:{'x' * 32}@127.0.0.1:54321/shop"
    scene = Scene(
        dsn=dsn, now=Snapshot(waiting=7, orders=3), backlog=[1, 2, 3], news=[("10:00:00", "started")], worker="killed"
    )
    console = Console(file=io.StringIO(), width=size[0], height=size[1], force_terminal=True)
    with console.capture() as captured:
        console.print(draw(scene))
    assert "Holdfast" in captured.get()
    if size[0] >= 80:
        assert dsn in captured.get(), "whole, so that psql takes it"


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.5) == 51
    assert percentile(values, 0.99) == 100
    assert percentile([], 0.5) is None
