"""What the service writes and publishes. Nothing is delivered here."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from examples.bookings.prices import price, total
from examples.bookings.service import Bookings, SeatTaken
from examples.bookings.tests.conftest import Book
from holdfast.testing import Outbox

SEATS = [["A1"], ["A1", "A2"], ["B1", "B2", "B3"], ["C1", "C2", "C3", "C4", "C5"], ["A8", "B8", "C8"]]


@pytest.mark.parametrize("seats", SEATS, ids=lambda seats: "+".join(seats))
@pytest.mark.parametrize("customer", ["Ada", "Łukasz", "李"])
def test_a_booking_is_published(outbox: Outbox, book: Book, customer: str, seats: list[str]) -> None:
    booking = book(*seats, customer=customer)
    made = outbox.assert_published("booking.made", {"booking_id": booking, "customer": customer, "seats": seats})
    assert made.payload["total_cents"] == total(seats)
    assert (made.source, made.domain_id) == ("bookings", booking)


@pytest.mark.parametrize("seats", SEATS, ids=lambda seats: "+".join(seats))
def test_its_seats_are_held(outbox: Outbox, book: Book, seats: list[str]) -> None:
    booking = book(*seats)
    held = outbox.fetch("SELECT name FROM seats WHERE booking_id = $1 ORDER BY name", booking)
    assert [row["name"] for row in held] == sorted(seats)


@pytest.mark.parametrize("seat", ["A1", "B4", "C8"])
def test_a_seat_is_not_booked_twice(outbox: Outbox, book: Book, seat: str) -> None:
    first = book(seat)
    with pytest.raises(SeatTaken):
        book(seat, "A5", customer="Grace")
    outbox.assert_published("booking.made", times=1)
    outbox.assert_not_published("booking.made", {"customer": "Grace"})
    assert [row["id"] for row in outbox.fetch("SELECT id FROM bookings")] == [first]


@pytest.mark.parametrize("seats", [["A9"], ["A1", "D1"], ["A1", "A1"], [""]], ids="+".join)
def test_what_is_no_seat_is_not_booked(outbox: Outbox, book: Book, seats: list[str]) -> None:
    with pytest.raises(ValueError, match="seat"):
        book(*seats)
    assert outbox.published() == []


def test_a_booking_that_is_rolled_back_is_not_published(outbox: Outbox, connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(KeyboardInterrupt), connection.transaction():
        Bookings().book(connection, "Ada", ["A1"])
        raise KeyboardInterrupt
    assert outbox.published() == [] and not outbox.fetch("SELECT FROM bookings")


def test_a_customer_has_fifteen_minutes(outbox: Outbox, book: Book) -> None:
    booking = book("A1")
    (reminder,) = [each for each in outbox.published() if each.event_type == "hold.ended"]
    assert reminder.payload == {"booking_id": str(booking)}
    assert reminder.available_at is not None
    assert timedelta(minutes=14) < reminder.available_at - outbox.now <= timedelta(minutes=15)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_payment_is_published_and_the_hold_ends(
    outbox: Outbox, book: Book, pay: Callable[..., None], times: int
) -> None:
    booking = book("A1")
    for _ in range(times):  # the bank repeats itself
        pay(booking)
    outbox.assert_published("payment.received", {"booking_id": booking}, idempotency_key="payment:r-1", times=times)
    assert outbox.fetch("SELECT status FROM bookings")[0]["status"] == "paid"
    cancelled = [each for each in outbox.deliveries() if each.failure_reason == "cancelled"]
    assert [each.event.event_type for each in cancelled] == ["hold.ended"]


@pytest.mark.parametrize("name", [f"{row}{number}" for row in "ABC" for number in range(1, 9)])
def test_every_seat_can_be_booked(outbox: Outbox, book: Book, name: str) -> None:
    """The database is as it was for each test: the seats that others have booked are free."""
    assert outbox.fetch("SELECT count(*) FROM seats WHERE booking_id IS NULL")[0][0] == 24
    booking = book(name)
    outbox.assert_published("booking.made", {"seats": [name], "total_cents": price(name)}, domain_id=booking, times=1)
    assert outbox.fetch("SELECT booking_id FROM seats WHERE name = $1", name)[0][0] == booking
