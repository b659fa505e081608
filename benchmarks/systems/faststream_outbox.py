"""faststream-outbox 0.19: a FastStream broker over one table, whose rows are deleted when they are done."""

import argparse
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from faststream import AckPolicy
from faststream_outbox import OutboxBroker, make_dlq_table, make_outbox_table, outbox_autovacuum_ddl
from sqlalchemy import MetaData, text
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
from benchmarks.systems.idling import idled
from benchmarks.systems.process import main, on_uvloop
from benchmarks.systems.starting import started
from benchmarks.workload import EVENT_TYPE, PAYLOAD

# Two workers that delete in batches of 500 from fetches of 1,000: four with 250 are as good; one and eight workers,
# and fetches of 500, were slower. The conversion of arguments by annotation is off (a fifth of the CPU), and
# connections are SQLAlchemy Core's, which take a quarter less CPU than sessions; rates of the two were alike.
WORKERS = 2
FETCH = 1_000
FLUSH = 500
STORED = "SELECT count(*) FROM outbox"
BUSINESS_ROW = text(BUSINESS)

metadata = MetaData()
outbox = make_outbox_table(metadata, table_name="outbox")
failed = make_dlq_table(metadata)


async def install(options: argparse.Namespace) -> tuple[asyncpg.Connection, AsyncEngine]:
    observer = await observe(options.dsn)
    url = options.dsn.replace("postgresql://", "postgresql+asyncpg://", 1)
    engine = create_async_engine(url, pool_size=options.connections + WORKERS + 2)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await observer.execute(outbox_autovacuum_ddl("outbox"))
    return observer, engine


def broker_of(engine: AsyncEngine, **settings: Any) -> OutboxBroker:
    return OutboxBroker(engine, outbox_table=outbox, logger=None, apply_types=False, **settings)


def bulk(engine: AsyncEngine) -> Any:
    broker = broker_of(engine)

    async def publish(count: int) -> None:
        async with engine.begin() as connection:
            await broker.publish_batch(*[PAYLOAD] * count, queue=EVENT_TYPE, session=connection)

    return publish


@asynccontextmanager
async def worker(engine: AsyncEngine, handle: Any, broker: OutboxBroker, **policy: Any) -> AsyncIterator[None]:
    subscriber = broker.subscriber(
        EVENT_TYPE, max_workers=WORKERS, fetch_batch_size=FETCH, terminal_flush_batch_size=FLUSH, **policy
    )
    subscriber(handle)
    async with broker:
        yield
    await engine.dispose()


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    observer, engine = await install(options)
    await fill(options.count, bulk(engine))
    tally = Tally(options.count)

    async def handle(body: dict[str, Any]) -> None:
        tally.seen()

    return await drained(options, observer, lambda: worker(engine, handle, broker_of(engine)), tally, STORED)


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Terminal at the first error, and kept as a dead letter; `--kind dropped` is the default, which keeps nothing."""
    observer, engine = await install(options)
    await fill(options.count, bulk(engine))
    tally = Tally(options.count)

    async def handle(body: dict[str, Any]) -> None:
        tally.seen()
        raise ValueError("no")

    broker = broker_of(engine, dlq_table=None if options.kind == "dropped" else failed)
    policy = {"ack_policy": AckPolicy.REJECT_ON_ERROR}
    return await drained(options, observer, lambda: worker(engine, handle, broker, **policy), tally, STORED)


async def publish(options: argparse.Namespace) -> dict[str, Any]:
    observer, engine = await install(options)
    broker = broker_of(engine)
    connections = [await engine.connect() for _ in range(options.connections)]

    async def commit(connection: AsyncConnection) -> None:
        async with connection.begin():
            await connection.execute(BUSINESS_ROW)
            await broker.publish(PAYLOAD, queue=EVENT_TYPE, session=connection)

    return await published(options, observer, connections, commit, STORED)


async def publish_many(options: argparse.Namespace) -> dict[str, Any]:
    observer, engine = await install(options)
    return await published_many(options, observer, bulk(engine), STORED)


async def latency(options: argparse.Namespace) -> dict[str, Any]:
    observer, engine = await install(options)
    broker = broker_of(engine)
    connections = [await engine.connect() for _ in range(options.connections)]
    handled: dict[int, float] = {}

    async def handle(body: dict[str, Any]) -> None:
        handled.setdefault(body["n"], time.perf_counter())

    async def commit(connection: AsyncConnection, number: int) -> float:
        transaction = await connection.begin()
        await connection.execute(BUSINESS_ROW)
        await broker.publish({"n": number}, queue=EVENT_TYPE, session=connection)
        at = time.perf_counter()
        await transaction.commit()
        return at

    return await delivered(options, observer, connections, commit, lambda: worker(engine, handle, broker), handled)


async def start(options: argparse.Namespace) -> dict[str, Any]:
    observer, engine = await install(options)
    return await started(options.dsn, options.count, observer, bulk(engine), STORED, "faststream_outbox")


async def idle(options: argparse.Namespace) -> dict[str, Any]:
    observer, engine = await install(options)
    await engine.dispose()
    return await idled(options, observer, "faststream_outbox")


VERBS = {each.__name__: each for each in (drain, failures, idle, latency, publish, publish_many, start)}

if __name__ == "__main__":
    quiet()
    main(VERBS, on_uvloop)
