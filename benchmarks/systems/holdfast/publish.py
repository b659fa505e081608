"""Publishing: one event per transaction, and in bulk."""

import argparse
from typing import Any

import asyncpg

from benchmarks.counters import difference, snapshot
from benchmarks.systems import together
from benchmarks.systems.harness import BUSINESS
from benchmarks.systems.process import database_of
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE, PAYLOAD
from holdfast import NewEvent, Publisher
from holdfast.postgres.wakeup import mode as wakeup_mode


async def publish(options: argparse.Namespace) -> dict[str, Any]:
    return await together.publish("holdfast", options, lambda _: wakeup_mode.set_mode(options.dsn, options.notify))


async def produce(options: argparse.Namespace) -> dict[str, Any]:
    publisher = Publisher("shop")

    async def commit(connection: asyncpg.Connection) -> None:
        async with connection.transaction():
            if not options.bare:
                await connection.execute(BUSINESS)
            await publisher.publish(connection, EVENT_TYPE, PAYLOAD)

    async def alone(connection: asyncpg.Connection) -> None:
        await publisher.publish_alone(connection, EVENT_TYPE, PAYLOAD)

    return await together.produce(options, alone if options.kind == "alone" else commit)


async def publish_many(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=0)
    publisher = Publisher("shop")
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    for start in range(0, options.count, 5_000):
        events = [NewEvent(EVENT_TYPE, PAYLOAD) for _ in range(min(5_000, options.count - start))]
        async with observer.transaction():
            await publisher.publish_many(observer, events)
    result = await difference(observer, before, await snapshot(observer, database), options.count)
    await observer.close()
    return result
