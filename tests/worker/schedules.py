"""What the tests of schedules share."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry
from holdfast.postgres.connection import Address
from holdfast.postgres.queries import Queries
from holdfast.postgres.schedules import Schedules
from holdfast.postgres.statements import NamedStatements

HOUR = timedelta(hours=1)
NAME = "reports.hourly"


def declaring(name: str = NAME, event_type: str = "report.due", **options: Any) -> HandlerRegistry:
    """A registry with one schedule, by default of every hour, and a handler."""
    registry = HandlerRegistry()

    @registry.handler("report.due", name="reports.send")
    async def send(event: EventEnvelope, context: HandlerContext) -> None: ...

    registry.schedule(event_type, name=name, **({"every": HOUR} | options if "cron" not in options else options))
    return registry


def schedules(generation: int = 0) -> Schedules:
    return Schedules(NamedStatements(Queries("core"), Address("postgresql://tests-bring-their-own")), generation)


async def declare(conn: asyncpg.Connection, *, generation: int = 0, force: bool = True, **options: Any) -> str:
    """What a worker does when it starts; declared, unchanged, older, or owed if not by force."""
    (schedule,) = declaring(**options).schedules
    beat = "SELECT core.worker_beat(gen_random_uuid(), 'declaring', 'host', 1, '1.0', $1, '{}', '{}')"
    await conn.execute(beat, generation)
    return await schedules(generation).declare(conn, schedule, force=force)


async def stored(conn: asyncpg.Connection, name: str = NAME) -> asyncpg.Record:
    row = await conn.fetchrow("SELECT *, now() AS now FROM core.schedules WHERE name = $1", name)
    assert row is not None, f"no schedule {name}"
    return row


async def rewind(conn: asyncpg.Connection, ago: timedelta, name: str = NAME) -> datetime:
    """As if nobody had looked at the schedule for that long; since when."""
    since: datetime = await conn.fetchval(
        """UPDATE core.schedules SET owed_after = now() - $2::interval, last_slot = NULL,
               next_slot = now() - $2::interval + interval '1 microsecond', attended_at = now() - $2::interval
           WHERE name = $1 RETURNING owed_after""",
        name,
        ago,
    )
    return since


async def slots(conn: asyncpg.Connection, name: str = NAME) -> list[datetime]:
    """The slots that were fired, by their events; fails when one was fired twice."""
    rows = await conn.fetch(
        "SELECT occurred_at, idempotency_key FROM core.outbox WHERE origin_id IS NULL AND headers->>'schedule' = $1",
        name,
    )
    keys = Counter(row["idempotency_key"] for row in rows)
    assert not [key for key, count in keys.items() if count > 1]
    found = sorted(row["occurred_at"] for row in rows)
    assert set(keys) == {f"schedule:{name}:{slot.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}" for slot in found}
    return found
