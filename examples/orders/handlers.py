"""What follows an order. A worker runs these: `holdfast worker examples.orders.handlers:registry`.

One stands a rung lower: the API itself runs it, after the commit. To move it up, leave its last argument out.
"""

import asyncio
import os
from uuid import UUID

import asyncpg
from pydantic import BaseModel

from holdfast import EventEnvelope, HandlerRegistry

registry = HandlerRegistry()


class OrderPlaced(BaseModel):
    """What these handlers need of the event; whatever else it carries is ignored."""

    order_id: UUID
    customer: str
    total_cents: int


@registry.handler("order.placed", name="notifications.send_confirmation")
async def send_confirmation(event: EventEnvelope, payload: OrderPlaced) -> None:
    """An effect outside the database: at least once. A worker killed after it and before the settle repeats it."""
    await asyncio.sleep(0.02)  # mail servers take their time
    line = f"{payload.order_id} {event.event_id} Thank you, {payload.customer!a}\n"
    sent = os.open(os.environ["ORDERS_SENT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(sent, line.encode())
    finally:
        os.close(sent)


@registry.handler("order.placed", name="ledger.record_sale")
async def record_sale(event: EventEnvelope, payload: OrderPlaced, tx: asyncpg.Connection) -> None:
    """An effect in the database: exactly once. It commits together with the delivery, or not at all."""
    await tx.execute(
        "INSERT INTO ledger (order_id, total_cents) VALUES ($1, $2)", payload.order_id, payload.total_cents
    )


@registry.handler("order.placed", name="storefront.count_order", via="in_process")
async def count_order(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    """A figure for the shop's window, where it may miss an order that the API took as it died."""
    await tx.execute(
        """
        INSERT INTO orders_by_day (day, orders) VALUES (current_date, 1)
        ON CONFLICT (day) DO UPDATE SET orders = orders_by_day.orders + 1
        """
    )


# Each midnight in Berlin, by one of the workers: see `holdfast schedules list`.
registry.schedule("day.ended", name="ledger.end_of_day", cron="0 0 * * *", timezone="Europe/Berlin")


@registry.handler("day.ended", name="ledger.close_day")
async def close_day(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    """The books of the day that has ended. The slot, and not the clock, says which day that is."""
    await tx.execute(
        """
        INSERT INTO closed_days (day, orders, total_cents)
        SELECT ended.day, count(l.id), coalesce(sum(l.total_cents), 0)
        FROM (SELECT ($1::timestamptz AT TIME ZONE 'Europe/Berlin' - interval '1 minute')::date AS day) ended
        LEFT JOIN ledger l ON (l.recorded_at AT TIME ZONE 'Europe/Berlin')::date = ended.day
        GROUP BY ended.day
        ON CONFLICT (day) DO UPDATE SET orders = excluded.orders, total_cents = excluded.total_cents
        """,
        event.occurred_at,
    )
