"""Holdfast itself, with every guarantee on and default settings."""

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Any

import asyncpg

from benchmarks.counters import difference, peak_rss_mb, snapshot
from benchmarks.systems.process import database_of, main
from benchmarks.systems.raw import BUSINESS, timed_producers
from benchmarks.systems.tables import held_snapshot, prepare, quarters
from benchmarks.workload import EVENT_TYPE, PAYLOAD, quantile
from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, RetryPolicy, Worker
from holdfast.worker import process


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=options.count, size=options.size, kept=options.kept)
    holder = await held_snapshot(options.dsn) if options.hold else None
    registry, finished = HandlerRegistry(), asyncio.Event()
    marks: list[tuple[float, int]] = []
    handled = 0

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(event: EventEnvelope) -> None:
        nonlocal handled
        handled += 1
        if handled % 500 == 0:
            marks.append((time.perf_counter(), handled))
        if handled == options.count:
            finished.set()

    worker = Worker(options.dsn, registry, observers=())
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    async with worker:
        await finished.wait()
        await settled(worker)
        after = await snapshot(observer, database)
    result = difference(before, after, options.count)
    counters = worker.counters
    result |= {
        "last_to_first": round(quarters(marks), 3),
        "round_trips": round((counters.claims + counters.settles) / options.count, 4),
        "rss_mb": peak_rss_mb(),
    }
    for connection in [observer, *([holder] if holder else [])]:
        await connection.close()
    return result


async def deliver_all(
    options: argparse.Namespace, observer: Any, registry: HandlerRegistry, deliveries: int, done: Callable[[], bool]
) -> dict[str, Any]:
    """Run a worker until everything is done and settled."""
    worker = Worker(options.dsn, registry, observers=())
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    async with worker:
        while not done() or worker.held:
            await asyncio.sleep(0.002)
        after = await snapshot(observer, database)
    return difference(before, after, deliveries)


async def transactional(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=options.count)
    await observer.execute("CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text)")
    registry, handled = HandlerRegistry(), 0

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        nonlocal handled
        await tx.execute(BUSINESS)
        handled += 1

    result = await deliver_all(options, observer, registry, options.count, lambda: handled >= options.count)
    assert await observer.fetchval("SELECT count(*) FROM orders") == options.count
    await observer.close()
    return result


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Every handler raises: for good at the first error, or (`--kind retried`) after one retry."""
    observer = await prepare(options.dsn, due=options.count)
    attempts = 2 if options.kind == "retried" else 1
    registry, raised = HandlerRegistry(), 0

    @registry.handler(EVENT_TYPE, name="bench.handle", retry=RetryPolicy(max_attempts=attempts, base_delay=0.001))
    async def handle(event: EventEnvelope) -> None:
        nonlocal raised
        raised += 1
        raise RuntimeError("no such customer")

    result = await deliver_all(options, observer, registry, options.count, lambda: raised >= attempts * options.count)
    assert await observer.fetchval("SELECT count(*) FROM core.failed") == options.count
    await observer.close()
    return result


async def fanout(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=options.count)
    registry, handled = HandlerRegistry(), 0

    async def handle(event: EventEnvelope) -> None:
        nonlocal handled
        handled += 1

    for number in range(options.handlers):
        registry.add(f"bench.handle_{number}", (EVENT_TYPE,), handle)
    deliveries = options.count * options.handlers
    result = await deliver_all(options, observer, registry, deliveries, lambda: handled >= deliveries)
    await observer.close()
    return result


async def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Resident memory of a worker process with a backlog: it works through some of it, and its peak is read."""
    observer = await prepare(options.dsn, due=options.count, size=options.size)
    registry, handled = HandlerRegistry(), 0

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(event: EventEnvelope) -> None:
        nonlocal handled
        handled += 1
        await asyncio.sleep(0.01)

    target = min(options.count, options.kept or options.count)
    worker = Worker(options.dsn, registry, observers=())
    async with worker:
        while handled < target:
            await asyncio.sleep(0.01)
    await observer.close()
    return {"events": options.count, "per_second": 0.0, "rss_mb": peak_rss_mb()}


async def settled(worker: Worker) -> None:
    while worker.held:
        await asyncio.sleep(0.001)


async def publish(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=0)
    await observer.execute("CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text)")
    if options.notify == "never":
        await observer.execute("ALTER TABLE core.outbox DISABLE TRIGGER outbox_bell")
    publisher = Publisher("shop")
    stop = time.perf_counter() + options.seconds
    commits = 0

    async def producer(connection: asyncpg.Connection) -> None:
        nonlocal commits
        while time.perf_counter() < stop:
            async with connection.transaction():
                await connection.execute(BUSINESS)
                await publisher.publish(connection, EVENT_TYPE, PAYLOAD)
            commits += 1

    return await timed_producers(options, observer, producer, lambda: commits)


async def publish_many(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=0)
    publisher = Publisher("shop")
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    for start in range(0, options.count, 5_000):
        events = [NewEvent(EVENT_TYPE, PAYLOAD) for _ in range(min(5_000, options.count - start))]
        async with observer.transaction():
            await publisher.publish_many(observer, events)
    result = difference(before, await snapshot(observer, database), options.count)
    await observer.close()
    return result


async def latency(options: argparse.Namespace) -> dict[str, Any]:
    """Commit to handler at a steady rate; and how many notifications the producers sent for it."""
    observer = await prepare(options.dsn, due=0)
    await observer.execute("CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text)")
    registry, publisher = HandlerRegistry(), Publisher("shop")
    committed: dict[int, float] = {}
    waits: list[float] = []
    handled: dict[int, float] = {}
    rung = 0

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(event: EventEnvelope) -> None:
        handled[event.payload["n"]] = time.perf_counter()

    def ring(*_: object) -> None:
        nonlocal rung
        rung += 1

    await observer.add_listener("outbox_default", ring)
    worker = Worker(options.dsn, registry, observers=())
    async with worker:
        while not worker.listening:
            await asyncio.sleep(0.01)
        stop = time.perf_counter() + options.seconds
        numbers = iter(range(10**9))

        async def producer() -> None:
            connection = await asyncpg.connect(options.dsn)
            due = time.perf_counter()
            while time.perf_counter() < stop:
                number = next(numbers)
                transaction = connection.transaction()
                await transaction.start()
                await connection.execute(BUSINESS)
                await publisher.publish(connection, EVENT_TYPE, {"n": number})
                # The commit is visible somewhere between these two readings; the earlier one is the honest one.
                committed[number] = time.perf_counter()
                await transaction.commit()
                if options.rate:
                    due += options.connections / options.rate
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await connection.close()

        await asyncio.gather(*(producer() for _ in range(options.connections)))
        async with asyncio.timeout(30):
            while len(handled) < len(committed):
                await asyncio.sleep(0.01)
    waits = [handled[number] - committed[number] for number in committed]
    await observer.close()
    return {
        "events": len(committed),
        "per_second": round(len(committed) / options.seconds, 1),
        "p50_ms": round(quantile(waits, 0.5) * 1e3, 2),
        "p99_ms": round(quantile(waits, 0.99) * 1e3, 2),
        "notifications": round(rung / len(committed), 4),
    }


if __name__ == "__main__":
    verbs = {
        "drain": drain,
        "publish": publish,
        "publish_many": publish_many,
        "latency": latency,
        "transactional": transactional,
        "failures": failures,
        "fanout": fanout,
        "memory": memory,
    }
    main(verbs, process.run)
