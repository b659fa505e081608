"""What the adapters share: the same measurement around each system's own calls, and a check of the counts.

It also runs in the peers' environments: the standard library and asyncpg (for observing) are all there is.
"""

import argparse
import asyncio
import logging
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import islice
from typing import Any

import asyncpg

from benchmarks.counters import difference, peak_rss_mb, snapshot
from benchmarks.systems.process import database_of
from benchmarks.workload import quantile

ORDERS = "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text)"
BUSINESS = "INSERT INTO orders (note) VALUES ('x')"
CHUNK = 5_000
WARM_UP = 5
# Transactions that are not measured: until then connections are opened, and statements planned on each of them.
WARM_TRANSACTIONS = 500
# A run that loses a job would wait for it forever.
LONGEST = 600

Worker = Callable[[], AbstractAsyncContextManager[Any]]


def quiet() -> None:
    """Logging is off for every peer: a line per job, or a traceback per failure, would be the measurement."""
    logging.disable(logging.CRITICAL)


def logged() -> None:
    """Logging is as it is by default, into a file: where the log is part of what is measured."""
    logging.disable(logging.NOTSET)
    logging.basicConfig(stream=tempfile.TemporaryFile("w"))  # noqa: SIM115


async def warmed(handled: Callable[[], int]) -> int:
    """Wait until so many transactions have ended that the rest is measured; return how many."""
    while handled() < WARM_TRANSACTIONS:
        await asyncio.sleep(0.002)
    return handled()


async def observe(dsn: str) -> asyncpg.Connection:
    connection = await asyncpg.connect(dsn)
    await connection.execute(ORDERS)
    return connection


class Tally:
    """Calls of the handler. Some peers run it in threads, so counting is safe there as well."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.calls = 0
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._reached = asyncio.Event()

    def seen(self) -> None:
        with self._lock:
            self.calls += 1
            last = self.calls == self.expected
        if last:
            self._loop.call_soon_threadsafe(self._reached.set)

    async def reached(self) -> None:
        await self._reached.wait()


async def drained(
    options: argparse.Namespace, observer: asyncpg.Connection, worker: Worker, tally: Tally, left: str
) -> dict[str, Any]:
    """From the worker's start until the handler was called for every job and the database knows of every end.

    `left` is a query for the number of jobs that are not over. A job that is handled twice makes more calls than
    expected by the time that none is left.
    """
    await settle(observer)
    check("jobs waiting", await observer.fetchval(left), options.count)
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    try:
        async with asyncio.timeout(LONGEST), worker():
            await tally.reached()
            while await observer.fetchval(left):
                await asyncio.sleep(0.005)
            after = await snapshot(observer, database)
    except TimeoutError:
        jobs = await observer.fetchval(left)
        raise SystemExit(f"{tally.calls} of {tally.expected} calls, {jobs} of {options.count} jobs left") from None
    check("handler calls", tally.calls, tally.expected)
    check("jobs left", await observer.fetchval(left), 0)
    result = await difference(observer, before, after, options.count)
    await observer.close()
    return result | {"rss_mb": peak_rss_mb()}


async def reached(
    options: argparse.Namespace, observer: asyncpg.Connection, worker: Worker, tally: Tally
) -> dict[str, Any]:
    """From the worker's start until the handler was called so often; there may be other jobs, which are left."""
    await settle(observer)
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    async with asyncio.timeout(LONGEST), worker():
        await tally.reached()
        after = await snapshot(observer, database)
    result = await difference(observer, before, after, options.count)
    await observer.close()
    return result


async def settle(observer: asyncpg.Connection) -> None:
    await observer.execute("VACUUM ANALYZE")
    await observer.execute("CHECKPOINT")


async def published(
    options: argparse.Namespace,
    observer: asyncpg.Connection,
    connections: list[Any],
    commit: Callable[[Any], Awaitable[None]],
    stored: str,
) -> dict[str, Any]:
    """Each connection commits a business row and a job, one transaction after the other."""
    await settle(observer)
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    stop = time.perf_counter() + options.seconds

    async def producer(connection: Any) -> int:
        commits = 0
        while time.perf_counter() < stop:
            await commit(connection)
            commits += 1
        return commits

    commits = sum(await asyncio.gather(*map(producer, connections)))
    after = await snapshot(observer, database)
    check("jobs stored", await observer.fetchval(stored), commits)
    check("business rows", await observer.fetchval("SELECT count(*) FROM orders"), commits)
    result = await difference(observer, before, after, commits)
    for connection in [*connections, observer]:
        await connection.close()
    return result


async def published_many(
    options: argparse.Namespace,
    observer: asyncpg.Connection,
    publish: Callable[[int], Awaitable[None]],
    stored: str,
) -> dict[str, Any]:
    await settle(observer)
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    await fill(options.count, publish)
    after = await snapshot(observer, database)
    check("jobs stored", await observer.fetchval(stored), options.count)
    result = await difference(observer, before, after, options.count)
    await observer.close()
    return result


async def fill(count: int, publish: Callable[[int], Awaitable[None]]) -> None:
    for start in range(0, count, CHUNK):
        await publish(min(CHUNK, count - start))


async def delivered(
    options: argparse.Namespace,
    observer: asyncpg.Connection,
    connections: list[Any],
    commit: Callable[[Any, int], Awaitable[float]],
    worker: Worker,
    handled: dict[int, float],
) -> dict[str, Any]:
    """From commit to handler at a steady rate. `commit` returns the time at which it began to commit."""

    async def commit_one(connection: Any, numbers: Sequence[int]) -> float:
        return await commit(connection, numbers[0])

    return await steadily(options, observer, connections, commit_one, worker, handled)


async def steadily(
    options: argparse.Namespace,
    observer: asyncpg.Connection,
    connections: list[Any],
    commit: Callable[[Any, Sequence[int]], Awaitable[float]],
    worker: Worker,
    handled: dict[int, float],
) -> dict[str, Any]:
    """The same, with `options.each` jobs in every transaction."""
    committed: dict[int, float] = {}
    numbers = iter(range(10**9))

    async def all_handled() -> None:
        async with asyncio.timeout(60):
            while len(handled) < len(committed):
                await asyncio.sleep(0.005)

    async def producer(connection: Any) -> None:
        due = time.perf_counter()
        while time.perf_counter() < stop:
            some = list(islice(numbers, options.each))
            at = await commit(connection, some)
            committed.update(dict.fromkeys(some, at))
            if options.rate:
                due += options.each * len(connections) / options.rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async with worker():
        # One after the other: the last of them can only have come through a listener that listens.
        for number in range(-WARM_UP, 0):
            committed[number] = await commit(connections[0], (number,))
            await all_handled()
        # Then once on each connection: the first transaction of a session takes several times as long as the others.
        for connection in connections:
            some = list(islice(numbers, options.each))
            committed.update(dict.fromkeys(some, await commit(connection, some)))
        await all_handled()
        committed.clear()
        handled.clear()
        stop = time.perf_counter() + options.seconds
        await asyncio.gather(*map(producer, connections))
        await all_handled()
    check("jobs handled", len(handled), len(committed))
    waits = [handled[number] - committed[number] for number in committed]
    for connection in [*connections, observer]:
        await connection.close()
    return {
        "events": len(committed),
        "per_second": round(len(committed) / options.seconds, 1),
        "p50_ms": round(quantile(waits, 0.5) * 1e3, 2),
        "p99_ms": round(quantile(waits, 0.99) * 1e3, 2),
        "max_ms": round(max(waits) * 1e3, 2),
    }


async def looked(count: int, look: Callable[[], Awaitable[object]]) -> dict[str, Any]:
    """Looks one after the other on a connection that stays open."""
    await look()
    waits = []
    for _ in range(count):
        started = time.perf_counter()
        await look()
        waits.append(time.perf_counter() - started)
    return {
        "events": count,
        "ms": round(quantile(waits, 0.5) * 1e3, 3),
        "p99_ms": round(quantile(waits, 0.99) * 1e3, 3),
    }


def check(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise SystemExit(f"{what}: {found}, expected {expected}")
