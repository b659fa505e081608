"""The protocols of ENV-2, as an application that knows nothing of Postgres uses them."""

import asyncio

import asyncpg

from holdfast import EventEnvelope, EventListener, EventPublisher, Publisher, WorkerSettings
from holdfast.ids import uuid7
from holdfast.worker import OutboxListener


async def test_an_event_travels_through_the_protocols(dsn: str, conn: asyncpg.Connection) -> None:
    """EventPublisher.publish(envelope) in a transaction, EventListener.listen(...) on the other side (ENV-2)."""
    arrived: asyncio.Queue[EventEnvelope] = asyncio.Queue()

    async def handle(event: EventEnvelope) -> None:
        await arrived.put(event)

    listener: EventListener = OutboxListener(dsn, WorkerSettings(poll_interval=60))
    listening = asyncio.create_task(
        listener.listen(channel="outbox_default", handler_name="billing.everything", handler=handle)
    )
    identity = uuid7()
    sent = EventEnvelope(
        event_id=identity,
        event_type="order.placed",
        event_version=3,
        occurred_at="2026-01-26T09:00:00+00:00",  # type: ignore[arg-type]
        source="shop",
        payload={"order_id": 17},
        idempotency_key="order-17",
        trace_context="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )
    try:
        async with conn.transaction():
            publisher: EventPublisher = Publisher("shop").bind(conn)
            await publisher.publish(sent)
        async with asyncio.timeout(10):
            assert await arrived.get() == sent
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    async with asyncio.timeout(5):
        row = await conn.fetchrow("SELECT id, status, handler_name FROM core.outbox")
    assert tuple(row) == (identity, "delivered", "billing.everything")
