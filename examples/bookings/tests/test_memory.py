"""The same service without a server: for code that has no SQL of its own in the way."""

from __future__ import annotations

from uuid import uuid4

import pytest

from examples.bookings import handlers
from examples.bookings.partners import Partners
from examples.bookings.service import Bookings
from holdfast.testing import MemoryOutbox


@pytest.fixture
def memory() -> MemoryOutbox:
    return MemoryOutbox(handlers.registry)


@pytest.mark.parametrize("cents", [1, 100, 9_000, 48_600, 2**31])
def test_a_booking_is_announced(memory: MemoryOutbox, partners: Partners, cents: int) -> None:
    booking = uuid4()
    with memory.transaction() as tx:
        Bookings(memory.publisher("bookings")).announce(tx, booking, "Ada", cents, ["A1"])
    memory.assert_published("booking.made", {"booking_id": booking, "total_cents": cents}, domain_id=booking)
    memory.drain(due_only=True)
    memory.assert_handled("payments.request", {"booking_id": booking})
    assert list(partners.bank.requests.values()) == [("Ada", cents)]


def test_nothing_is_announced_that_is_rolled_back(memory: MemoryOutbox) -> None:
    with pytest.raises(KeyboardInterrupt), memory.transaction() as tx:
        Bookings(memory.publisher("bookings")).announce(tx, uuid4(), "Ada", 1, ["A1"])
        raise KeyboardInterrupt
    assert memory.published() == []


@pytest.mark.parametrize("down_for", [0, 1, 2, 3, 4])
def test_retries_follow_the_policy(memory: MemoryOutbox, partners: Partners, down_for: int) -> None:
    partners.bank.down_for = down_for
    memory.publish("booking.made", {"booking_id": uuid4(), "customer": "Ada", "total_cents": 1, "seats": ["A1"]})
    memory.drain()
    if down_for < 4:
        memory.assert_handled("payments.request")
    else:
        memory.assert_failed("payments.request", reason="retry_terminal", error=ConnectionError, attempts=4)
    assert partners.bank.calls == min(down_for + 1, 4)
