"""What customers do: each call is part of its caller's transaction, and so are the events that it publishes."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

from examples.bookings.prices import total
from holdfast import Publisher

HOLD_SECONDS = 15 * 60


class SeatTaken(Exception):
    """A seat belongs to another booking."""


class Bookings:
    """The service. A test without a server passes a publisher of its own."""

    def __init__(self, publisher: Any = None) -> None:
        self._publisher = publisher or Publisher("bookings")

    def book(self, tx: Any, customer: str, seats: list[str]) -> UUID:
        """Hold seats for a customer, who has fifteen minutes to pay."""
        cents, booking = total(seats), uuid4()
        tx.execute("INSERT INTO bookings (id, customer, total_cents) VALUES (%s, %s, %s)", (booking, customer, cents))
        taken = "UPDATE seats SET booking_id = %s WHERE name = ANY (%s) AND booking_id IS NULL"
        if tx.execute(taken, (booking, seats)).rowcount < len(seats):
            raise SeatTaken(", ".join(seats))
        self.announce(tx, booking, customer, cents, seats)
        return booking

    def announce(self, tx: Any, booking: UUID, customer: str, cents: int, seats: list[str]) -> None:
        """Publish a booking, and a reminder to release its seats, which paying cancels."""
        made = {"booking_id": booking, "customer": customer, "total_cents": cents, "seats": seats}
        self._publisher.publish(tx, "booking.made", made, domain_id=booking)
        held = {"booking_id": booking}
        self._publisher.publish(tx, "hold.ended", held, delay=HOLD_SECONDS, key=f"hold:{booking}")

    def pay(self, tx: Any, booking: UUID, reference: str) -> None:
        """Note that a booking is paid for. The bank may say so twice, with one reference."""
        tx.execute("UPDATE bookings SET status = 'paid' WHERE id = %s AND status = 'held'", (booking,))
        paid = {"booking_id": booking}
        self._publisher.publish(tx, "payment.received", paid, idempotency_key=f"payment:{reference}")
        self._publisher.cancel(tx, f"hold:{booking}")
