"""`Worker.drain`: everything that is due, also what handlers publish on the way, and nothing that is not."""

import asyncpg

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, RetryPolicy, Worker


async def test_drain_works_through_what_is_due_and_ends(dsn: str, conn: asyncpg.Connection) -> None:
    """A chain of events is followed to its end; delayed events and later retries stay (LSN-1, PUB-2)."""
    registry, publisher, seen = HandlerRegistry(), Publisher("shop"), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        seen.append(event.payload["n"])
        if event.payload["n"] < 1_000:
            await publisher.publish(tx, "order.placed", {"n": event.payload["n"] + 1_000})

    @registry.handler("order.refused", name="billing.refuse", retry=RetryPolicy(base_delay=3600, max_delay=3600))
    async def refuse(event: EventEnvelope) -> None:
        raise RuntimeError("not now")

    async with conn.transaction():
        await publisher.publish_many(conn, [NewEvent("order.placed", {"n": n}) for n in range(700)])
        await publisher.publish(conn, "order.placed", {"n": 9_999}, delay=3600)
        await publisher.publish(conn, "order.refused", {})
    await Worker(dsn, registry, observers=()).drain()

    assert sorted(seen) == [*range(700), *range(1_000, 1_700)]
    waiting = await conn.fetch("SELECT event_type, attempts FROM core.outbox WHERE settled_at IS NULL ORDER BY 1")
    assert [tuple(row) for row in waiting] == [("order.placed", 0), ("order.refused", 1)]


async def test_drain_of_nothing_ends_at_once(dsn: str) -> None:
    """LSN-1."""
    registry = HandlerRegistry()
    registry.add("billing.charge", ("order.placed",), print)
    await Worker(dsn, registry, observers=()).drain()
