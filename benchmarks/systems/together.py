"""Measurements in which several processes take part, made the same way for Holdfast and for the control."""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg

from benchmarks.counters import difference, snapshot
from benchmarks.systems.crew import Crew, begin, report, told_to_end
from benchmarks.systems.harness import ORDERS, check
from benchmarks.systems.process import database_of
from benchmarks.systems.tables import prepare

# From the end of the index, where the last event to be claimed is: the observer never walks over those that are done.
OPEN = """
SELECT EXISTS (
    SELECT FROM core.outbox WHERE settled_at IS NULL AND ordering_key IS NULL
    ORDER BY channel DESC, generation DESC, route DESC, priority DESC, available_at DESC, id DESC LIMIT 1)
"""
BEGUN = "SELECT EXISTS (SELECT FROM core.outbox WHERE settled_at IS NOT NULL)"
WAITING = "SELECT count(*) FROM core.outbox WHERE settled_at IS NULL"
POLL = 0.01
LONGEST = 600.0
# A worker whose handlers take 50 ms, a hundred at a time, has a backlog for as long as the producers publish, on any
# machine, and so it never sleeps.
BUSY = {"pause": 0.05, "concurrency": 100}
MOST_PER_SECOND = 2_000
LEAST_BACKLOG = 200
CONNECTIONS_PER_PROCESS = 8
OF_PRODUCERS = ("events", "seconds", "per_second", "python_us")


async def drain(system: str, options: argparse.Namespace) -> dict[str, Any]:
    """From the word to all the processes until the database knows of nothing that is open."""
    database = database_of(options.dsn)
    async with Crew(system, "work", options.dsn, {}, options.processes) as crew:
        observer = await prepare(options.dsn, due=options.count, size=options.size, kept=options.kept)
        await crew.ready()
        before = await snapshot(observer, database)
        crew.go()
        await until_done(observer, crew)
        after = await snapshot(observer, database)
        reports = await crew.reports()
    check("events handled", sum(each["handled"] for each in reports), options.count)
    result = await difference(observer, before, after, options.count, elsewhere=sum(each["python"] for each in reports))
    await observer.close()
    return result


async def until_done(observer: asyncpg.Connection, crew: Crew) -> None:
    async with asyncio.timeout(LONGEST):
        while await observer.fetchval(OPEN):
            crew.require_alive()
            await asyncio.sleep(POLL)


async def publish(
    system: str, options: argparse.Namespace, arrange: Callable[[asyncpg.Connection], Awaitable[object]]
) -> dict[str, Any]:
    """One event per transaction from producers in processes of their own; with `--busy` beside a worker.

    With `--kind without` they have a business row and no event, and with `--kind alone` each event is one statement.
    """
    backlog = int(MOST_PER_SECOND * (options.seconds + 2)) if options.busy else 0
    database, processes = database_of(options.dsn), -(-options.connections // CONNECTIONS_PER_PROCESS)
    given = {"seconds": options.seconds, "connections": options.connections // processes, "bare": options.bare}
    given |= {"kind": options.kind} if options.kind else {}
    async with (
        Crew("holdfast", "work", options.dsn, BUSY, 1 if options.busy else 0) as workers,
        Crew(system, "produce", options.dsn, given, processes) as producers,
    ):
        observer = await prepare(options.dsn, due=backlog)
        await observer.execute(ORDERS)
        await arrange(observer)
        await workers.ready()
        await producers.ready()
        workers.go()
        await until_busy(observer, workers, backlog)
        before = await snapshot(observer, database)
        producers.go()
        reports = await producers.reports()
        after = await snapshot(observer, database)
        if backlog:
            check("a backlog to the end", await observer.fetchval(WAITING) > LEAST_BACKLOG, True)
    commits = sum(each["commits"] for each in reports)
    events = 0 if options.kind == "without" else commits
    check("events stored", await observer.fetchval("SELECT count(*) FROM core.outbox") - backlog, events)
    rows = 0 if options.bare or options.kind == "alone" else commits
    check("business rows", await observer.fetchval("SELECT count(*) FROM orders"), rows)
    result = await difference(observer, before, after, commits, elsewhere=sum(each["python"] for each in reports))
    await observer.close()
    # Each producer knows best how long it took; the observer also waited for the reports.
    result["per_second"] = round(sum(each["commits"] / each["seconds"] for each in reports), 1)
    # What the server counted beside a worker is the worker's for the most part.
    return {figure: result[figure] for figure in OF_PRODUCERS} if options.busy else result


async def until_busy(observer: asyncpg.Connection, workers: Crew, backlog: int) -> None:
    """Wait until the worker has begun on its backlog, if there is one."""
    async with asyncio.timeout(LONGEST):
        while backlog and not await observer.fetchval(BEGUN):
            workers.require_alive()
            await asyncio.sleep(POLL)


async def produce(
    options: argparse.Namespace, commit: Callable[[asyncpg.Connection], Awaitable[None]]
) -> dict[str, Any]:
    """A producer process: one transaction after the other on each connection, until the time is over."""
    connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
    commits = 0
    cpu = await begin()
    started = time.perf_counter()
    stop = started + options.seconds

    async def producer(connection: asyncpg.Connection) -> None:
        nonlocal commits
        while time.perf_counter() < stop:
            await commit(connection)
            commits += 1

    await asyncio.gather(*map(producer, connections))
    seconds = time.perf_counter() - started
    report({"commits": commits, "seconds": seconds, "python": time.process_time() - cpu})
    await told_to_end()
    for connection in connections:
        await connection.close()
    return {}
