"""What follows an order. A worker runs these, with the shop's own sessions:

    holdfast worker examples.orders.handlers:registry --transactions examples.orders.database:Session

One stands a rung lower: the API itself runs it, after the commit. To move it up, leave its last argument out.
"""

import asyncio
import os
from datetime import timedelta
from uuid import UUID
from zoneinfo import ZoneInfo

from pydantic import BaseModel
from sqlalchemy import Date, cast, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from examples.orders import telemetry  # noqa: F401 - the worker traces where its handlers have set it up
from examples.orders.model import ClosedDay, DayOfOrders, Sale
from holdfast import EventEnvelope, HandlerContext, HandlerRegistry

registry = HandlerRegistry()


class OrderPlaced(BaseModel):
    """What these handlers need of the event; whatever else it carries is ignored."""

    order_id: UUID
    customer: str
    total_cents: int


@registry.handler("order.placed", name="notifications.send_confirmation")
async def send_confirmation(event: EventEnvelope, payload: OrderPlaced, context: HandlerContext) -> None:
    """An effect outside the database: at least once. A worker killed after it and before the settle repeats it."""
    await asyncio.sleep(0.02)  # mail servers take their time
    if context.attempt == 1 and os.environ.get("ORDERS_MAIL_BUSY"):
        raise ConnectionError("the mail server is busy")
    line = f"{payload.order_id} {event.event_id} Thank you, {payload.customer!a}\n"
    sent = os.open(os.environ["ORDERS_SENT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(sent, line.encode())
    finally:
        os.close(sent)


@registry.handler("order.placed", name="ledger.record_sale")
async def record_sale(event: EventEnvelope, payload: OrderPlaced, tx: AsyncSession) -> None:
    """An effect in the database: exactly once. It commits together with the delivery, or not at all."""
    tx.add(Sale(order_id=payload.order_id, total_cents=payload.total_cents))


@registry.handler("order.placed", name="storefront.count_order", via="in_process")
async def count_order(event: EventEnvelope, tx: AsyncSession) -> None:
    """A figure for the shop's window, where it may miss an order that the API took as it died."""
    counted = insert(DayOfOrders).values(day=func.current_date(), orders=1)
    await tx.execute(counted.on_conflict_do_update(index_elements=["day"], set_={"orders": DayOfOrders.orders + 1}))


# Each midnight in Berlin, by one of the workers: see `holdfast schedules list`.
registry.schedule("day.ended", name="ledger.end_of_day", cron="0 0 * * *", timezone="Europe/Berlin")


@registry.handler("day.ended", name="ledger.close_day")
async def close_day(event: EventEnvelope, tx: AsyncSession) -> None:
    """The books of the day that has ended. The slot, and not the clock, says which day that is."""
    ended = (event.occurred_at.astimezone(ZoneInfo("Europe/Berlin")) - timedelta(minutes=1)).date()
    day_of_sale = cast(func.timezone("Europe/Berlin", Sale.recorded_at), Date)
    sums = select(func.count(Sale.id), func.coalesce(func.sum(Sale.total_cents), 0)).where(day_of_sale == ended)
    orders, total_cents = (await tx.execute(sums)).one()
    await tx.merge(ClosedDay(day=ended, orders=orders, total_cents=total_cents))
