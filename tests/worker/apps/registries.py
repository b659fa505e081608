"""The registries that worker processes of the tests run. Each function takes the DSN and returns one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from datetime import timedelta

import asyncpg

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, RetryPolicy
from holdfast.flow import Pause


def say(**line: object) -> None:
    # One write: threads and the loop share the pipe.
    sys.stdout.write(json.dumps(line, default=str) + "\n")
    sys.stdout.flush()


class Outside:
    """Writes to the table `outside` on a connection of its own, beyond any handler's transaction."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()

    async def value(self, sql: str) -> object:
        """What a query returns."""
        async with self._lock:
            if self._connection is None:
                self._connection = await asyncpg.connect(self._dsn)
            return await self._connection.fetchval(sql)

    async def note(self, event: EventEnvelope, context: HandlerContext) -> None:
        async with self._lock:
            if self._connection is None:
                self._connection = await asyncpg.connect(self._dsn)
            await self._connection.execute(
                "INSERT INTO outside (handler, event_id, n, attempt, worker) VALUES ($1, $2, $3, $4, $5)",
                context.handler_name,
                event.event_id,
                event.payload.get("n"),
                context.attempt,
                os.getpid(),
            )


def ledger(dsn: str) -> HandlerRegistry:
    """Transactional: notes the run outside, then the effect in the transaction."""
    registry, outside = HandlerRegistry(), Outside(dsn)

    # A budget that no number of kills uses up: whatever is missing in the end was lost, and not given up.
    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(max_attempts=1000))
    async def charge(event: EventEnvelope, tx: asyncpg.Connection, context: HandlerContext) -> None:
        await outside.note(event, context)
        await asyncio.sleep(event.payload.get("seconds", 0))
        await tx.execute(
            "INSERT INTO ledger (handler, event_id, n) VALUES ('billing.charge', $1, $2)",
            event.event_id,
            event.payload["n"],
        )

    return registry


def batches(dsn: str) -> HandlerRegistry:
    """A transactional batch handler, which says when it has written and lingers before its COMMIT."""
    registry = HandlerRegistry()

    @registry.handler(
        "order.placed", name="ledger.book_many", batch=40, within="20ms", retry=RetryPolicy(max_attempts=1000)
    )
    async def book_many(events: list[EventEnvelope], tx: asyncpg.Connection) -> None:
        rows = [("ledger.book_many", event.event_id, event.payload["n"]) for event in events]
        await tx.executemany("INSERT INTO ledger (handler, event_id, n) VALUES ($1, $2, $3)", rows)
        say(told="batch_written", events=len(events))
        await asyncio.sleep(0.05)

    return registry


def slow(dsn: str) -> HandlerRegistry:
    """Handlers that take as long as the event says."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.slow", timeout=60)
    async def wait(event: EventEnvelope) -> None:
        if seconds := event.payload.get("seconds"):
            say(told="handler_started", n=event.payload.get("n"))
            await asyncio.sleep(seconds)
            say(told="handler_finished", n=event.payload.get("n"))

    @registry.handler("order.threaded", name="billing.threaded", timeout=60)
    def block(event: EventEnvelope) -> None:
        say(told="handler_started", n=event.payload.get("n"))
        time.sleep(event.payload["seconds"])
        say(told="handler_finished", n=event.payload.get("n"))

    return registry


def steady(dsn: str) -> HandlerRegistry:
    """Takes four milliseconds for everything, so that a few producers outrun it."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.steady")
    async def handle(event: EventEnvelope) -> None:
        await asyncio.sleep(0.004)

    return registry


def settles_late(dsn: str) -> HandlerRegistry:
    """Dies after the effect is committed and before the delivery is settled, when the event is new."""
    registry, outside = HandlerRegistry(), Outside(dsn)

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        await outside.note(event, context)
        if context.attempt == 1 and event.payload["n"] == 0:
            os._exit(137)

    return registry


def dies_after_commit(dsn: str) -> HandlerRegistry:
    """Dies as soon as the effect of the event with number 0 is visible to others."""
    registry = HandlerRegistry()

    def watch() -> None:
        import psycopg

        with psycopg.connect(dsn, autocommit=True) as connection:
            while connection.execute("SELECT count(*) FROM ledger").fetchone() == (0,):
                time.sleep(0.0005)
            os._exit(137)

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (event_id, n) VALUES ($1, $2)", event.event_id, event.payload["n"])
        if event.payload["n"] == 0:
            threading.Thread(target=watch, daemon=True).start()
            await asyncio.sleep(0.1)

    return registry


def crashing(dsn: str) -> HandlerRegistry:
    """One type of event always kills the process."""
    registry, outside = HandlerRegistry(), Outside(dsn)
    policy = RetryPolicy(max_attempts=3, base_delay=0.01, max_delay=0.02)

    @registry.handler("order.deadly", name="billing.deadly", retry=policy)
    async def deadly(event: EventEnvelope, context: HandlerContext) -> None:
        await outside.note(event, context)
        os._exit(137)

    @registry.handler("order.placed", name="billing.charge", retry=policy)
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        await outside.note(event, context)

    return registry


def blocking(dsn: str) -> HandlerRegistry:
    """Blocks the event loop for as long as the event says."""
    registry, outside = HandlerRegistry(), Outside(dsn)

    @registry.handler("order.placed", name="billing.blocking")
    async def block(event: EventEnvelope, context: HandlerContext) -> None:
        await outside.note(event, context)
        time.sleep(event.payload["seconds"])

    return registry


def ticking(dsn: str) -> HandlerRegistry:
    """Schedules, and a handler that notes each slot in its transaction."""
    registry = HandlerRegistry()

    @registry.handler("clock.ticked", name="clock.note", retry=RetryPolicy(max_attempts=1000))
    async def note(event: EventEnvelope, tx: asyncpg.Connection, context: HandlerContext) -> None:
        await tx.execute(
            "INSERT INTO ticks (schedule, slot) VALUES ($1, $2)", context.headers["schedule"], event.occurred_at
        )

    registry.schedule("clock.ticked", name="clock.second", every=timedelta(seconds=1), missed="all")
    registry.schedule("clock.ticked", name="clock.other", every=timedelta(seconds=2), missed="all")
    registry.schedule("clock.ticked", name="clock.minute", cron="* * * * *", timezone="Europe/Berlin", missed="all")
    return registry


def telling(dsn: str) -> HandlerRegistry:
    """One handler that says each time it runs, and does nothing else."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(max_attempts=1000))
    async def charge(event: EventEnvelope) -> None:
        say(told="ran", n=event.payload["n"])

    return registry


def limited(dsn: str) -> HandlerRegistry:
    """Seven at once in all workers; notes when each run begins and ends, by the database's clock."""
    registry, connections = HandlerRegistry(), list[asyncpg.Connection]()

    async def note(sql: str, *values: object) -> None:
        connection = connections.pop() if connections else await asyncpg.connect(dsn)
        await connection.execute(sql, *values)
        connections.append(connection)

    begin = "INSERT INTO runs (event_id, attempt, worker) VALUES ($1, $2, $3)"
    end = "UPDATE runs SET ended_at = clock_timestamp() WHERE event_id = $1 AND attempt = $2"

    @registry.handler("order.placed", name="billing.charge", fleet_concurrency=7, retry=RetryPolicy(max_attempts=1000))
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        await note(begin, event.event_id, context.attempt, os.getpid())
        await asyncio.sleep(0.05)
        await note(end, event.event_id, context.attempt)

    return registry


def partner(dsn: str) -> HandlerRegistry:
    """Calls a partner, which is a table: it is up when there is a row in it."""
    registry, outside = HandlerRegistry(), Outside(dsn)
    down = Pause(after=5, first_probe=0.2, longest_wait=1.0)

    @registry.handler("order.placed", name="billing.charge", on_outage=down, retry=RetryPolicy(max_attempts=3))
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        await outside.note(event, context)
        if not await outside.value("SELECT count(*) FROM partner"):
            raise ConnectionError("no answer")

    return registry
