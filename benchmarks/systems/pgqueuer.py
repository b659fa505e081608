"""pgqueuer 1.6: jobs leave the queue table for a log table in batches when they are done."""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
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
    observe,
    published,
    published_many,
    quiet,
)
from benchmarks.systems.idling import idled
from benchmarks.systems.process import main, on_uvloop
from benchmarks.systems.starting import started
from benchmarks.workload import EVENT_TYPE, PAYLOAD

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


def bulk(connection: asyncpg.Connection) -> Any:
    queries = Queries(AsyncpgDriver(connection))

    async def publish(count: int) -> None:
        bodies = [json.dumps(PAYLOAD).encode() for _ in range(count)]
        async with connection.transaction():
            await queries.enqueue([EVENT_TYPE] * count, bodies, [0] * count)

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


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    observer = await install(options.dsn)
    await fill(options.count, bulk(observer))
    tally = Tally(options.count)

    async def handle(job: Job) -> None:
        json.loads(job.payload or b"")
        tally.seen()

    return await drained(options, observer, lambda: worker(options.dsn, handle), tally, LEFT)


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Terminal at the first error, and kept; `--kind dropped` is the default, which keeps the traceback alone."""
    observer = await install(options.dsn)
    await fill(options.count, bulk(observer))
    tally = Tally(options.count)

    async def handle(job: Job) -> None:
        tally.seen()
        raise ValueError("no")

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


VERBS = {each.__name__: each for each in (drain, failures, idle, latency, publish, publish_many, start)}

if __name__ == "__main__":
    quiet()
    main(VERBS, on_uvloop)
