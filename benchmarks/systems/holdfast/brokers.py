"""Events that a broker carries: sent by the relay, taken by a worker, and from commit to handler."""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg

from benchmarks.brokers import CHANNEL, SECRET, fill, server
from benchmarks.counters import difference, peak_rss_mb, snapshot
from benchmarks.systems.harness import BUSINESS, ORDERS, check, delivered
from benchmarks.systems.process import database_of
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE
from holdfast import EventEnvelope, HandlerRegistry, Publisher, Worker, WorkerSettings
from holdfast.brokers import consumers
from holdfast.brokers.engine import Interest
from holdfast.brokers.engines import engine_of

HANDLER = "bench.handle"
# Several times what a slow machine needs.
LONGEST = 180
OPEN = "SELECT count(*) FROM core.outbox WHERE settled_at IS NULL"
INBOX = "SELECT count(*) FROM core.event_handled"
BEGUN = "SELECT EXISTS (SELECT FROM core.outbox WHERE claimed_by IS NOT NULL)"
MOVED = "SELECT via <> 'outbox' FROM core.subscriptions WHERE handler_name = $1"


async def relay(options: argparse.Namespace) -> dict[str, Any]:
    """From the first claim to the last settled row; the worker's start is not in it, as in the control."""
    observer = await prepare(options.dsn, due=options.count, size=options.size)
    database = database_of(options.dsn)
    with server(options.kind) as address:
        if options.kind == "rabbitmq":
            # It confirms nothing that no queue wants.
            wanted = Interest(HANDLER, CHANNEL, "bench", (EVENT_TYPE,), datetime.now(UTC))
            await consumers.make(engine_of(address), [wanted])
        settings = WorkerSettings(substrate=address, relayed=(EVENT_TYPE,))
        running = Worker(options.dsn, HandlerRegistry(), settings, observers=())
        async with running as worker, patience(observer, worker):
            while not await observer.fetchval(BEGUN):
                await asyncio.sleep(0.001)
            before = await snapshot(observer, database)
            left = await observer.fetchval(OPEN)
            while worker.in_flight or await observer.fetchval(OPEN):
                await asyncio.sleep(0.005)
            after = await snapshot(observer, database)
    result = await difference(observer, before, after, left)
    await observer.close()
    return result


@asynccontextmanager
async def patience(observer: asyncpg.Connection, worker: Worker) -> AsyncIterator[None]:
    """End a run whose broker stands still, and say how far it has come."""
    try:
        async with asyncio.timeout(LONGEST):
            yield
    except TimeoutError:
        rows = await observer.fetchval(OPEN)
        raise SystemExit(f"after {LONGEST} s {rows} events are not settled, {worker.in_flight} in flight") from None


async def consume(options: argparse.Namespace) -> dict[str, Any]:
    """From the first event that is handled to the last inbox row; the worker's start is not in it."""
    tally = Tally(options.count)
    registry = HandlerRegistry()

    @registry.handler(EVENT_TYPE, name=HANDLER)
    async def handle(event: EventEnvelope) -> None:
        tally.note()

    return await consumed(options, registry, tally)


async def consume_tx(options: argparse.Namespace) -> dict[str, Any]:
    """The same with a handler that has a transaction, and does nothing in it."""
    tally = Tally(options.count)
    registry = HandlerRegistry()

    @registry.handler(EVENT_TYPE, name=HANDLER)
    async def handle(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        tally.note()

    return await consumed(options, registry, tally)


class Tally:
    """Counts what was handled, and tells of the first and of the last."""

    def __init__(self, expected: int) -> None:
        self.handled = 0
        self.first, self.last = asyncio.Event(), asyncio.Event()
        self._expected = expected

    def note(self) -> None:
        self.handled += 1
        if self.handled == 1:
            self.first.set()
        if self.handled == self._expected:
            self.last.set()


async def consumed(options: argparse.Namespace, registry: HandlerRegistry, tally: Tally) -> dict[str, Any]:
    observer, database = await prepare(options.dsn, due=0), database_of(options.dsn)
    with server(options.kind) as address:
        await fill(address, options.count, options.size)
        settings = WorkerSettings(substrate=address, relay_secrets=(SECRET,))
        async with Worker(options.dsn, registry, settings, observers=()) as worker:
            async with patience(observer, worker):
                await tally.first.wait()
                before = await snapshot(observer, database)
                already = tally.handled
                await tally.last.wait()
                while worker.in_flight:
                    await asyncio.sleep(0.001)
                after = await snapshot(observer, database)
            check("inbox rows", await observer.fetchval(INBOX), options.count)
    result = await difference(observer, before, after, options.count - already)
    await observer.close()
    return result | {"rss_mb": peak_rss_mb()}


async def broker_latency(options: argparse.Namespace) -> dict[str, Any]:
    """From commit to handler, by the relay and the broker, in one worker beside the producers."""
    observer = await prepare(options.dsn, due=0)
    await observer.execute(ORDERS)
    connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
    registry, publisher = HandlerRegistry(), Publisher("shop")
    handled: dict[int, float] = {}

    @registry.handler(EVENT_TYPE, name=HANDLER)
    async def handle(event: EventEnvelope) -> None:
        handled[event.payload["n"]] = time.perf_counter()

    async def commit(connection: asyncpg.Connection, number: int) -> float:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(BUSINESS)
        await publisher.publish(connection, EVENT_TYPE, {"n": number})
        at = time.perf_counter()
        await transaction.commit()
        return at

    with server(options.kind) as address:
        settings = WorkerSettings(substrate=address)
        # At its first start the worker moves the handler to the broker. What is published before goes the short way.
        async with Worker(options.dsn, registry, settings, observers=()):
            while not await observer.fetchval(MOVED, HANDLER):
                await asyncio.sleep(0.01)
        worker = Worker(options.dsn, registry, settings, observers=())
        result = await delivered(options, observer, connections, commit, lambda: worker, handled)
    return result
