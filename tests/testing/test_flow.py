"""Limits, breakers and ordering keys in a test, on Postgres and in memory alike (TST-1, TST-2)."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, RetryPolicy
from holdfast.flow import Pause
from holdfast.testing import MemoryOutbox, Outbox

ONCE = RetryPolicy(max_attempts=1)
FAULTS = ["crash_after_effect", "lose_commit_answer", "duplicate_delivery", "expire_lease"]


class Partner:
    """What a handler with a breaker calls, and with which attempt."""

    def __init__(self) -> None:
        self.down = True
        self.calls: list[tuple[int, int]] = []
        self.registry = HandlerRegistry()
        pause = Pause(after=3, first_probe=2, longest_wait=60)
        self.registry.add("partner.charge", ("charge.due",), self._charge, on_outage=pause, retry=ONCE)

    async def _charge(self, event: EventEnvelope, context: HandlerContext) -> None:
        self.calls.append((event.payload["n"], context.attempt))
        if self.down:
            raise ConnectionError("no answer")


@pytest.fixture(params=["postgres", "memory"])
def either(request: pytest.FixtureRequest) -> Any:
    return MemoryOutbox() if request.param == "memory" else request.getfixturevalue("outbox")


def counting(**options: Any) -> tuple[HandlerRegistry, list[int]]:
    """A registry of one handler of order.placed, and the numbers that it gets."""
    registry, seen = HandlerRegistry(), list[int]()

    async def take(event: EventEnvelope) -> None:
        seen.append(event.payload["n"])

    registry.add("orders.take", ("order.placed",), take, **options)
    return registry, seen


def publish(outbox: Any, count: int, event_type: str = "order.placed", **options: Any) -> None:
    for n in range(count):
        outbox.publish(event_type, {"n": n}, **options)


def test_a_drain_moves_the_clock_on_to_what_a_rate_allows(either: Any) -> None:
    """All are delivered, in the time that the rate takes and in none of the test's (LSN-10, TST-1)."""
    registry, seen = counting(rate="10/h")
    publish(either, 5)
    done = either.drain(registry)
    assert sorted(seen) == list(range(5))
    assert 0.35 <= done.moved.total_seconds() / 3600 <= 0.45


def test_an_hour_lets_through_what_a_rate_allows(either: Any) -> None:
    """The bucket has one, and ten more come in within the hour (LSN-10, TST-1)."""
    registry, seen = counting(rate="10/h")
    publish(either, 30)
    either.advance(registry=registry, hours=1)
    either.drain(registry, due_only=True)
    assert len(seen) in (10, 11)


def test_an_outage_waits_and_goes_on(either: Any) -> None:
    """No dead letters, one probe at a time, no attempt lost; then everything is delivered (LSN-17, TST-1)."""
    partner = Partner()
    publish(either, 12, "charge.due")
    either.advance(registry=partner.registry, minutes=10)
    either.assert_nothing_failed()
    assert len(partner.calls) < 30
    partner.down, partner.calls = False, []
    either.drain(partner.registry)
    either.assert_all_delivered()
    assert sorted(partner.calls) == [(n, 1) for n in range(12)]


def test_one_event_alone_fails_by_its_own_fault(either: Any) -> None:
    """It has its budget, and one attempt more (LSN-17)."""
    partner = Partner()
    publish(either, 1, "charge.due")
    either.drain(partner.registry)
    either.assert_failed("partner.charge", error=ConnectionError)
    assert partner.calls == [(0, 1), (0, 1)]


@pytest.mark.slow
def test_a_partner_that_stays_away_ends_the_drain(either: Any) -> None:
    """A drain that can never end says so, in place of events that are left without a word (TST-1)."""
    publish(either, 3, "charge.due")
    with pytest.raises(AssertionError, match="put off a hundred times"):
        either.drain(Partner().registry)


def test_a_batch_has_no_more_events_than_its_limits_allow(either: Any) -> None:
    """Places count events (LSN-10, LSN-12)."""
    registry, sizes = HandlerRegistry(), list[int]()

    async def take(events: list[EventEnvelope]) -> None:
        sizes.append(len(events))

    registry.add("orders.take", ("order.placed",), take, batch=10, within=0, fleet_concurrency=4)
    publish(either, 12)
    either.drain(registry)
    assert sum(sizes) == 12
    assert max(sizes) <= 4


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_the_order_as_it_is(outbox: Outbox, fault: str) -> None:
    """An event that is delivered twice is so before the next one of its key begins (LSN-9, TST-2)."""
    registry, seen = counting()
    publish(outbox, 4, ordering_key="order-17")
    getattr(outbox, fault)("orders.take")
    outbox.drain(registry)
    outbox.assert_all_delivered()
    assert seen == sorted(seen)
    assert set(seen) == set(range(4))
    assert len(seen) == (4 if fault == "lose_commit_answer" else 5)
