"""pgqueuer 1.6: jobs leave the queue table for a log table in batches when they are done."""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from pgqueuer import AsyncpgDriver, Job, PgQueuer, Queries

from benchmarks.systems.harness import (
    BUSINESS,
    Tally,
    delivered,
    drained,
    fill,
    logged,
    observe,
    published,
    published_many,
    quiet,
    reached,
    steadily,
)
from benchmarks.systems.idling import idled
from benchmarks.systems.process import main, on_uvloop
from benchmarks.systems.starting import started
from benchmarks.workload import EVENT_TYPE, EVENT_TYPES, PAYLOAD, SLOW_TYPE

# Batches of 1,000 and 2,000 cannot be told apart and beat 200 and 500; nor can a pool and a single connection. All
# else is the default, which keeps all tables logged and any number of jobs in flight.
BATCH = 1_000
POOL = 4
STORED = "SELECT count(*) FROM pgqueuer"
LEFT = "SELECT count(*) FROM pgqueuer WHERE status <> 'failed'"


async def install(dsn: str) -> asyncpg.Connection:
    observer = await observe(dsn)
    await Queries(AsyncpgDriver(observer)).install()
    return observer


def bulk(connection: asyncpg.Connection, entrypoint: str = EVENT_TYPE) -> Any:
    queries = Queries(AsyncpgDriver(connection))

    async def publish(count: int) -> None:
        bodies = [json.dumps(PAYLOAD).encode() for _ in range(count)]
        async with connection.transaction():
            await queries.enqueue([entrypoint] * count, bodies, [0] * count)

    return publish


@asynccontextmanager
async def worker(dsn: str, handle: Any, on_failure: Any = "delete") -> AsyncIterator[None]:
    async with asyncpg.create_pool(dsn, min_size=POOL, max_size=POOL) as pool:
        queuer = PgQueuer.from_asyncpg_pool(pool)
        queuer.entrypoint(EVENT_TYPE, on_failure=on_failure)(handle)
        running = asyncio.create_task(queuer.run(batch_size=BATCH))
        yield
        queuer.shutdown.set()
        await running


@asynccontextmanager
async def serving(dsn: str, handlers: Mapping[str, Any]) -> AsyncIterator[None]:
    """A worker of several entrypoints."""
    async with asyncpg.create_pool(dsn, min_size=POOL, max_size=POOL) as pool:
        queuer = PgQueuer.from_asyncpg_pool(pool)
        for name, handle in handlers.items():
            queuer.entrypoint(name)(handle)
        running = asyncio.create_task(queuer.run(batch_size=BATCH))
        yield
        queuer.shutdown.set()
        running.cancel()
        await asyncio.wait((running,))


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    observer = await install(options.dsn)
    await fill(options.count, bulk(observer))
    tally = Tally(options.count)

    async def handle(job: Job) -> None:
        json.loads(job.payload or b"")
        if options.pause:
            await asyncio.sleep(options.pause)
        tally.seen()

    async def block(job: Job) -> None:
        json.loads(job.payload or b"")
        await asyncio.to_thread(tally.seen)  # as it says to do with code that blocks

    handler = block if options.kind == "sync" else handle
    return await drained(options, observer, lambda: worker(options.dsn, handler), tally, LEFT)


async def neighbour(options: argparse.Namespace) -> dict[str, Any]:
    """A quick handler, and a slow one whose jobs are older."""
    observer = await install(options.dsn)
    await fill(options.open, bulk(observer, SLOW_TYPE))
    await fill(options.count, bulk(observer))
    tally = Tally(options.count)

    async def slow(job: Job) -> None:
        await asyncio.sleep(options.pause)

    async def handle(job: Job) -> None:
        json.loads(job.payload or b"")
        tally.seen()

    handlers = {SLOW_TYPE: slow, EVENT_TYPE: handle}
    return await reached(options, observer, lambda: serving(options.dsn, handlers), tally)


async def types(options: argparse.Namespace) -> dict[str, Any]:
    """A job for each handler of each event, because a job has one handler."""
    observer = await install(options.dsn)
    names = [f"{event_type}/{number}" for event_type in EVENT_TYPES for number in range(options.handlers)]
    options.count *= options.handlers
    for name in names:
        await bulk(observer, name)(options.count // len(names))
    tally = Tally(options.count)

    async def handle(job: Job) -> None:
        json.loads(job.payload or b"")
        tally.seen()

    return await drained(options, observer, lambda: serving(options.dsn, dict.fromkeys(names, handle)), tally, LEFT)


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Terminal at the first error, and kept; `--kind dropped` is the default, which keeps the traceback alone."""
    observer = await install(options.dsn)
    await fill(options.count, bulk(observer))
    tally = Tally(options.count)

    async def handle(job: Job) -> None:
        tally.seen()
        raise ValueError("no")

    if options.observed == "log":
        logged()
    on_failure = "delete" if options.kind == "dropped" else "hold"
    return await drained(options, observer, lambda: worker(options.dsn, handle, on_failure), tally, LEFT)


async def publish(options: argparse.Namespace) -> dict[str, Any]:
    observer = await install(options.dsn)
    connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
    queries = {connection: Queries(AsyncpgDriver(connection)) for connection in connections}

    async def commit(connection: asyncpg.Connection) -> None:
        async with connection.transaction():
            await connection.execute(BUSINESS)
            await queries[connection].enqueue(EVENT_TYPE, json.dumps(PAYLOAD).encode())

    return await published(options, observer, connections, commit, STORED)


async def publish_many(options: argparse.Namespace) -> dict[str, Any]:
    observer = await install(options.dsn)
    return await published_many(options, observer, bulk(observer), STORED)


async def steady(options: argparse.Namespace) -> dict[str, Any]:
    observer = await install(options.dsn)
    connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
    queries = {connection: Queries(AsyncpgDriver(connection)) for connection in connections}
    handled: dict[int, float] = {}

    async def handle(job: Job) -> None:
        handled.setdefault(json.loads(job.payload or b"")["n"], time.perf_counter())

    async def commit(connection: asyncpg.Connection, numbers: Sequence[int]) -> float:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(BUSINESS)
        bodies: list[bytes | None] = [json.dumps({"n": number}).encode() for number in numbers]
        await queries[connection].enqueue([EVENT_TYPE] * len(bodies), bodies, [0] * len(bodies))
        at = time.perf_counter()
        await transaction.commit()
        return at

    return await steadily(options, observer, connections, commit, lambda: worker(options.dsn, handle), handled)


async def latency(options: argparse.Namespace) -> dict[str, Any]:
    observer = await install(options.dsn)
    connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
    queries = {connection: Queries(AsyncpgDriver(connection)) for connection in connections}
    handled: dict[int, float] = {}

    async def handle(job: Job) -> None:
        handled.setdefault(json.loads(job.payload or b"")["n"], time.perf_counter())

    async def commit(connection: asyncpg.Connection, number: int) -> float:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(BUSINESS)
        await queries[connection].enqueue(EVENT_TYPE, json.dumps({"n": number}).encode())
        at = time.perf_counter()
        await transaction.commit()
        return at

    return await delivered(options, observer, connections, commit, lambda: worker(options.dsn, handle), handled)


async def start(options: argparse.Namespace) -> dict[str, Any]:
    observer = await install(options.dsn)
    return await started(options.dsn, options.count, observer, bulk(observer), LEFT, "pgqueuer")


async def idle(options: argparse.Namespace) -> dict[str, Any]:
    observer = await install(options.dsn)
    return await idled(options, observer, "pgqueuer")


VERBS = {
    each.__name__: each
    for each in (drain, failures, idle, latency, neighbour, publish, publish_many, start, steady, types)
}

if __name__ == "__main__":
    quiet()
    main(VERBS, on_uvloop)
