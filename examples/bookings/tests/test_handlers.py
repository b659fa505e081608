"""One handler at a time, without a database."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from pydantic import ValidationError

from examples.bookings.handlers import registry
from examples.bookings.partners import Bank, Mail, Partners
from holdfast import Done, Reject, Snooze
from holdfast.testing import make_event, run_handler

MADE = {"booking_id": uuid4(), "customer": "Ada", "total_cents": 9_000, "seats": ["A1"]}


@pytest.fixture
def state() -> Partners:
    return Partners(Bank(), Mail())


@pytest.mark.parametrize("cents", [1, 100, 9_000, 48_600, 2**31])
def test_a_payment_is_requested(state: Partners, cents: int) -> None:
    event = make_event("booking.made", {**MADE, "total_cents": cents}, idempotency_key="k-1")
    assert run_handler(registry, "payments.request", event, state=state) == Done()
    assert state.bank.requests == {"k-1": ("Ada", cents)}


def test_a_declined_card_is_not_tried_again(state: Partners) -> None:
    state.bank.declines.add("Ada")
    assert run_handler(registry, "payments.request", MADE, state=state) == Reject("the card of Ada is declined")


def test_a_bank_that_is_down_is_an_error(state: Partners) -> None:
    state.bank.down_for = 1
    with pytest.raises(ConnectionError, match="cannot be reached"):
        run_handler(registry, "payments.request", MADE, state=state)


@pytest.mark.parametrize("field", sorted(MADE))
def test_an_event_without_a_field_is_refused(state: Partners, field: str) -> None:
    payload = {name: value for name, value in MADE.items() if name != field}
    with pytest.raises(ValidationError, match=field):
        run_handler(registry, "payments.request", payload, state=state)
    assert state.bank.calls == 0


@pytest.mark.parametrize("seats", [["A1"], ["A1", "A2"], ["C8"]])
def test_tickets_are_mailed(state: Partners, seats: list[str]) -> None:
    run_handler(registry, "mail.send_tickets", {"booking_id": uuid4(), "seats": seats}, state=state, attempt=2)
    assert state.mail.sent == [f"Your tickets: {', '.join(seats)}"] and state.mail.attempts == [2]


class Unpaid:
    """As much of a connection as the handler uses before it gives up."""

    async def fetchval(self, query: str, *values: Any) -> Any:
        return "held"


def test_tickets_wait_for_the_shop() -> None:
    assert run_handler(registry, "tickets.issue", {"booking_id": uuid4()}, tx=Unpaid()) == Snooze(60)


async def test_an_asynchronous_test_awaits_the_handler(state: Partners) -> None:
    assert await run_handler(registry, "payments.request", MADE, state=state) == Done()
    assert state.bank.calls == 1
