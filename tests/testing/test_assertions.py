"""Assertions hold where they should, and say what is there instead where they do not (TST-1)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar
from unittest.mock import ANY
from uuid import UUID

import pytest

from holdfast import EventEnvelope, HandlerRegistry, Reject, Snooze
from holdfast.errors import ConfigurationError, FieldError
from holdfast.testing import MemoryOutbox, make_event, run_handler

ORDER = UUID("01a1e52b-9d71-7c20-8c10-1d116de19fda")


@pytest.fixture
def memory() -> MemoryOutbox:
    """An outbox with one event that one handler has handled, and another has not."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="ledger.record")
    async def record(event: EventEnvelope) -> None: ...

    @registry.handler("order.placed", name="mail.confirm")
    async def confirm(event: EventEnvelope) -> Reject:
        return Reject("no address")

    memory = MemoryOutbox(registry)
    memory.publish(
        "order.placed", {"order_id": ORDER, "lines": [{"sku": "a", "price": Decimal("1.50")}]}, source="shop"
    )
    memory.publish("order.noted", {"order_id": ORDER}, target="books", headers={"tenant": "t-1"})
    memory.drain()
    return memory


LINES = [{"sku": "a", "price": "1.50"}]

HOLD: list[Callable[[MemoryOutbox], object]] = [
    lambda memory: memory.assert_published("order.placed"),
    lambda memory: memory.assert_published("order.placed", {"order_id": ORDER}, times=1, source="shop", target=None),
    lambda memory: memory.assert_published("order.placed", {"order_id": str(ORDER), "lines": LINES}),
    lambda memory: memory.assert_published("order.placed", {"lines": ANY}),
    lambda memory: memory.assert_published("order.noted", headers={"tenant": "t-1"}, target="books"),
    lambda memory: memory.assert_not_published("order.paid"),
    lambda memory: memory.assert_not_published("order.placed", {"order_id": "o-1"}),
    lambda memory: memory.assert_handled("ledger.record", {"order_id": ORDER}, times=1),
    lambda memory: memory.assert_not_handled("mail.confirm"),
    lambda memory: memory.assert_failed("mail.confirm"),
    lambda memory: memory.assert_failed("mail.confirm", {"order_id": ORDER}, reason="rejected", attempts=1),
    lambda memory: memory.assert_failed("mail.confirm", error=re.compile("^rej|address"), archived=False),
]


@pytest.mark.parametrize("claim", range(len(HOLD)))
def test_a_true_assertion_passes(memory: MemoryOutbox, claim: int) -> None:
    HOLD[claim](memory)


PLACED = f"order.placed  {{'order_id': '{ORDER}', 'lines': {LINES}}}  from shop"
NOTED = f"order.noted  {{'order_id': '{ORDER}'}}  from test to books"
FAILED = "mail.confirm  failed (rejected, attempt 1: no address)"

FAIL: list[tuple[Callable[[MemoryOutbox], object], list[str]]] = [
    (
        lambda memory: memory.assert_published("order.paid", {"order_id": ORDER}),
        [f"order.paid with {{'order_id': {ORDER!r}}} was not published.", PLACED, NOTED],
    ),
    (
        lambda memory: memory.assert_published("order.placed", {"order_id": "o-2", "lines": [], "by": "Ada"}),
        [f"differs: order_id is '{ORDER}', not 'o-2'; lines is {LINES}, not []; by is missing"],
    ),
    (
        lambda memory: memory.assert_published("order.placed", times=2),
        ["order.placed was published once, not 2 times.", PLACED],
    ),
    (
        lambda memory: memory.assert_published("order.placed", source="books", headers={"tenant": "t-2"}),
        ["order.placed with source='books', headers={'tenant': 't-2'} was not published."],
    ),
    (lambda memory: memory.assert_not_published("order.placed"), ["order.placed was published.", PLACED]),
    (
        lambda memory: memory.assert_handled("mail.confirm"),
        ["mail.confirm has not handled an event.", FAILED, "ledger.record  delivered  order.placed"],
    ),
    (
        lambda memory: memory.assert_handled("ledger.record", {"order_id": "o-2"}),
        [f"differs: order_id is '{ORDER}', not 'o-2'"],
    ),
    (
        lambda memory: memory.assert_handled("ledger.record", times=2),
        ["ledger.record has handled an event once, not 2 times."],
    ),
    (lambda memory: memory.assert_not_handled("ledger.record"), ["ledger.record has handled order.placed"]),
    (
        lambda memory: memory.assert_failed("mail.confirm", attempts=5, error=TimeoutError),
        ["mail.confirm has no dead letter with attempts 5, error <class 'TimeoutError'>.", FAILED],
    ),
    (lambda memory: memory.assert_failed("mail.confirm", archived=True), ["with archived True", FAILED]),
    (lambda memory: memory.assert_nothing_failed(), ["Failed:", FAILED]),
    (
        lambda memory: memory.assert_all_delivered(),
        ["Not delivered:", FAILED, "(no handler subscribes to order.noted)  pending"],
    ),
]


@pytest.mark.parametrize("claim", range(len(FAIL)))
def test_what_is_not_so_shows_what_is(memory: MemoryOutbox, claim: int) -> None:
    call, expected = FAIL[claim]
    with pytest.raises(AssertionError) as failure:
        call(memory)
    assert [text for text in expected if text not in str(failure.value)] == [], str(failure.value)


def test_a_misspelt_type_is_pointed_out(memory: MemoryOutbox) -> None:
    """An event that waits for nobody says what may have been meant (TST-1)."""
    memory.publish("order.placd", {"order_id": ORDER})
    memory.drain()
    with pytest.raises(AssertionError, match=r"no handler subscribes to order\.placd; did you mean order\.placed\?"):
        memory.assert_all_delivered()


def test_a_name_that_no_handler_has_is_no_answer(memory: MemoryOutbox) -> None:
    """What a misspelt handler has not handled says nothing (TST-1)."""
    with pytest.raises(AssertionError, match=r"No handler has this name; did you mean mail\.confirm\?"):
        memory.assert_not_handled("mail.confrim")
    with pytest.raises(AssertionError, match=r"did you mean mail\.confirm\?"):
        memory.assert_failed("mail.confrim")
    with pytest.raises(AssertionError, match=r"did you mean ledger\.record\?"):
        memory.assert_handled("ledger.recrod")
    MemoryOutbox().assert_not_handled("mail.confrim")  # here no handlers are known
    other = HandlerRegistry()

    @other.handler("order.paid", name="books.close")
    async def close(event: EventEnvelope) -> None: ...

    memory.drain(other)
    memory.assert_not_handled("books.close")


def test_a_field_that_events_do_not_have_is_refused(memory: MemoryOutbox) -> None:
    with pytest.raises(ConfigurationError, match="sauce is not a field of an event; use one of source"):
        memory.assert_published("order.placed", sauce="shop")


def test_archived_dead_letters_are_found() -> None:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="mail.confirm")
    async def confirm(event: EventEnvelope) -> Reject:
        return Reject()

    memory = MemoryOutbox(registry, dead_letters="archive")
    memory.publish("order.placed")
    memory.drain()
    assert memory.assert_failed("mail.confirm", archived=True, reason="rejected").last_error is None
    with pytest.raises(AssertionError, match=r"mail.confirm  archived \(rejected, attempt 1\)"):
        memory.assert_nothing_failed()


def test_what_is_put_off_for_ever_ends_the_drain() -> None:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="mail.confirm")
    async def confirm(event: EventEnvelope) -> Snooze:
        return Snooze(60)

    memory = MemoryOutbox(registry)
    memory.publish("order.placed")
    with pytest.raises(AssertionError, match=r"put off a hundred times.*\n.*\n  mail.confirm  pending"):
        memory.drain()


@dataclass
class OrderPlaced:
    event_type: ClassVar[str] = "order.placed"
    order_id: UUID


def test_event_classes_stand_for_their_types() -> None:
    event = make_event(OrderPlaced(ORDER), source="shop", idempotency_key="k-1")
    assert (event.event_type, event.payload) == ("order.placed", {"order_id": str(ORDER)})
    assert (event.source, event.idempotency_key) == ("shop", "k-1")
    memory = MemoryOutbox()
    memory.publish(OrderPlaced(ORDER))
    memory.assert_published(OrderPlaced, {"order_id": ORDER})


def test_an_event_is_checked_as_publishing_does() -> None:
    with pytest.raises(FieldError, match="event_type"):
        make_event("order placed", {})


def test_misuse_of_the_kit_is_refused_with_a_remedy() -> None:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="ledger.record")
    async def record(event: EventEnvelope, tx: object) -> None: ...

    with pytest.raises(ConfigurationError, match=r"ledger\.recrod is not a handler .* did you mean ledger\.record\?"):
        run_handler(registry, "ledger.recrod", {})
    with pytest.raises(ConfigurationError, match=r"tx is needed by ledger\.record; pass tx="):
        run_handler(registry, "ledger.record", {})
    with pytest.raises(ConfigurationError, match="registry is not known; pass drain"):
        MemoryOutbox().drain()
    with pytest.raises(ConfigurationError, match="advance is -1 day"):
        MemoryOutbox(registry).advance(days=-1)
    with pytest.raises(ConfigurationError, match="tx is object, not a transaction of a MemoryOutbox"):
        MemoryOutbox().publisher("shop").publish(object(), "order.placed", {})  # type: ignore[call-overload]
