"""What partitions cost and save: converting a table under load, and dropping a partition."""

import argparse
import asyncio
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import asyncpg

from benchmarks.counters import difference, snapshot
from benchmarks.systems.process import database_of
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE
from holdfast import EventEnvelope, HandlerRegistry, Publisher, Worker
from holdfast.postgres.schema import partitions

PRODUCERS = 2
BEFORE_AND_AFTER = 2.0  # seconds of load around the conversion
LONGEST_REST = 60.0  # for what is still waiting when producers have stopped; what is not handled then is lost
WEEKS = 8


async def partition_by_week(dsn: str) -> None:
    """Partition an outbox without rows as it is after two months: empty weeks, and the present one."""
    now = datetime.now(UTC)
    monday = datetime(now.year, now.month, now.day, tzinfo=UTC) - timedelta(days=now.weekday())
    start = monday - timedelta(weeks=WEEKS)
    await partitions.enable(dsn, every="week", bound=start)
    connection = await asyncpg.connect(dsn)
    try:
        # Made at once it was one partition for all that is past.
        past = await connection.fetchval("SELECT name FROM core.partitions_list() WHERE lower_at = $1", start)
        lasts = await connection.fetchval("SELECT upper_at FROM core.partitions_list() WHERE name = $1", past)
        await connection.execute(f"DROP TABLE core.{past}")
        week = start
        while week < lasts:
            name = f"outbox_w{week:%Y%m%d}"
            await connection.execute("SELECT core.partition_make($1, 'outbox_default')", name)
            low, high = [
                await connection.fetchval("SELECT core.first_id($1)", at) for at in (week, week + timedelta(weeks=1))
            ]
            await connection.execute(
                f"ALTER TABLE core.outbox ATTACH PARTITION core.{name} FOR VALUES FROM ('{low}') TO ('{high}')"
            )
            week += timedelta(weeks=1)
    finally:
        await connection.close()


async def convert(options: argparse.Namespace) -> dict[str, Any]:
    """Convert a table of `--kept` events while producers publish and a worker delivers."""
    observer = await prepare(options.dsn, due=0, kept=options.kept)
    registry, stop = HandlerRegistry(), asyncio.Event()
    handled: list[float] = []
    published: list[float] = []
    failures = 0

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(event: EventEnvelope) -> None:
        handled.append(time.perf_counter())

    async def produce() -> None:
        nonlocal failures
        publisher, connection = Publisher("shop"), await asyncpg.connect(options.dsn)
        while not stop.is_set():
            began = time.perf_counter()
            try:
                async with connection.transaction():
                    await publisher.publish(connection, EVENT_TYPE, {})
            except asyncpg.PostgresError:
                failures += 1
            published.append(time.perf_counter() - began)
        await connection.close()

    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    async with Worker(options.dsn, registry, observers=()):
        producers = [asyncio.create_task(produce()) for _ in range(PRODUCERS)]
        await asyncio.sleep(BEFORE_AND_AFTER)
        began = time.perf_counter()
        await partitions.enable(options.dsn)
        converted = time.perf_counter() - began
        await asyncio.sleep(BEFORE_AND_AFTER)
        stop.set()
        await asyncio.gather(*producers)
        stopped = time.perf_counter()
        while len(handled) < len(published) - failures and time.perf_counter() - stopped < LONGEST_REST:
            await asyncio.sleep(0.01)
    after = await snapshot(observer, database)
    result = await difference(observer, before, after, len(handled))
    await observer.close()
    gaps = [later - earlier for earlier, later in pairwise(handled)]
    return result | {
        "conversion_s": round(converted, 2),
        "longest_publish_s": round(max(published), 3),
        "longest_gap_s": round(max(gaps), 3),
        "failed_publishes": failures,
        "lost_events": len(published) - failures - len(handled),
    }


async def drop(options: argparse.Namespace) -> dict[str, Any]:
    """Drop a partition of `--kept` events that are past retention."""
    observer = await prepare(options.dsn, due=0, kept=options.kept)
    await partitions.enable(options.dsn, bound=datetime.now(UTC) + timedelta(milliseconds=1))
    await observer.execute(
        "UPDATE core.retention_policies SET active_ttl_days = 0, tombstoned_grace_days = 0 WHERE entity = 'outbox_row'"
    )
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    began = time.perf_counter()
    dropped = await observer.fetch("SELECT * FROM core.partitions_drop()")
    seconds = time.perf_counter() - began
    after = await snapshot(observer, database)
    result = await difference(observer, before, after, options.kept)
    await observer.close()
    return result | {"drop_s": round(seconds, 3), "partitions_dropped": len(dropped)}
