"""Oban for Python 0.6: claims in batches, one acknowledging update per job in a shared transaction; jobs are kept."""

import argparse
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import psycopg
from oban import Job, Oban, worker
from oban.schema import install
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
from benchmarks.workload import PAYLOAD

# A limit of 1,000 jobs at once: 1,000 and 2,000 cannot be told apart, and did better than 50, 200 and 500.
LIMIT = 1_000
POOL = 6
QUEUE = "bench"
STORED = "SELECT count(*) FROM oban_jobs"
LEFT = "SELECT count(*) FROM oban_jobs WHERE state NOT IN ('completed', 'discarded')"


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[tuple[AsyncConnectionPool, asyncpg.Connection]]:
    async with AsyncConnectionPool(dsn, min_size=POOL, max_size=POOL, open=False) as pool:
        await install(pool)
        yield pool, await observe(dsn)


def handler(reaction: Callable[[Job], None]) -> Any:
    # One attempt: the first error is the last.
    @worker(queue=QUEUE, max_attempts=1)
    class Handler:
        async def process(self, job: Job) -> None:
            reaction(job)

    return Handler


def bulk(pool: AsyncConnectionPool, jobs: Any) -> Any:
    client = Oban(pool=pool, name="client")

    async def publish(count: int) -> None:
        await client.enqueue_many(jobs.new(PAYLOAD) for _ in range(count))

    return publish


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (pool, observer):
        tally = Tally(options.count)
        await fill(options.count, bulk(pool, handler(lambda _: tally.seen())))
        return await drained(options, observer, lambda: Oban(pool=pool, queues={QUEUE: LIMIT}), tally, LEFT)


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Terminal at the first error, and kept."""
    async with opened(options.dsn) as (pool, observer):
        tally = Tally(options.count)

        def fail(_: Job) -> None:
            tally.seen()
            raise ValueError("no")

        await fill(options.count, bulk(pool, handler(fail)))
        return await drained(options, observer, lambda: Oban(pool=pool, queues={QUEUE: LIMIT}), tally, LEFT)


async def publish(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (pool, observer):
        client, jobs = Oban(pool=pool, name="client"), handler(lambda _: None)
        connections = [await psycopg.AsyncConnection.connect(options.dsn) for _ in range(options.connections)]

        async def commit(connection: psycopg.AsyncConnection) -> None:
            await connection.execute(BUSINESS)
            await client.enqueue(jobs.new(PAYLOAD), conn=connection)
            await connection.commit()

        return await published(options, observer, connections, commit, STORED)


async def publish_many(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (pool, observer):
        return await published_many(options, observer, bulk(pool, handler(lambda _: None)), STORED)


async def latency(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (pool, observer):
        client, handled = Oban(pool=pool, name="client"), dict[int, float]()
        jobs = handler(lambda job: handled.setdefault(job.args["n"], time.perf_counter()) and None)
        connections = [await psycopg.AsyncConnection.connect(options.dsn) for _ in range(options.connections)]

        async def commit(connection: psycopg.AsyncConnection, number: int) -> float:
            await connection.execute(BUSINESS)
            await client.enqueue(jobs.new({"n": number}), conn=connection)
            at = time.perf_counter()
            await connection.commit()
            return at

        served = {QUEUE: LIMIT}
        return await delivered(options, observer, connections, commit, lambda: Oban(pool=pool, queues=served), handled)


VERBS = {"drain": drain, "failures": failures, "publish": publish, "publish_many": publish_many, "latency": latency}

if __name__ == "__main__":
    quiet()
    main(VERBS, on_uvloop)
