"""What follows an order, with the faults that it has to survive."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from holdfast.testing import Outbox

FAULTS = ["crash_after_effect", "lose_commit_answer", "duplicate_delivery", "expire_lease"]


def place(outbox: Outbox, cents: int = 4_200) -> UUID:
    """An order as the API leaves it."""
    order = uuid4()
    outbox.execute("INSERT INTO orders (id, customer, total_cents) VALUES ($1, 'Ada', $2)", order, cents)
    outbox.publish(
        "order.placed", {"order_id": order, "customer": "Ada", "total_cents": cents}, source="orders", domain_id=order
    )
    return order


def test_a_sale_is_recorded_and_confirmed(outbox: Outbox, letters: Path) -> None:
    order = place(outbox)
    outbox.drain()
    outbox.assert_handled("ledger.record_sale", {"order_id": order})
    assert [tuple(row) for row in outbox.fetch("SELECT order_id, total_cents FROM ledger")] == [(order, 4_200)]
    assert f"{order}" in letters.read_text()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sale_is_recorded_once(outbox: Outbox, letters: Path, fault: str) -> None:
    """The handler writes with `tx`: whatever breaks, there is one entry for one order."""
    place(outbox)
    getattr(outbox, fault)("ledger.record_sale")
    outbox.drain()
    assert len(outbox.fetch("SELECT FROM ledger")) == 1


def test_a_confirmation_may_be_sent_twice(outbox: Outbox, letters: Path) -> None:
    """An effect outside the database: at least once, as the handler says of itself."""
    place(outbox)
    outbox.crash_after_effect("notifications.send_confirmation")
    outbox.drain()
    assert len(letters.read_text().splitlines()) == 2


def test_a_full_disk_is_a_dead_letter(outbox: Outbox, letters: Path) -> None:
    letters.mkdir()  # nothing can be written there
    place(outbox)
    outbox.drain()
    outbox.assert_failed("notifications.send_confirmation", reason="retry_terminal", error=IsADirectoryError)
    outbox.assert_handled("ledger.record_sale")


@pytest.mark.parametrize("days", [1, 3])
def test_the_books_are_closed_each_night(outbox: Outbox, letters: Path, days: int) -> None:
    outbox.freeze("2026-06-01T12:00:00+02:00")
    place(outbox, 1_000)
    place(outbox, 2_000)
    outbox.advance(days=days)
    closed = [tuple(row) for row in outbox.fetch("SELECT day, orders, total_cents FROM closed_days ORDER BY day")]
    assert closed[0] == (date(2026, 6, 1), 2, 3_000)
    assert closed[1:] == [(date(2026, 6, day), 0, 0) for day in range(2, days + 1)]
