"""Workers that deliver what is waiting."""

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg

from benchmarks.counters import difference, peak_rss_mb, snapshot
from benchmarks.systems import together
from benchmarks.systems.crew import asked, begin, report, told_to_end
from benchmarks.systems.harness import BUSINESS, ORDERS
from benchmarks.systems.process import database_of
from benchmarks.systems.tables import held_snapshot, pace, prepare
from benchmarks.workload import EVENT_TYPE, quantile
from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy, Worker
from holdfast.postgres.deliveries import Deliveries


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
    with timed_claims() as claims:
        before = await snapshot(observer, database)
        async with worker:
            await finished.wait()
            await settled(worker)
            after = await snapshot(observer, database)
    result = await difference(observer, before, after, options.count)
    for connection in [observer, *([holder] if holder else [])]:
        await connection.close()
    return result | {
        "claim_p50_ms": round(quantile(claims, 0.5) * 1e3, 2),
        "claim_p99_ms": round(quantile(claims, 0.99) * 1e3, 2),
        "rss_mb": peak_rss_mb(),
        **pace(marks),
    }


@contextmanager
def timed_claims() -> Iterator[list[float]]:
    """How long each claim took that found something: from the call to the rows in Python."""
    seconds: list[float] = []
    claim = Deliveries.claim

    async def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        claimed = await claim(*arguments)
        if claimed:
            seconds.append(time.perf_counter() - started)
        return claimed

    Deliveries.claim = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Deliveries.claim = claim  # type: ignore[method-assign]


async def settled(worker: Worker) -> None:
    while worker.in_flight:
        await asyncio.sleep(0.001)


async def drain_together(options: argparse.Namespace) -> dict[str, Any]:
    """`--processes` workers, each a process of its own."""
    return await together.drain("holdfast", options)


async def work(options: argparse.Namespace) -> dict[str, Any]:
    """A worker process among others."""
    registry, handled = HandlerRegistry(), 0

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(event: EventEnvelope) -> None:
        nonlocal handled
        handled += 1
        if options.pause:
            await asyncio.sleep(options.pause)

    cpu = await begin()
    async with Worker(options.dsn, registry, observers=()):
        await asked()
        report({"handled": handled, "python": time.process_time() - cpu})
        await told_to_end()
    return {}


async def deliver_all(
    options: argparse.Namespace, observer: Any, registry: HandlerRegistry, deliveries: int, done: Callable[[], bool]
) -> dict[str, Any]:
    """Run a worker until everything is done and settled."""
    worker = Worker(options.dsn, registry, observers=())
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    async with worker:
        while not done() or worker.in_flight:
            await asyncio.sleep(0.002)
        after = await snapshot(observer, database)
    return await difference(observer, before, after, deliveries)


async def transactional(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=options.count)
    await observer.execute(ORDERS)
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

    target = min(options.count, options.until or options.count)
    async with Worker(options.dsn, registry, observers=()):
        while handled < target:
            await asyncio.sleep(0.01)
    await observer.close()
    return {"events": options.count, "handled": target, "rss_mb": peak_rss_mb()}
