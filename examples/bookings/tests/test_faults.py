"""Handlers meet the faults that production has. What each may do twice, and what never, is decided here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from examples.bookings.partners import Partners
from examples.bookings.tests.conftest import Book
from holdfast.testing import Outbox

FAULTS = ["crash_after_effect", "lose_commit_answer", "duplicate_delivery", "expire_lease"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_customer_is_asked_for_money_once(outbox: Outbox, book: Book, partners: Partners, fault: str) -> None:
    """The bank is called again, with the same key: it knows the request."""
    book("A1")
    getattr(outbox, fault)("payments.request")
    outbox.drain(due_only=True)
    outbox.assert_handled("payments.request")
    assert len(partners.bank.requests) == 1
    assert partners.bank.calls == (1 if fault == "lose_commit_answer" else 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_tickets_are_issued_once(
    outbox: Outbox, book: Book, pay: Callable[..., None], partners: Partners, fault: str
) -> None:
    """The handler writes with `tx`: tickets, event and delivery are one commit."""
    pay(book("A1", "A2"))
    getattr(outbox, fault)("tickets.issue")
    outbox.drain()
    assert len(outbox.fetch("SELECT FROM tickets")) == 2
    outbox.assert_published("tickets.issued", times=1)
    assert len(partners.mail.sent) == 1


@pytest.mark.parametrize("fault, letters", list(zip(FAULTS, [2, 1, 2, 2], strict=True)))
def test_mail_may_be_sent_twice(
    outbox: Outbox, book: Book, pay: Callable[..., None], partners: Partners, fault: str, letters: int
) -> None:
    """A plain handler without a key that the other side knows: at least once, and the team accepts it."""
    pay(book("A1"))
    getattr(outbox, fault)("mail.send_tickets")
    outbox.drain()
    outbox.assert_handled("mail.send_tickets", times=1)
    assert len(partners.mail.sent) == letters
