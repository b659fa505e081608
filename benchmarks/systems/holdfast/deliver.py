"""Workers that deliver what is waiting."""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg

from benchmarks import observed
from benchmarks.counters import difference, peak_rss_mb, snapshot
from benchmarks.systems import together
from benchmarks.systems.crew import asked, begin, report, told_to_end
from benchmarks.systems.harness import BUSINESS, ORDERS, Tally, warmed
from benchmarks.systems.holdfast.partitions import partition_by_week
from benchmarks.systems.libraries import LIBRARIES, Library
from benchmarks.systems.process import database_of
from benchmarks.systems.tables import held_snapshot, pace, prepare
from benchmarks.workload import EVENT_TYPE, quantile
from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy, Worker, WorkerSettings
from holdfast.cli import logs
from holdfast.postgres.deliveries import Deliveries

# Limits that never bind, by the kind of the drain.
HELD: dict[str, dict[str, Any]] = {
    "": {},
    "fleet_concurrency": {"fleet_concurrency": 100_000},
    "rate": {"rate": 1_000_000},
    "breaker": {"on_outage": "pause"},
    "partitioned": {},
    "brief": {},
    "ordered": {},
    "fair": {},
    "sync": {},
}
# Events with a key: so many ordering keys; or one tenant that has all events, but one of another tenant, the last.
KEYED = {
    "ordered": "UPDATE core.outbox SET ordering_key = 'k' || seq % 10000",
    "fair": """UPDATE core.outbox o SET ordering_key = '', fairness_key =
                   CASE WHEN o.seq = (SELECT max(seq) FROM core.outbox) THEN 'small' ELSE 'large' END""",
}
# No delivered row is kept.
BRIEF = (
    """UPDATE core.retention_policies SET active_ttl_days = 0, tombstoned_grace_days = 0 WHERE entity = 'outbox_row'"""
)


class Places:
    """What is known of the events that have a key, and whether handlers meet them in order."""

    def __init__(self, rows: list[asyncpg.Record]) -> None:
        self._of = {row["id"]: (row["key"], row["seq"]) for row in rows}
        self._last: dict[str, int] = {}
        self.inversions = 0
        self.before_single: int | None = None

    def note(self, event: EventEnvelope, handled: int) -> None:
        key, seq = self._of[event.event_id]
        if seq < self._last.get(key, 0):
            self.inversions += 1
        self._last[key] = seq
        if key == "small":
            self.before_single = handled


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    sampled = observed.SAMPLED.get(options.observed)
    if options.kind == "partitioned":
        await partition_by_week(options.dsn)
    observer = await prepare(options.dsn, due=options.count, size=options.size, kept=options.kept, sampled=sampled)
    holder = await held_snapshot(options.dsn) if options.hold else None
    places = None
    if options.kind == "brief":
        await observer.execute(BRIEF)
    if options.kind in KEYED:
        await observer.execute(KEYED[options.kind])
        keys = "SELECT id, seq, coalesce(fairness_key, ordering_key) AS key FROM core.outbox WHERE settled_at IS NULL"
        places = Places(await observer.fetch(keys))
    registry, finished = HandlerRegistry(), asyncio.Event()
    marks: list[tuple[float, int]] = []
    handled = 0

    def note(event: EventEnvelope) -> None:
        nonlocal handled
        handled += 1
        if places is not None:
            places.note(event, handled)
        if handled % 500 == 0:
            marks.append((time.perf_counter(), handled))
        if handled == options.count:
            finished.set()

    async def handle(event: EventEnvelope) -> None:
        note(event)

    async def wait(event: EventEnvelope) -> None:
        await asyncio.sleep(options.pause)
        note(event)

    tally = Tally(options.count)

    def block(event: EventEnvelope) -> None:
        tally.seen()

    handler: Callable[..., Any] = block if options.kind == "sync" else wait if options.pause else handle
    registry.add("bench.handle", (EVENT_TYPE,), handler, **HELD[options.kind])

    database = database_of(options.dsn)
    with timed_claims() as claims, observed.ARMS[options.observed]() as arguments:
        settings = WorkerSettings(concurrency=options.concurrency or "auto")
        worker = Worker(options.dsn, registry, settings, **arguments)
        scraped = observed.Scraping(worker) if options.observed in observed.SCRAPED else contextlib.nullcontext()
        before = await snapshot(observer, database)
        async with worker:
            with scraped:
                await (tally.reached() if options.kind == "sync" else finished.wait())
                await settled(worker)
            after = await snapshot(observer, database)
    result = await difference(observer, before, after, options.count)
    for connection in [observer, *([holder] if holder else [])]:
        await connection.close()
    return result | {
        "claim_p50_ms": round(quantile(claims or [0.0], 0.5) * 1e3, 2),
        "claim_p99_ms": round(quantile(claims or [0.0], 0.99) * 1e3, 2),
        "rss_mb": peak_rss_mb(),
        "concurrency": worker.concurrency,
        "facts_dropped": worker.facts_dropped,
        **({} if places is None else {"inversions": places.inversions, "before_single": places.before_single or 0}),
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
        if claimed[0]:
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
    settings = WorkerSettings(concurrency=options.concurrency or "auto")
    async with Worker(options.dsn, registry, settings, observers=()):  # the log would go where the report goes
        await asked()
        report({"handled": handled, "python": time.process_time() - cpu})
        await told_to_end()
    return {}


async def deliver_all(
    options: argparse.Namespace,
    observer: Any,
    registry: HandlerRegistry,
    deliveries: int,
    done: Callable[[], bool],
) -> dict[str, Any]:
    """Run a worker until everything is done and settled, and what is logged of it is written."""
    database = database_of(options.dsn)
    with observed.ARMS[options.observed]() as arguments:
        worker = Worker(options.dsn, registry, **arguments)
        before = await snapshot(observer, database)
        async with worker:
            while not done() or worker.in_flight:
                await asyncio.sleep(0.002)
            after = await snapshot(observer, database)
    dropped = {"facts_dropped": worker.facts_dropped, "lines_dropped": logs.dropped()}
    return await difference(observer, before, after, deliveries) | dropped


async def transact_all(
    options: argparse.Namespace,
    observer: Any,
    registry: HandlerRegistry,
    handled: list[None],
    transactions: Any = None,
) -> dict[str, Any]:
    """Run a worker until every event is handled in a transaction; those of the start are not measured."""
    worker = Worker(options.dsn, registry, transactions=transactions)
    database = database_of(options.dsn)
    async with worker:
        warm = await warmed(lambda: len(handled))
        before = await snapshot(observer, database)
        while len(handled) < options.count or worker.in_flight:
            await asyncio.sleep(0.002)
        after = await snapshot(observer, database)
    assert await observer.fetchval("SELECT count(*) FROM orders") == options.count
    return await difference(observer, before, after, options.count - warm)


async def transactional(options: argparse.Namespace) -> dict[str, Any]:
    """A handler that writes in its transaction; `--kind` names the library, asyncpg by default."""
    if options.kind:
        return await transactional_with(LIBRARIES[options.kind](), options)
    observer = await prepare(options.dsn, due=options.count)
    await observer.execute(ORDERS)
    registry, handled = HandlerRegistry(), list[None]()

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute(BUSINESS)
        handled.append(None)

    result = await transact_all(options, observer, registry, handled)
    await observer.close()
    return result


async def batch(options: argparse.Namespace) -> dict[str, Any]:
    """A batch handler that writes as much as `transactional` for each of its events, in one transaction for all."""
    observer = await prepare(options.dsn, due=options.count)
    await observer.execute(ORDERS)
    registry, handled = HandlerRegistry(), list[None]()

    @registry.handler(EVENT_TYPE, name="bench.handle", batch=500, within="50ms")
    async def handle(events: list[EventEnvelope], tx: asyncpg.Connection) -> None:
        for _ in events:
            await tx.execute(BUSINESS)
        handled.extend(None for _ in events)

    result = await transact_all(options, observer, registry, handled)
    await observer.close()
    return result


async def transactional_with(library: Library, options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=options.count)
    await observer.execute(ORDERS)
    handled: list[None] = []
    async with library.source(options.dsn) as source:
        registry = HandlerRegistry()
        registry.add("bench.handle", (EVENT_TYPE,), library.handler(handled))
        result = await transact_all(options, observer, registry, handled, source)
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
    async with Worker(options.dsn, registry):
        while handled < target:
            await asyncio.sleep(0.01)
    await observer.close()
    return {"events": options.count, "handled": target, "rss_mb": peak_rss_mb()}
