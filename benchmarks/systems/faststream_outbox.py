"""faststream-outbox 0.19: a FastStream broker over one table, whose rows are deleted when they are done."""

import argparse
import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
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
from benchmarks.workload import EVENT_TYPE, PAYLOAD, SLOW_TYPE

# Two workers that delete in batches of 500 from fetches of 1,000: four with 250 are as good; one and eight workers,
# and fetches of 500, were slower. The conversion of arguments by annotation is off (a fifth of the CPU), and
# connections are SQLAlchemy Core's, which take a quarter less CPU than sessions; rates of the two were alike.
WORKERS = 2
# Of handlers that wait, or run in threads.
WAITING = 64
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
    engine = create_async_engine(url, pool_size=options.connections + WAITING + 2)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await observer.execute(outbox_autovacuum_ddl("outbox"))
    return observer, engine


def broker_of(engine: AsyncEngine, **settings: Any) -> OutboxBroker:
    return OutboxBroker(engine, **{"outbox_table": outbox, "logger": None, "apply_types": False, **settings})


def bulk(engine: AsyncEngine, queue: str = EVENT_TYPE) -> Any:
    broker = broker_of(engine)

    async def publish(count: int) -> None:
        async with engine.begin() as connection:
            await broker.publish_batch(*[PAYLOAD] * count, queue=queue, session=connection)

    return publish


@asynccontextmanager
async def worker(
    engine: AsyncEngine, handle: Any, broker: OutboxBroker, workers: int = WORKERS, **policy: Any
) -> AsyncIterator[None]:
    subscriber = broker.subscriber(
        EVENT_TYPE, max_workers=workers, fetch_batch_size=FETCH, terminal_flush_batch_size=FLUSH, **policy
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
        if options.pause:
            await asyncio.sleep(options.pause)
        tally.seen()

    def block(body: dict[str, Any]) -> None:
        tally.seen()

    handler = block if options.kind == "sync" else handle
    workers = WAITING if options.pause or options.kind == "sync" else WORKERS
    broker = broker_of(engine)
    return await drained(options, observer, lambda: worker(engine, handler, broker, workers), tally, STORED)


async def neighbour(options: argparse.Namespace) -> dict[str, Any]:
    """A quick handler, and a slow one whose rows are older; each has workers of its own."""
    observer, engine = await install(options)
    await fill(options.open, bulk(engine, SLOW_TYPE))
    await fill(options.count, bulk(engine))
    tally, broker = Tally(options.count), broker_of(engine)

    async def slow(body: dict[str, Any]) -> None:
        await asyncio.sleep(options.pause)

    async def handle(body: dict[str, Any]) -> None:
        tally.seen()

    broker.subscriber(SLOW_TYPE, max_workers=WAITING, fetch_batch_size=FETCH, terminal_flush_batch_size=FLUSH)(slow)
    return await reached(options, observer, lambda: worker(engine, handle, broker), tally)


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Terminal at the first error, and kept as a dead letter; `--kind dropped` is the default, which keeps nothing."""
    observer, engine = await install(options)
    await fill(options.count, bulk(engine))
    tally = Tally(options.count)

    async def handle(body: dict[str, Any]) -> None:
        tally.seen()
        raise ValueError("no")

    if options.observed == "log":
        logged()
    # Its own log has two lines for each event at the level that it has by default. Failures are warnings and worse.
    log = {"logger": logging.getLogger("faststream")} if options.observed == "log" else {}
    broker = broker_of(engine, dlq_table=None if options.kind == "dropped" else failed, **log)
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


async def steady(options: argparse.Namespace) -> dict[str, Any]:
    observer, engine = await install(options)
    broker = broker_of(engine)
    connections = [await engine.connect() for _ in range(options.connections)]
    handled: dict[int, float] = {}

    async def handle(body: dict[str, Any]) -> None:
        handled.setdefault(body["n"], time.perf_counter())

    async def commit(connection: AsyncConnection, numbers: Sequence[int]) -> float:
        transaction = await connection.begin()
        await connection.execute(BUSINESS_ROW)
        await broker.publish_batch(*({"n": number} for number in numbers), queue=EVENT_TYPE, session=connection)
        at = time.perf_counter()
        await transaction.commit()
        return at

    return await steadily(options, observer, connections, commit, lambda: worker(engine, handle, broker), handled)


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


VERBS = {
    each.__name__: each for each in (drain, failures, idle, latency, neighbour, publish, publish_many, start, steady)
}

if __name__ == "__main__":
    quiet()
    main(VERBS, on_uvloop)
