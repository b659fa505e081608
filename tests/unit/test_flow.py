"""What code declares about flow, and what a worker knows of it: rates, breakers, what is held back."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.errors import ConfigurationError
from holdfast.failure import ErrorReport
from holdfast.flow import Pause, breaker, per_second, shown_rate
from holdfast.handlers import Handler
from holdfast.postgres.flow import Faltered, Wait
from holdfast.telemetry import Fact, Notice
from holdfast.worker import breakers as breakers_module
from holdfast.worker import held as held_module
from holdfast.worker.breakers import Breakers
from holdfast.worker.held import Held
from holdfast.worker.settlements import Falter

HANDLER = "billing.charge_card"


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    each = Clock()
    monkeypatch.setattr(held_module, "time", each)
    monkeypatch.setattr(breakers_module, "time", each)
    return each


def a_handler(after: int = 3) -> Handler:
    registry = HandlerRegistry()

    async def charge(event: EventEnvelope) -> None: ...

    return registry.add(HANDLER, ("order.placed",), charge, on_outage=Pause(after=after))


def delivery(handler: Handler, id: UUID | None = None) -> Any:
    return SimpleNamespace(handler=handler, id=id or uuid.uuid4(), token=uuid.uuid4())


def falter(delivery: Any) -> Falter:
    return Falter(delivery, 1.0, ErrorReport("away", "ConnectionError", ""), None)


# --- rates and breakers, as declared ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"), [("100/s", 100.0), ("90/min", 1.5), ("90 / m", 1.5), ("36/h", 0.01), (2.5, 2.5), (" 1/s ", 1.0)]
)
def test_rates(text: str | float, rate: float) -> None:
    """Per second, minute or hour, or a number per second (LSN-10)."""
    assert per_second("rate", text) == pytest.approx(rate)


@pytest.mark.parametrize("rate", [0.0001, 0.01, 1.0, 1.5, 100.0, 12_345.0])
def test_a_rate_that_is_shown_can_be_given_again(rate: float) -> None:
    """From a list into a command (LSN-10, OPS-1)."""
    assert per_second("rate", shown_rate(rate)) == pytest.approx(rate, rel=1e-5)


@pytest.mark.parametrize(
    "given", ["0/s", "-1/s", "1/d", "1", "", "fast", "1/s/s", "٣/s", True, 0, -1, float("inf"), []]
)
def test_bad_rates(given: Any) -> None:
    """A rate of nothing is not a pause (LSN-10, R5)."""
    with pytest.raises(ConfigurationError) as refused:
        per_second("rate", given)
    assert refused.value.field == "rate"


@pytest.mark.parametrize("options", [{"after": 0}, {"after": 1.5}, {"first_probe": 0}, {"longest_wait": 0.5}])
def test_bad_breakers(options: dict[str, Any]) -> None:
    """LSN-17, R5."""
    with pytest.raises(ConfigurationError, match=r"Pause\."):
        Pause(**options)


def test_a_wait_that_is_shorter_than_the_first_probe_names_both() -> None:
    """LSN-17."""
    with pytest.raises(ConfigurationError, match=r"longest_wait is 10, and first_probe 60 is longer"):
        Pause(first_probe=60, longest_wait=10)


def test_what_on_outage_may_be() -> None:
    """LSN-17."""
    assert (breaker("on_outage", "retry"), breaker("on_outage", "pause")) == (None, Pause())
    assert breaker("on_outage", Pause(after=2)) == Pause(after=2)


# --- what is held back ------------------------------------------------------------------------------------


def test_a_handler_is_left_out_until_its_time(clock: Clock) -> None:
    """No polling in between; with up to a fifth more, so that workers do not come back together (LSN-10)."""
    held = Held()
    held.note([Wait(HANDLER, "rate", 1.0)])
    assert held.holds(HANDLER)
    assert held.passing
    assert 1.0 <= held.timeout(60) <= 1.2
    clock.now += 1.3
    assert not held.holds(HANDLER)
    assert held.timeout(60) == 60
    assert held.binds(HANDLER)
    clock.now += 10
    assert not held.binds(HANDLER)


@pytest.mark.parametrize(("cause", "woken"), [("concurrency", 1), ("ramp", 1), ("rate", 0), ("paused", 0), ("open", 0)])
def test_a_place_that_is_free_is_asked_for_at_once(clock: Clock, cause: Any, woken: int) -> None:
    """By the worker that has freed it; a rate, a pause and an outage are over when they are over (LSN-10)."""
    held, calls = Held(), list[int]()
    held.when_free(lambda: calls.append(1))
    held.note([Wait(HANDLER, cause, None)])
    held.freed([delivery(a_handler())])
    assert len(calls) == woken
    assert held.holds(HANDLER) is not bool(woken)


def test_a_pause_lasts_until_somebody_says_so(clock: Clock) -> None:
    """A drain does not wait for it (LSN-10)."""
    held = Held()
    held.note([Wait(HANDLER, "paused", None)])
    clock.now += 1e6
    assert held.holds(HANDLER)
    assert not held.passing
    held.clear()
    assert not held.holds(HANDLER)


def test_a_drain_does_not_wait_for_what_does_not_come(clock: Clock) -> None:
    """Such as places of a worker that is gone, a rate of a few an hour, or a clock that stands still (LSN-10)."""
    held = Held()
    held.note([Wait(HANDLER, "rate", 300.0)])
    assert not held.passing
    for second in range(12):
        held.note([Wait(HANDLER, "concurrency", 1.0)])
        assert held.passing is (second < 10)
        clock.now += 1
    held.came([HANDLER])
    held.note([Wait(HANDLER, "concurrency", 1.0)])
    assert held.passing


# --- breakers ---------------------------------------------------------------------------------------------


def test_a_worker_stops_by_itself_until_it_has_an_answer(clock: Clock) -> None:
    """The partner is not called while the database is asked; a lost answer stops nobody for good (LSN-17)."""
    handler, facts = a_handler(), list[Fact]()
    breakers, answers = Breakers([handler], facts.append), list[tuple[str, bool]]()
    breakers.when_answered(lambda name, is_open: answers.append((name, is_open)))
    failed = [delivery(handler) for _ in range(3)]
    assert [breakers.failed(each) for each in failed] == [True, False, False]
    assert breakers.stops(handler)
    clock.now += 11
    assert not breakers.stops(handler)
    clock.now -= 11
    found = [Faltered(each.id, "hold", True, number == 2) for number, each in enumerate(failed)]
    breakers.answered([falter(each) for each in failed], found)
    assert not breakers.stops(handler)
    assert answers == [(HANDLER, True)]
    assert [fact.name for fact in facts if isinstance(fact, Notice)] == ["breaker_opened"]


def test_a_success_in_between_is_told_with_the_next_failure(clock: Clock) -> None:
    """Failures here and there never look like failures in a row (LSN-17)."""
    handler = a_handler()
    breakers = Breakers([handler], lambda fact: None)
    for _ in range(10):
        assert breakers.failed(delivery(handler))
        breakers.succeeded(delivery(handler))
    assert not breakers.stops(handler)


def test_successes_are_reported_now_and_then(clock: Clock) -> None:
    """Five times a second, and at once while the breaker is open or something has failed (LSN-17)."""
    handler = a_handler()
    breakers = Breakers([handler], lambda fact: None)
    probe = delivery(handler)
    breakers.succeeded(delivery(handler))
    assert len(breakers.due(lambda name: False)) == 1
    breakers.succeeded(probe)
    assert breakers.due(lambda name: False) == []
    assert breakers.due(lambda name: True) == [(HANDLER, probe.token)]
    assert breakers.due(lambda name: True) == []


def test_a_quiet_time_begins_with_few_again(clock: Clock) -> None:
    """Places grow with successes, stay while they are used, and are forgotten when nothing comes (LSN-17)."""
    handler = a_handler()
    breakers = Breakers([handler], lambda fact: None)
    few = breakers.room(handler, 0)
    for _ in range(100):
        breakers.succeeded(delivery(handler))
    clock.now += 1.5
    assert breakers.room(handler, 0) == few + 100
    clock.now += 1.5  # nothing ends, and much runs
    assert breakers.room(handler, 40) == few + 100 - 40
    clock.now += 1.5
    assert breakers.room(handler, 40) == 80 - 40
    clock.now += 2.5
    assert breakers.room(handler, 0) == few
