"""A log that cannot be written, and observers that block or raise, cost lines and nothing else (SEC-1, OBS-1, T16)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy, Worker, WorkerSettings
from holdfast.observability.background import MOST, RESERVED, Background
from holdfast.telemetry import Fact, Failed
from tests.worker.support import Facts, drained, publish, publish_many, settled, until

pytestmark = pytest.mark.trust

HANDLERS = """
import logging
from holdfast import HandlerRegistry, RetryPolicy

registry = HandlerRegistry()
log = logging.getLogger("shop")

@registry.handler("order.placed", name="shop.note")
async def note(event):
    pass

@registry.handler("order.loud", name="shop.shout")
async def shout(event):
    for number in range(event.payload["lines"]):
        log.info("line %d", number)

@registry.handler("order.bad", name="shop.fail", retry=RetryPolicy(strategy="none"))
async def fail(event):
    raise ValueError("no")
"""


@asynccontextmanager
async def command(dsn: str, directory: Path, stderr: Any) -> AsyncIterator[Process]:
    """`holdfast worker` with such a standard error."""
    (directory / "loud_handlers.py").write_text(HANDLERS)
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("holdfast")), "worker", "loud_handlers:registry", "--grace", "2"),
        cwd=directory,
        env={**os.environ, "HOLDFAST_DSN": dsn},
        stderr=stderr,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def stops(process: Process, code: int = 0) -> None:
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 10) == code


async def test_a_pipe_that_is_read_late(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """Deliveries go on behind a full pipe; what was dropped is counted in a line, and failures are not dropped
    (T16).
    """
    reading, writing = os.pipe()
    lines = 2 * MOST + 3_000
    async with command(dsn, tmp_path, writing) as process:
        os.close(writing)
        await publish(conn, "order.loud", {"lines": lines})
        await drained(conn)
        bad = await publish(conn, "order.bad")
        await settled(conn, bad, "failed")
        await publish(conn, "order.placed")
        await drained(conn)

        entries: list[dict[str, Any]] = []

        def read() -> None:
            with os.fdopen(reading) as pipe:
                entries.extend(map(json.loads, pipe))

        reader = threading.Thread(target=read)
        reader.start()
        await until(lambda: any(e["event"] == "log_lines_dropped" for e in list(entries)), what="the dropped are told")
        await stops(process)
        reader.join(10)
    seen = sum(entry["event"].startswith("line ") for entry in entries)
    told = [entry["count"] for entry in entries if entry["event"] == "log_lines_dropped"]
    assert sum(told) > 0 and seen + sum(told) >= lines
    assert [entry["event_id"] for entry in entries if entry["event"] == "delivery_failed"] == [str(bad)]
    assert entries[-1]["event"] == "worker_stopped"


async def test_a_pipe_that_nobody_reads(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """Deliveries go on, and SIGTERM ends the worker in order (T16)."""
    reading, writing = os.pipe()
    try:
        async with command(dsn, tmp_path, writing) as process:
            os.close(writing)
            await publish(conn, "order.loud", {"lines": MOST + 3_000})
            await publish_many(conn, "order.placed", 20)
            await drained(conn)
            await stops(process)
        assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'in_flight'") == 0
    finally:
        os.close(reading)


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="the system has no device that is always full")
async def test_a_disk_that_is_full(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """A log file that takes nothing stops neither deliveries nor SIGTERM (T16)."""
    with open("/dev/full", "wb") as full:
        async with command(dsn, tmp_path, full) as process:
            await publish(conn, "order.loud", {"lines": 100})
            await publish(conn, "order.placed")
            await drained(conn)
            await stops(process)


async def test_observers_that_block_and_raise(dsn: str, conn: asyncpg.Connection) -> None:
    """The others get every fact, deliveries go on, the worker stops in time, and what was lost is counted (T16)."""
    registry, facts, release = HandlerRegistry(), Facts(), threading.Event()

    @registry.handler("order.placed", name="shop.fail", retry=RetryPolicy(strategy="none"))
    async def fail(event: EventEnvelope) -> None:
        raise ValueError("no")

    def blocks(fact: Fact) -> None:
        release.wait()

    def raises(fact: Fact) -> None:
        raise OSError("no")

    try:
        async with Worker(dsn, registry, WorkerSettings(), observers=(blocks, raises, facts.append)) as worker:
            await publish_many(conn, "order.placed", 50)
            await drained(conn)
            await until(lambda: len(facts.of(Failed)) == 50, what="every failure is observed")
            await until(lambda: worker.facts_dropped >= 50, what="what one observer did not take is counted")
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 5
        assert not facts.notices("facts_dropped"), "this observer has missed nothing"
    finally:
        release.set()


def test_urgent_items_are_dropped_last() -> None:
    """While nothing can be written, the last places are for failures; then it is told once how many were lost (T16)."""
    taken, release = threading.Event(), threading.Event()
    seen, told = list[tuple[str, int]](), list[int]()

    def consume(item: tuple[str, int]) -> None:
        taken.set()
        release.wait()
        seen.append(item)

    background = Background("test", consume, told.append)
    background.put(("line", 0))
    assert taken.wait(10)
    for number in range(1, MOST + 1):
        background.put(("line", number))
    assert background.dropped == RESERVED
    for number in range(RESERVED + 1):
        background.put(("failure", number), urgent=True)
    assert background.dropped == RESERVED + 1
    release.set()
    done = threading.Event()
    background.flush(done.set)
    assert done.wait(10)
    assert [number for kind, number in seen if kind == "failure"] == list(range(RESERVED))
    assert told == [RESERVED + 1]
