"""Loops that claim, do nothing, and settle."""

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import asyncpg

from benchmarks.counters import difference, peak_rss_mb, snapshot
from benchmarks.systems import together
from benchmarks.systems.crew import asked, begin, report, told_to_end
from benchmarks.systems.harness import BUSINESS, ORDERS, warmed
from benchmarks.systems.libraries import LIBRARIES, PLACES, HandThreads, Library
from benchmarks.systems.process import database_of
from benchmarks.systems.raw.statements import (
    BATCH,
    CLAIM,
    ENTER,
    FAIL,
    INBOX,
    LEAVE,
    RETRY,
    SETTLE,
    SETTLE_LEAN,
    SETTLE_SIBLINGS,
    SPLIT,
    UNCHECKED,
)
from benchmarks.systems.tables import held_snapshot, pace, prepare
from benchmarks.workload import quantile

LOOPS = 2
START = (datetime(1970, 1, 1, tzinfo=UTC), uuid.UUID(int=0))


class Tally:
    """What the loops have done: how many events until when, and how long each claim took."""

    def __init__(self) -> None:
        self.done = 0
        self.marks: list[tuple[float, int]] = []
        self.claims: list[float] = []


async def connect(dsn: str) -> asyncpg.Connection:
    """A connection whose updates cost what those of Holdfast's functions do."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(UNCHECKED)
    return connection


async def deliver(
    connection: asyncpg.Connection,
    tally: Tally,
    enough: Callable[[], bool],
    pause: float = 0.0,
    settling: str = SETTLE,
) -> None:
    """Claim from where the last claim began, until nothing is left or it is enough."""
    claim, settle = await connection.prepare(CLAIM), await connection.prepare(settling)
    worker, mark = uuid.uuid4(), START
    while not enough():
        token, started = uuid.uuid4(), time.perf_counter()
        rows = await claim.fetch(BATCH, worker, token, *mark)
        if not rows:
            return
        tally.claims.append(time.perf_counter() - started)
        mark = min((row["available_at"], row["id"]) for row in rows)
        for row in rows:
            json.loads(row["payload"])
        if pause:
            await asyncio.sleep(pause)
        await settle.fetch([row["id"] for row in rows], token)
        tally.done += len(rows)
        tally.marks.append((time.perf_counter(), tally.done))


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    """With the kind `lean`, without the inbox."""
    observer = await prepare(options.dsn, due=options.count, size=options.size, kept=options.kept)
    holder = await held_snapshot(options.dsn) if options.hold else None
    tally, database = Tally(), database_of(options.dsn)
    settling = SETTLE_LEAN if options.kind == "lean" else SETTLE
    before = await snapshot(observer, database)
    connections = [await connect(options.dsn) for _ in range(LOOPS)]
    await asyncio.gather(*(deliver(each, tally, lambda: False, settling=settling) for each in connections))
    result = await difference(observer, before, await snapshot(observer, database), options.count)
    for connection in [*connections, observer, *([holder] if holder else [])]:
        await connection.close()
    return result | {
        "claim_p50_ms": round(quantile(tally.claims, 0.5) * 1e3, 2),
        "claim_p99_ms": round(quantile(tally.claims, 0.99) * 1e3, 2),
        "rss_mb": peak_rss_mb(),
        **pace(tally.marks),
    }


async def drain_together(options: argparse.Namespace) -> dict[str, Any]:
    return await together.drain("raw", options)


async def work(options: argparse.Namespace) -> dict[str, Any]:
    tally = Tally()
    cpu = await begin()
    connections = [await connect(options.dsn) for _ in range(LOOPS)]
    await asyncio.gather(*(deliver(connection, tally, lambda: False) for connection in connections))
    await asked()
    report({"handled": tally.done, "python": time.process_time() - cpu})
    await told_to_end()
    for connection in connections:
        await connection.close()
    return {}


async def memory(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=options.count, size=options.size)
    tally, target = Tally(), min(options.count, options.until or options.count)
    connections = [await connect(options.dsn) for _ in range(LOOPS)]
    await asyncio.gather(*(deliver(each, tally, lambda: tally.done >= target, 0.01) for each in connections))
    for connection in [*connections, observer]:
        await connection.close()
    return {"events": options.count, "handled": tally.done, "rss_mb": peak_rss_mb()}


async def transactional(options: argparse.Namespace) -> dict[str, Any]:
    """A transaction per event: lock, inbox row, the handler's row, settle; ten connections at a time.

    `--kind` names the library, asyncpg by default. The first events are not measured.
    """
    if options.kind:
        return await transactional_with(LIBRARIES[options.kind](), options)
    observer = await prepare(options.dsn, due=options.count)
    await observer.execute(ORDERS)
    claiming = await connect(options.dsn)
    connections = [await connect(options.dsn) for _ in range(10)]
    rows: asyncio.Queue[Any] = asyncio.Queue(2 * BATCH)
    handled = list[None]()

    async def claim() -> None:
        statement, worker = await claiming.prepare(CLAIM), uuid.uuid4()
        while True:
            token = uuid.uuid4()
            found = await statement.fetch(BATCH, worker, token, *START)
            for row in found:
                await rows.put((row, token))
            if not found:
                for _ in connections:
                    await rows.put(None)
                return

    async def run(connection: asyncpg.Connection) -> None:
        while (item := await rows.get()) is not None:
            row, token = item
            json.loads(row["payload"])
            async with connection.transaction():
                assert await connection.fetchval(ENTER, row["id"], token)
                await connection.execute(INBOX, row["idempotency_key"])
                await connection.execute(BUSINESS)
                await connection.execute(LEAVE, row["id"], token)
            handled.append(None)

    database = database_of(options.dsn)
    working = asyncio.gather(claim(), *map(run, connections))
    warm = await warmed(lambda: len(handled))
    before = await snapshot(observer, database)
    await working
    result = await difference(observer, before, await snapshot(observer, database), options.count - warm)
    assert await observer.fetchval("SELECT count(*) FROM orders") == options.count
    for connection in [*connections, claiming, observer]:
        await connection.close()
    return result


async def transactional_with(library: Library, options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=options.count)
    await observer.execute(ORDERS)
    claiming = await asyncpg.connect(options.dsn)
    rows: asyncio.Queue[Any] = asyncio.Queue(2 * BATCH)
    handled = list[None]()

    async def claim(put: Callable[[Any], Any]) -> None:
        statement, worker = await claiming.prepare(CLAIM), uuid.uuid4()
        while found := await statement.fetch(BATCH, worker, token := uuid.uuid4(), *START):
            for row in found:
                if (waiting := put((row, token))) is not None:
                    await waiting

    async def run(source: Any) -> None:
        while (item := await rows.get()) is not None:
            await library.by_hand(source, *item)
            handled.append(None)

    async def in_tasks(source: Any) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(PLACES):
                tasks.create_task(run(source))
            await claim(rows.put)
            for _ in range(PLACES):
                await rows.put(None)

    async def in_threads(source: Any) -> None:
        threads = HandThreads(library, source, handled)
        await claim(threads.put)
        await asyncio.to_thread(threads.join)

    database = database_of(options.dsn)
    async with library.source(options.dsn) as source:
        working = asyncio.create_task((in_tasks if library.asynchronous else in_threads)(source))
        warm = await warmed(lambda: len(handled))
        before = await snapshot(observer, database)
        await working
        result = await difference(observer, before, await snapshot(observer, database), options.count - warm)
    assert await observer.fetchval("SELECT count(*) FROM orders") == options.count
    for connection in (claiming, observer):
        await connection.close()
    return result


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Every event fails for good, with an error text of the usual length; `--kind retried`: at the second attempt."""
    observer = await prepare(options.dsn, due=options.count)
    connections = [await connect(options.dsn) for _ in range(LOOPS)]
    attempts, failed = 2 if options.kind == "retried" else 1, 0

    async def loop(connection: asyncpg.Connection) -> None:
        nonlocal failed
        retry, fail = await connection.prepare(RETRY), await connection.prepare(FAIL)
        handlers_lane = CLAIM.replace("'*/order.placed'", "'bench.handle'")  # where a retry has its route
        claims = [await connection.prepare(statement) for statement in (CLAIM, handlers_lane)[:attempts]]
        worker = uuid.uuid4()
        while failed < options.count:
            for claim in claims:
                token = uuid.uuid4()
                rows = await claim.fetch(BATCH, worker, token, *START)
                for row in rows:
                    json.loads(row["payload"])
                if rows:
                    last = rows[0]["attempts"] == attempts
                    ids = [row["id"] for row in rows]
                    await (fail if last else retry).fetch(ids, token, "RuntimeError: no such customer")
                    failed += len(rows) if last else 0

    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    await asyncio.gather(*map(loop, connections))
    result = await difference(observer, before, await snapshot(observer, database), options.count)
    assert await observer.fetchval("SELECT count(*) FROM core.failed") == options.count
    for connection in [*connections, observer]:
        await connection.close()
    return result


async def fanout(options: argparse.Namespace) -> dict[str, Any]:
    """Three rows per event: the published one is settled as split, each sibling is inserted, claimed and settled."""
    observer = await prepare(options.dsn, due=options.count)
    connection = await connect(options.dsn)
    names = [f"bench.handle_{n}" for n in range(options.handlers)]
    split = await connection.prepare(SPLIT)
    claim = await connection.prepare(CLAIM.replace("route = '*/order.placed'", "route = ANY ($6)"))
    settle = await connection.prepare(SETTLE_SIBLINGS)
    worker, delivered = uuid.uuid4(), 0
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    while True:
        await split.fetch(BATCH, names)
        token = uuid.uuid4()
        rows = await claim.fetch(BATCH * len(names), worker, token, *START, names)
        if not rows:
            break
        for row in rows:
            json.loads(row["payload"])
        await settle.fetch([row["id"] for row in rows], token)
        delivered += len(rows)
    result = await difference(observer, before, await snapshot(observer, database), options.count * len(names))
    assert delivered == options.count * len(names)
    for each in (connection, observer):
        await each.close()
    return result
