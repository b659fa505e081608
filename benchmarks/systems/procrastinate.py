"""procrastinate 3.10: one fetch and one finish per job, an event row for each change; jobs are kept."""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import psycopg
from procrastinate import App, PsycopgConnector
from psycopg_pool import AsyncConnectionPool

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

# Ten jobs at once (of 1, 4, 10 and 30). Statements commit by themselves, on a pool of ours that does not test each
# connection before it is used: with the library's own pool it took half as long again. Bulk in batches of 500; of 100
# to 2,500 all cost about the same.
CONCURRENCY = 10
POOL = 6
BATCH = 500
STORED = "SELECT count(*) FROM procrastinate_jobs"
LEFT = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[App]:
    async def configure(connection: psycopg.AsyncConnection) -> None:
        await connection.set_autocommit(True)

    app = App(connector=PsycopgConnector())
    pool = AsyncConnectionPool(dsn, min_size=POOL, max_size=POOL, open=False, configure=configure)
    async with pool, app.open_async(pool):
        yield app


async def install(dsn: str, app: App) -> asyncpg.Connection:
    observer = await observe(dsn)
    await app.schema_manager.apply_schema_async()
    return observer


def bulk(task: Any) -> Any:
    async def publish(count: int) -> None:
        for start in range(0, count, BATCH):
            await task.batch_defer_async(*[PAYLOAD] * min(BATCH, count - start))

    return publish


@asynccontextmanager
async def worker(app: App) -> AsyncIterator[None]:
    running = asyncio.create_task(app.run_worker_async(concurrency=CONCURRENCY, install_signal_handlers=False))
    yield
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as app:
        observer = await install(options.dsn, app)
        tally = Tally(options.count)

        @app.task(name=EVENT_TYPE)
        async def handle(**payload: Any) -> None:
            tally.seen()

        await fill(options.count, bulk(handle))
        return await drained(options, observer, lambda: worker(app), tally, LEFT)


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Terminal at the first error and kept, which is the default."""
    async with opened(options.dsn) as app:
        observer = await install(options.dsn, app)
        tally = Tally(options.count)

        @app.task(name=EVENT_TYPE)
        async def handle(**payload: Any) -> None:
            tally.seen()
            raise ValueError("no")

        await fill(options.count, bulk(handle))
        return await drained(options, observer, lambda: worker(app), tally, LEFT)


async def publish(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as app:
        observer = await install(options.dsn, app)
        connections = [await psycopg.AsyncConnection.connect(options.dsn) for _ in range(options.connections)]

        async def commit(connection: psycopg.AsyncConnection) -> None:
            await connection.execute(BUSINESS)
            await app.configure_task(EVENT_TYPE, connection=connection).defer_async(**PAYLOAD)
            await connection.commit()

        return await published(options, observer, connections, commit, STORED)


async def publish_many(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as app:
        observer = await install(options.dsn, app)
        return await published_many(options, observer, bulk(app.configure_task(EVENT_TYPE)), STORED)


async def latency(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as app:
        observer = await install(options.dsn, app)
        connections = [await psycopg.AsyncConnection.connect(options.dsn) for _ in range(options.connections)]
        handled: dict[int, float] = {}

        @app.task(name=EVENT_TYPE)
        async def handle(n: int) -> None:
            handled.setdefault(n, time.perf_counter())

        async def commit(connection: psycopg.AsyncConnection, number: int) -> float:
            await connection.execute(BUSINESS)
            await handle.configure(connection=connection).defer_async(n=number)
            at = time.perf_counter()
            await connection.commit()
            return at

        return await delivered(options, observer, connections, commit, lambda: worker(app), handled)


VERBS = {"drain": drain, "failures": failures, "publish": publish, "publish_many": publish_many, "latency": latency}

if __name__ == "__main__":
    quiet()
    main(VERBS, on_uvloop)
