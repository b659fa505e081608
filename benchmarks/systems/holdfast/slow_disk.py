"""Workers beside a database whose commits take 60 ms, as with a synchronous standby far away."""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.counters import difference, snapshot
from benchmarks.systems.crew import told_to_end
from benchmarks.systems.process import DSN_VARIABLE, database_of
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE
from holdfast import HandlerRegistry, Worker, WorkerSettings
from holdfast.worker.auto_concurrency import START

# Of the connections that are made from now on. Commits that meet share the wait, as they share a flush.
SLOW_COMMITS = ("commit_delay = 60000", "commit_siblings = 0")
# What a killed worker had is due again after this time.
LEASE = 2.0
LONGEST = 120.0
OPEN = "SELECT EXISTS (SELECT FROM core.outbox WHERE settled_at IS NULL)"
# Concurrency is what a worker starts with: it does not grow while settling holds handlers up.
BOUND = 2 * WorkerSettings().batch + START


async def slow_commits(options: argparse.Namespace) -> asyncpg.Connection:
    """Prepare a database with a backlog; returns a connection whose own commits are not slow."""
    observer = await prepare(options.dsn, due=options.count)
    for setting in SLOW_COMMITS:
        await observer.execute(f"ALTER DATABASE {database_of(options.dsn)} SET {setting}")
    return observer


async def slow_disk(options: argparse.Namespace) -> dict[str, Any]:
    """Drain, and watch how much is handled and not settled."""
    observer, database = await slow_commits(options), database_of(options.dsn)
    registry, handled, worst = HandlerRegistry(), 0, 0

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(_event: object) -> None:
        nonlocal handled, worst
        handled += 1
        worst = max(worst, handled - worker.counters.delivered)

    worker = Worker(options.dsn, registry)
    before = await snapshot(observer, database)
    async with worker:
        while handled < options.count or worker.in_flight:
            await asyncio.sleep(0.002)
        after = await snapshot(observer, database)
    result = await difference(observer, before, after, options.count)
    await observer.close()
    return result | {"unsettled_worst": worst, "bound": BOUND}


async def slow_disk_killed(options: argparse.Namespace) -> dict[str, Any]:
    """Kill a worker amid its backlog, let another one finish, and count the handlers that ran twice."""
    observer = await slow_commits(options)
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "handled"
        told.touch()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.systems.holdfast", "tell_handled", "--kind", str(told)),
            env=os.environ | {DSN_VARIABLE: options.dsn},
            stdin=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(LONGEST):
                while told.stat().st_size < options.count // 2:
                    await asyncio.sleep(0.001)
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        first = told.stat().st_size
    registry, second = HandlerRegistry(), 0

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(_event: object) -> None:
        nonlocal second
        second += 1

    async with asyncio.timeout(LONGEST), Worker(options.dsn, registry, settings=settings()) as worker:
        while first + second < options.count or worker.in_flight or await observer.fetchval(OPEN):
            await asyncio.sleep(0.05)
    await observer.close()
    return {"events": options.count, "handled_before": first, "repeats_after_kill": first + second - options.count}


def settings() -> WorkerSettings:
    return WorkerSettings(lease=LEASE)


async def tell_handled(options: argparse.Namespace) -> dict[str, Any]:
    """A worker that writes a byte into the file `--kind` for each event, until it is killed."""
    registry = HandlerRegistry()
    told = os.open(options.kind, os.O_WRONLY | os.O_APPEND)

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(_event: object) -> None:
        os.write(told, b".")

    async with Worker(options.dsn, registry, settings=settings()):
        await told_to_end()
    return {}
