"""Workers with the loads of applications: a slow neighbour, a steady stream, many event types."""

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

import asyncpg

from benchmarks.counters import difference, snapshot
from benchmarks.systems.harness import BUSINESS, ORDERS, steadily
from benchmarks.systems.process import database_of
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE, EVENT_TYPES, PAYLOAD, SLOW_TYPE
from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, Worker


async def neighbour(options: argparse.Namespace) -> dict[str, Any]:
    """A quick handler and a slow one that has `--open` events, older than those of the quick one."""
    observer = await prepare(options.dsn, due=0)
    await observer.close()
    observer = await prepare(options.dsn, due=options.open)
    await observer.execute("UPDATE core.outbox SET event_type = $1", SLOW_TYPE)
    await observer.close()
    observer = await prepare(options.dsn, due=options.count)
    registry, handled, finished = HandlerRegistry(), 0, asyncio.Event()

    @registry.handler(SLOW_TYPE, name="bench.slow")
    async def slow(event: EventEnvelope) -> None:
        await asyncio.sleep(options.pause)

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(event: EventEnvelope) -> None:
        nonlocal handled
        handled += 1
        if handled == options.count:
            finished.set()

    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    worker = Worker(options.dsn, registry)
    async with worker:
        await finished.wait()
        after = await snapshot(observer, database)
        concurrency = worker.concurrency
    result = await difference(observer, before, after, options.count)
    await observer.close()
    return result | {"concurrency": concurrency}


async def steady(options: argparse.Namespace) -> dict[str, Any]:
    """From commit to handler, `--each` events per transaction."""
    observer = await prepare(options.dsn, due=0)
    await observer.execute(ORDERS)
    connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
    registry, publisher = HandlerRegistry(), Publisher("shop")
    handled: dict[int, float] = {}

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(event: EventEnvelope) -> None:
        handled[event.payload["n"]] = time.perf_counter()

    async def commit(connection: asyncpg.Connection, numbers: Sequence[int]) -> float:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(BUSINESS)
        if len(numbers) == 1:
            await publisher.publish(connection, EVENT_TYPE, {"n": numbers[0]})
        else:
            await publisher.publish_many(connection, [NewEvent(EVENT_TYPE, {"n": number}) for number in numbers])
        at = time.perf_counter()
        await transaction.commit()
        return at

    worker = Worker(options.dsn, registry)
    return await steadily(options, observer, connections, commit, lambda: worker, handled)


async def types(options: argparse.Namespace) -> dict[str, Any]:
    """Many event types, each with `--handlers` handlers; each event has a delivery for each of its handlers."""
    observer = await prepare(options.dsn, due=0)
    publisher = Publisher("shop")
    events = [NewEvent(EVENT_TYPES[n % len(EVENT_TYPES)], PAYLOAD) for n in range(options.count)]
    registry, handled = HandlerRegistry(), 0

    async def handle(event: EventEnvelope) -> None:
        nonlocal handled
        handled += 1

    for event_type in EVENT_TYPES:
        for number in range(options.handlers):
            registry.add(f"bench.{event_type.replace('.', '_')}_{number}", (event_type,), handle)
    async with observer.transaction():
        await publisher.publish_many(observer, events)
    deliveries, database = options.count * options.handlers, database_of(options.dsn)
    worker = Worker(options.dsn, registry)
    before = await snapshot(observer, database)
    async with worker:
        while handled < deliveries or worker.in_flight:
            await asyncio.sleep(0.002)
        after = await snapshot(observer, database)
    result = await difference(observer, before, after, deliveries)
    await observer.close()
    return result
