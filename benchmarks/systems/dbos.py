"""DBOS 3.3: durable workflows on a polled queue, one transaction per end; workflows and their outputs are kept."""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from dbos import DBOS, DBOSClient, DBOSConfig, EnqueueOptions
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

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
from benchmarks.systems.process import main, on_uvloop
from benchmarks.workload import EVENT_TYPE, PAYLOAD

# 16 threads: 2 to 8 were slower, 32 no faster, with a connection for each; asynchronous workflows cannot be told
# apart. Without a limit on concurrency one poll claims all that waits, so it polls seldom for a backlog and often for
# latency.
THREADS = 16
POOL = 20
SELDOM, OFTEN = 0.1, 0.002
QUEUE = "bench"
WORKFLOW: EnqueueOptions = {"workflow_name": EVENT_TYPE, "queue_name": QUEUE}
STORED = "SELECT count(*) FROM dbos.workflow_status"
LEFT = "SELECT count(*) FROM dbos.workflow_status WHERE status NOT IN ('SUCCESS', 'ERROR')"
BUSINESS_ROW = text(BUSINESS)


@asynccontextmanager
async def opened(
    options: argparse.Namespace, poll_seconds: float = SELDOM
) -> AsyncIterator[tuple[asyncpg.Connection, DBOSClient, AsyncEngine]]:
    await asyncio.to_thread(DBOS.migrate, options.dsn)
    client = await asyncio.to_thread(lambda: DBOSClient(system_database_url=options.dsn))
    url = options.dsn.replace("postgresql://", "postgresql+psycopg://", 1)
    engine = create_async_engine(url, pool_size=options.connections + 1)
    await client.register_queue_async(QUEUE, polling_interval_sec=poll_seconds)
    yield await observe(options.dsn), client, engine
    await engine.dispose()
    await asyncio.to_thread(client.destroy)


def bulk(client: DBOSClient, engine: AsyncEngine) -> Any:
    def enqueue(connection: Connection, count: int) -> None:
        for _ in range(count):
            client.enqueue_in_transaction(connection, WORKFLOW, PAYLOAD)

    async def publish(count: int) -> None:
        async with engine.begin() as connection:
            await connection.run_sync(enqueue, count)

    return publish


@asynccontextmanager
async def worker(dsn: str, reaction: Callable[[dict[str, Any]], None]) -> AsyncIterator[None]:
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": dsn,
        "sys_db_pool_size": POOL,
        "max_executor_threads": THREADS,
        "run_migrations": False,
    }
    DBOS(config=config)

    @DBOS.workflow(name=EVENT_TYPE)
    def handle(payload: dict[str, Any]) -> None:
        reaction(payload)

    await asyncio.to_thread(DBOS.launch)
    yield
    await asyncio.to_thread(DBOS.destroy)


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options) as (observer, client, engine):
        await fill(options.count, bulk(client, engine))
        tally = Tally(options.count)
        return await drained(options, observer, lambda: worker(options.dsn, lambda _: tally.seen()), tally, LEFT)


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Terminal at the first error and kept, which is the default for workflows."""
    async with opened(options) as (observer, client, engine):
        await fill(options.count, bulk(client, engine))
        tally = Tally(options.count)

        def fail(_: dict[str, Any]) -> None:
            tally.seen()
            raise ValueError("no")

        return await drained(options, observer, lambda: worker(options.dsn, fail), tally, LEFT)


async def publish(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options) as (observer, client, engine):
        connections = [await engine.connect() for _ in range(options.connections)]

        def both(connection: Connection) -> None:
            connection.execute(BUSINESS_ROW)
            client.enqueue_in_transaction(connection, WORKFLOW, PAYLOAD)

        async def commit(connection: AsyncConnection) -> None:
            await connection.run_sync(both)
            await connection.commit()

        return await published(options, observer, connections, commit, STORED)


async def publish_many(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options) as (observer, client, engine):
        return await published_many(options, observer, bulk(client, engine), STORED)


async def latency(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options, OFTEN) as (observer, client, engine):
        connections = [await engine.connect() for _ in range(options.connections)]
        handled: dict[int, float] = {}

        def handle(payload: dict[str, Any]) -> None:
            handled.setdefault(payload["n"], time.perf_counter())

        def both(connection: Connection, number: int) -> None:
            connection.execute(BUSINESS_ROW)
            client.enqueue_in_transaction(connection, WORKFLOW, {"n": number})

        async def commit(connection: AsyncConnection, number: int) -> float:
            await connection.run_sync(both, number)
            at = time.perf_counter()
            await connection.commit()
            return at

        return await delivered(options, observer, connections, commit, lambda: worker(options.dsn, handle), handled)


VERBS = {"drain": drain, "failures": failures, "publish": publish, "publish_many": publish_many, "latency": latency}

if __name__ == "__main__":
    quiet()
    main(VERBS, on_uvloop)
