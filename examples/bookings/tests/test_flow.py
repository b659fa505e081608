"""Everything together: the service publishes, and workers deliver until nothing is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from examples.bookings.partners import Partners
from examples.bookings.tests.conftest import Book
from holdfast.testing import Outbox

pytestmark = pytest.mark.usefixtures("partners")


@pytest.mark.parametrize("customer", ["Ada", "Grace", "Łukasz", "O'Hara", "李"])
@pytest.mark.parametrize("seats", [["A1"], ["C8"], ["A1", "B1"], ["C1", "C2", "C3", "C4", "C5"]], ids="+".join)
def test_a_payment_is_requested(
    outbox: Outbox, book: Book, partners: Partners, customer: str, seats: list[str]
) -> None:
    booking = book(*seats, customer=customer)
    outbox.drain(due_only=True)
    outbox.assert_handled("payments.request", {"booking_id": booking})
    assert [name for name, _ in partners.bank.requests.values()] == [customer]


@pytest.mark.parametrize("seats", [["A1"], ["B1", "B2"], ["C1", "C2", "C3"]], ids="+".join)
def test_paid_seats_become_tickets(
    outbox: Outbox, book: Book, pay: Callable[..., None], partners: Partners, seats: list[str]
) -> None:
    booking = book(*seats)
    pay(booking)
    outbox.drain()
    issued = outbox.assert_published("tickets.issued", {"booking_id": booking, "seats": seats})
    paid = outbox.assert_published("payment.received")
    assert [row["seat"] for row in outbox.fetch("SELECT seat FROM tickets ORDER BY seat")] == seats
    assert partners.mail.sent == [f"Your tickets: {', '.join(seats)}"]
    (record,) = [each for each in outbox.published() if each.event_id == issued.event_id]
    assert record.headers["causation_id"] == str(paid.event_id)


@pytest.mark.parametrize("times", [2, 3])
def test_a_payment_that_is_reported_twice_makes_one_ticket(
    outbox: Outbox, book: Book, pay: Callable[..., None], partners: Partners, times: int
) -> None:
    booking = book("A1")
    for _ in range(times):
        pay(booking)
    outbox.drain()
    outbox.assert_handled("tickets.issue", times=1)
    assert len(outbox.fetch("SELECT FROM tickets")) == 1 and len(partners.mail.sent) == 1


@pytest.mark.parametrize("down_for", [1, 2, 3])
def test_a_bank_that_is_down_is_asked_again(outbox: Outbox, book: Book, partners: Partners, down_for: int) -> None:
    partners.bank.down_for = down_for
    book("A1")
    done = outbox.drain(due_only=True)
    assert done.retried == 1 and not partners.bank.requests
    done = outbox.drain()
    outbox.assert_handled("payments.request")
    assert (done.retried, partners.bank.calls) == (down_for - 1, down_for + 1)


def test_a_bank_that_stays_down_is_a_dead_letter(outbox: Outbox, book: Book, partners: Partners) -> None:
    partners.bank.down_for = 1_000
    book("A1")
    outbox.drain()
    failed = outbox.assert_failed("payments.request", reason="retry_terminal", error=ConnectionError, attempts=4)
    assert not failed.archived


@pytest.mark.parametrize("customer", ["Ada", "Grace"])
def test_a_declined_card_is_a_dead_letter_at_once(
    outbox: Outbox, book: Book, partners: Partners, customer: str
) -> None:
    partners.bank.declines.add(customer)
    book("A1", customer=customer)
    outbox.drain(due_only=True)
    outbox.assert_failed("payments.request", {"customer": customer}, reason="rejected", error="declined", attempts=1)


@pytest.mark.parametrize("down_for", [1, 2])
def test_mail_is_sent_when_the_server_is_back(
    outbox: Outbox, book: Book, pay: Callable[..., None], partners: Partners, down_for: int
) -> None:
    partners.mail.down_for = down_for
    pay(book("A1"))
    outbox.drain()
    assert partners.mail.attempts == list(range(1, down_for + 2)) and len(partners.mail.sent) == 1


@pytest.mark.parametrize("payload", [{}, {"booking_id": "x"}, {"booking_id": None, "seats": []}], ids=str)
def test_an_event_that_no_version_sends_is_a_dead_letter(outbox: Outbox, payload: dict[str, object]) -> None:
    outbox.publish("booking.made", payload, source="bookings")
    outbox.drain()
    outbox.assert_failed("payments.request", payload, reason="retry_terminal", attempts=1)


@pytest.mark.parametrize("count", [2, 8])
def test_bookings_do_not_mix(
    outbox: Outbox, book: Book, pay: Callable[..., None], partners: Partners, count: int
) -> None:
    bookings = [book(f"A{number}", customer=f"c-{number}") for number in range(1, count + 1)]
    for number, booking in enumerate(bookings):
        pay(booking, reference=f"r-{number}")
    outbox.drain()
    outbox.assert_handled("tickets.issue", times=count)
    assert sorted(partners.mail.sent) == [f"Your tickets: A{number}" for number in range(1, count + 1)]
