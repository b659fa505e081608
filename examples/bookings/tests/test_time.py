"""Delays, schedules and backoff: time is not waited for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta

import pytest

from examples.bookings.partners import Partners
from examples.bookings.tests.conftest import Book
from holdfast.testing import Outbox

pytestmark = pytest.mark.usefixtures("partners")


@pytest.mark.parametrize("minutes, free", [(1, 23), (5, 23), (10, 23), (14, 23), (16, 24), (60, 24), (600, 24)])
def test_seats_are_released_after_fifteen_minutes(outbox: Outbox, book: Book, minutes: int, free: int) -> None:
    book("A1")
    outbox.advance(minutes=minutes)
    assert outbox.fetch("SELECT count(*) FROM seats WHERE booking_id IS NULL")[0][0] == free


@pytest.mark.parametrize("minutes", [0, 5, 10, 14])
def test_paid_seats_are_not_released(outbox: Outbox, book: Book, pay: Callable[..., None], minutes: int) -> None:
    booking = book("A1")
    outbox.advance(minutes=minutes)
    pay(booking)
    outbox.advance(hours=1)
    outbox.assert_not_published("booking.released")
    assert outbox.fetch("SELECT status FROM bookings")[0]["status"] == "paid"


def test_drain_does_not_wait_for_delays(outbox: Outbox, book: Book) -> None:
    booking = book("A1")
    done = outbox.drain()
    assert done.moved > timedelta(minutes=14)
    outbox.assert_published("booking.released", {"booking_id": booking})


@pytest.mark.parametrize("after", [timedelta(minutes=1), timedelta(minutes=20)])
def test_backoff_takes_its_time(outbox: Outbox, book: Book, partners: Partners, after: timedelta) -> None:
    """Full jitter below thirty seconds, one minute and two: four attempts are over after four minutes at most."""
    partners.bank.down_for = 1_000
    book("A1")
    outbox.drain(due_only=True)
    assert partners.bank.calls == 1
    outbox.advance(seconds=after.total_seconds())
    assert partners.bank.calls >= 2
    if after > timedelta(minutes=4):
        outbox.assert_failed("payments.request", attempts=4)


@pytest.mark.parametrize("days", [1, 2, 7])
def test_sales_are_counted_each_midnight(outbox: Outbox, days: int) -> None:
    outbox.freeze("2026-03-01T12:00:00+01:00")
    done = outbox.advance(days=days)
    assert done.fired == days
    counted = outbox.fetch("SELECT day FROM daily_sales ORDER BY day")
    assert [row["day"] for row in counted] == [date(2026, 3, 1) + timedelta(days=n) for n in range(days)]


def test_a_day_has_the_tickets_that_were_issued_on_it(outbox: Outbox, book: Book, pay: Callable[..., None]) -> None:
    outbox.freeze("2026-03-01T12:00:00+01:00")
    pay(book("A1", "A2"), reference="r-1")
    outbox.advance(days=1)
    pay(book("B1"), reference="r-2")
    outbox.advance(days=1)
    sales = outbox.fetch("SELECT day, tickets FROM daily_sales ORDER BY day")
    assert [tuple(row) for row in sales] == [(date(2026, 3, 1), 2), (date(2026, 3, 2), 1)]


def test_the_clock_of_the_application_is_the_same(outbox: Outbox, book: Book) -> None:
    """Defaults of the application's own tables show the time of the test."""
    outbox.freeze("2030-01-01T00:00:00+00:00")
    book("A1")
    assert outbox.fetch("SELECT booked_at FROM bookings")[0]["booked_at"] == datetime(2030, 1, 1, tzinfo=UTC)


def test_a_worker_that_was_away_fires_the_latest_slot(outbox: Outbox) -> None:
    outbox.freeze("2026-03-01T12:00:00+01:00")
    outbox.drain()
    outbox.move_clock(days=5)  # no worker runs
    outbox.drain()
    assert [row["day"] for row in outbox.fetch("SELECT day FROM daily_sales")] == [date(2026, 3, 5)]
