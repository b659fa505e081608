"""What the tests of batch handlers share: events with numbers, and handlers in every kind of transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg

from holdfast import EventEnvelope, NewEvent, Publisher, RetryPolicy
from holdfast.handling.application.sources import finished
from tests.handling.kinds import Kind, Work

QUICK = RetryPolicy(max_attempts=3, base_delay=0.01, max_delay=0.02)
PATIENT = RetryPolicy(max_attempts=9, base_delay=30)
ONCE = RetryPolicy(max_attempts=1)
SETTINGS: dict[str, Any] = {"poll_interval": 0.5, "lease": 5.0}

BatchBody = Callable[[list[EventEnvelope], Work], Awaitable[Any]]


async def publish(conn: asyncpg.Connection, count: int, event_type: str = "order.placed", **options: Any) -> list[UUID]:
    """Publish events with the numbers from 0 on, in one transaction."""
    events = [NewEvent(event_type, {"n": number}) for number in range(count)]
    async with conn.transaction():
        return await Publisher("shop", **options).publish_many(conn, events)


async def statuses(conn: asyncpg.Connection) -> dict[str, int]:
    """How many rows have which status."""
    rows = await conn.fetch("SELECT status, count(*) AS n FROM core.outbox GROUP BY 1")
    return {row["status"]: row["n"] for row in rows}


async def written(conn: asyncpg.Connection) -> Counter[UUID]:
    """How often which event was booked."""
    return Counter(row["event_id"] for row in await conn.fetch("SELECT event_id FROM entries"))


class Calls(list[list[int]]):
    """The numbers of the events of each call."""

    def note(self, events: list[EventEnvelope]) -> list[int]:
        numbers = [event.payload["n"] for event in events]
        self.append(numbers)
        return numbers


def batch_handler(kind: Kind, body: BatchBody) -> Callable[..., Any]:
    """Return a batch handler that takes such a `tx` and does what the body does."""
    if kind.asynchronous:

        async def handle(events: list[EventEnvelope], tx: Any) -> Any:
            return await body(events, Work(tx, kind))
    else:

        def handle(events: list[EventEnvelope], tx: Any) -> Any:  # type: ignore[misc]
            return finished(body(events, Work(tx, kind)))  # type: ignore[arg-type]

    handle.__annotations__ = {"events": list[EventEnvelope], "tx": kind.annotation}
    return handle
