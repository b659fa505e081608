"""awa 0.6.9: a Rust runtime that calls Python handlers; an append-only ring of tables, finished jobs leave with it."""

import argparse
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
from awa import AsyncClient
from awa.bridge import insert_job

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

# 256 workers: 64 took twice as long, 512 and 1,024 were no faster, nor were two or four claimers. Claims of 256, 512
# and 1,024 cannot be told apart.
WORKERS = 256
CLAIM = 512
POOL = 10
QUEUE = "bench"
STORED = "SELECT count(*) FROM awa.ready_entries"
# The view of all jobs takes a quarter of a second for a few thousand of them, so the observer reads what it is made
# of: entries that did not end otherwise, less those in a batch of completions. Both leave with a turn of the ring.
LEFT = """
SELECT (SELECT count(*) FROM awa.ready_entries r
        WHERE NOT EXISTS (SELECT FROM awa.done_entries d WHERE d.job_id = r.job_id))
     - (SELECT coalesce(sum(completed_count), 0)::bigint FROM awa.receipt_completion_batches)
"""


@dataclass
class OrderPlaced:
    order_id: int
    customer: str
    lines: list[dict[str, Any]]


@dataclass
class Numbered:
    n: int


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[tuple[AsyncClient, asyncpg.Connection]]:
    async with AsyncClient(dsn, max_connections=POOL) as client:
        await client.migrate()
        await client.install_queue_storage()
        yield client, await observe(dsn)


def bulk(client: AsyncClient) -> Any:
    async def publish(count: int) -> None:
        jobs = [OrderPlaced(**PAYLOAD) for _ in range(count)]
        # One attempt: the first error is the last.
        await client.enqueue_many_copy(jobs, queue=QUEUE, max_attempts=1)

    return publish


@asynccontextmanager
async def worker(client: AsyncClient, kind: type, handle: Any) -> AsyncIterator[None]:
    client.task(kind, queue=QUEUE)(handle)
    await client.start([{"name": QUEUE, "max_workers": WORKERS, "claim_batch_size": CLAIM}], poll_interval_ms=50)
    yield
    await client.shutdown()


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (client, observer):
        await fill(options.count, bulk(client))
        tally = Tally(options.count)

        async def handle(job: Any) -> None:
            tally.seen()

        return await drained(options, observer, lambda: worker(client, OrderPlaced, handle), tally, LEFT)


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Terminal at the first error, and kept."""
    async with opened(options.dsn) as (client, observer):
        await fill(options.count, bulk(client))
        tally = Tally(options.count)

        async def handle(job: Any) -> None:
            tally.seen()
            raise ValueError("no")

        return await drained(options, observer, lambda: worker(client, OrderPlaced, handle), tally, LEFT)


async def publish(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (_, observer):
        connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]

        async def commit(connection: asyncpg.Connection) -> None:
            async with connection.transaction():
                await connection.execute(BUSINESS)
                await insert_job(connection, OrderPlaced(**PAYLOAD), queue=QUEUE)

        return await published(options, observer, connections, commit, STORED)


async def publish_many(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (client, observer):
        return await published_many(options, observer, bulk(client), STORED)


async def latency(options: argparse.Namespace) -> dict[str, Any]:
    async with opened(options.dsn) as (client, observer):
        connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
        handled: dict[int, float] = {}

        async def handle(job: Any) -> None:
            handled.setdefault(job.args.n, time.perf_counter())

        async def commit(connection: asyncpg.Connection, number: int) -> float:
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute(BUSINESS)
            await insert_job(connection, Numbered(number), queue=QUEUE)
            at = time.perf_counter()
            await transaction.commit()
            return at

        return await delivered(
            options, observer, connections, commit, lambda: worker(client, Numbered, handle), handled
        )


VERBS = {"drain": drain, "failures": failures, "publish": publish, "publish_many": publish_many, "latency": latency}

if __name__ == "__main__":
    quiet()
    main(VERBS, on_uvloop)
