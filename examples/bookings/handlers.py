"""What follows a booking. A worker runs these: `holdfast worker examples.bookings.handlers:registry`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

import asyncpg
from pydantic import BaseModel

from examples.bookings.partners import Bank, CardDeclined, Mail, Partners
from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, Publisher, Reject, RetryPolicy, Snooze

partners = Partners(Bank(), Mail())  # the program's own; tests look into them


@asynccontextmanager
async def resources() -> AsyncIterator[Partners]:
    yield partners


registry = HandlerRegistry(lifespan=resources)
publisher = Publisher("tickets")


class BookingMade(BaseModel):
    booking_id: UUID
    customer: str
    total_cents: int
    seats: list[str]


@registry.handler(
    "booking.made", name="payments.request", retry=RetryPolicy(max_attempts=4, base_delay=30, max_delay=600)
)
async def request_payment(event: EventEnvelope, payload: BookingMade, state: Partners) -> Reject | None:
    """An effect outside the database: the bank knows requests by their keys, so a repeated one is no second one."""
    try:
        await state.bank.request(event.idempotency_key, payload.customer, payload.total_cents)
    except CardDeclined as declined:
        return Reject(str(declined))
    return None


@registry.handler("payment.received", name="tickets.issue")
async def issue_tickets(event: EventEnvelope, tx: asyncpg.Connection) -> Snooze | None:
    """Effects in the database: the tickets and the news of them commit with the delivery, or not at all."""
    booking = UUID(event.payload["booking_id"])
    status = await tx.fetchval("SELECT status FROM bookings WHERE id = $1", booking)
    if status != "paid":
        return Snooze(60)  # the bank was faster than the shop
    seats = await tx.fetch(
        "INSERT INTO tickets (booking_id, seat) SELECT $1, name FROM seats WHERE booking_id = $1 RETURNING seat",
        booking,
    )
    issued = {"booking_id": booking, "seats": sorted(seat["seat"] for seat in seats)}
    await publisher.publish(tx, "tickets.issued", issued, domain_id=booking)
    return None


@registry.handler("tickets.issued", name="mail.send_tickets")
def send_tickets(event: EventEnvelope, context: HandlerContext, state: Partners) -> None:
    """A plain function, in a thread."""
    state.mail.send(f"Your tickets: {', '.join(event.payload['seats'])}", attempt=context.attempt)


@registry.handler("hold.ended", name="seats.release")
async def release_seats(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    """Seats of a booking that was not paid for are free again."""
    booking = UUID(event.payload["booking_id"])
    held = "UPDATE bookings SET status = 'released' WHERE id = $1 AND status = 'held' RETURNING id"
    if await tx.fetchval(held, booking):
        await tx.execute("UPDATE seats SET booking_id = NULL WHERE booking_id = $1", booking)
        await publisher.publish(tx, "booking.released", {"booking_id": booking}, domain_id=booking)


registry.schedule("day.ended", name="sales.end_of_day", cron="0 0 * * *", timezone="Europe/Berlin")


@registry.handler("day.ended", name="sales.count_day")
async def count_day(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    """The sales of the day that has ended, by the slot and not by the clock."""
    await tx.execute(
        """
        INSERT INTO daily_sales (day, tickets)
        SELECT ended.day, count(t.id)
        FROM (SELECT ($1::timestamptz AT TIME ZONE 'Europe/Berlin' - interval '1 minute')::date AS day) ended
        LEFT JOIN tickets t ON (t.issued_at AT TIME ZONE 'Europe/Berlin')::date = ended.day
        GROUP BY ended.day
        """,
        event.occurred_at,
    )
