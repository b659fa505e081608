"""Which observers get which facts, and that a fact which no observer wants is never made."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import structlog

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, Reactions, RetryPolicy, Worker, WorkerSettings
from holdfast.errors import ConfigurationError
from holdfast.ids import uuid7
from holdfast.measurements import Measurements
from holdfast.observability.logging import log_fact
from holdfast.observability.observers import Observers
from holdfast.observing import FACTS, USUAL_FACTS, DirectObservers, ObserverGroup, is_sampled
from holdfast.telemetry import Claimed, DeliveryFact, Fact, Failed, Handled, Notice, Published, Settled, trace_id_of
from tests.worker.support import Facts, Observed, drained, publish_many, running, until

DSN = "postgresql://localhost/x"


def handled(event_id: UUID) -> Handled:
    return Handled(event_id, event_id, "order.placed", "shop", None, "shop.note", 1, "c")


# --- facts ---


@pytest.mark.parametrize("kind", sorted(FACTS, key=lambda kind: kind.__name__))
def test_facts_are_frozen_and_have_no_room_for_secrets(kind: type[Fact]) -> None:
    """None has a field for a payload, headers, a key or a token, nor takes another attribute (OBS-1)."""
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert not hasattr(kind, "__dict__") or "__slots__" in vars(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    assert not [name for name in names if re.search("payload|header|key|token|dsn|password", name) and name != "keyed"]


def test_every_way_to_close_a_delivery_has_a_result() -> None:
    """The outcomes of the tally, and no others (OBS-1)."""
    closing = [kind for kind in FACTS if issubclass(kind, DeliveryFact)]
    results = {kind.__dataclass_fields__["result"].default for kind in closing}
    assert results == {"delivered", "retried", "snoozed", "failed", "released", "lost_lease"}


@pytest.mark.parametrize(
    ("trace_context", "expected"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-later", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01 a=b,c=d", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None),
        ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", None),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", None),
        ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", None),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n", None),
        ("canary", None),
        ("", None),
        (None, None),
    ],
)
def test_the_trace_id_of_a_traceparent(trace_context: str | None, expected: str | None) -> None:
    """Of a valid one, and of nothing else: what a producer writes there is not repeated (OBS-1)."""
    assert trace_id_of(trace_context) == expected


# --- what observers want ---


def test_a_plain_function_gets_the_usual_facts() -> None:
    """As before there were others (OBS-1)."""
    seen: list[Fact] = []
    group = DirectObservers((seen.append,))
    assert {kind for kind in FACTS if group.wants(kind)} == USUAL_FACTS
    notice = Notice("info", "x")
    group(notice)
    group(handled(uuid4()))
    assert seen == [notice]


def test_an_observer_gets_what_it_names_and_nothing_else() -> None:
    """OBS-1."""
    wants, all_of_it = Observed((Published, Claimed)), Observed()
    group = DirectObservers((wants, all_of_it))
    for fact in (Claimed("c", 1, 0.1), Notice("info", "x"), Settled("deliver", 1, 0, 0.1)):
        group(fact)
    assert [type(fact) for fact in wants] == [Claimed]
    assert [type(fact) for fact in all_of_it] == [Claimed, Notice, Settled]


class Wrong:
    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)

    def __call__(self, fact: Fact) -> None: ...


@pytest.mark.parametrize(
    "observer",
    [
        Wrong(facts=[]), Wrong(facts=None), Wrong(facts={"Handled"}), Wrong(facts=Handled), Wrong(facts={int}),
        Wrong(sample=2), Wrong(sample="1"), Wrong(sample=float("nan")), Wrong(sample=True),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "make",
    [
        lambda observers: Publisher("shop", observers=observers),
        lambda observers: Worker(DSN, one_handler(), observers=observers),
        lambda observers: Reactions(DSN, one_handler(), observers=observers),
    ],
    ids=["publisher", "worker", "reactions"],
)
def test_a_wish_that_cannot_be_met_is_refused(make: Callable[[Any], object], observer: Wrong) -> None:
    """Where the observer is given, and not when the first fact comes (OBS-1)."""
    with pytest.raises(ConfigurationError, match="Wrong"):
        make((observer,))


def one_handler() -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.note")
    async def note(event: EventEnvelope) -> None: ...

    return registry


# --- sampling ---


def test_a_sample_is_a_share_and_is_the_same_everywhere() -> None:
    """Of ids that one process makes in a row, too; a larger share includes a smaller one (OBS-1)."""
    ids = [uuid7() for _ in range(20_000)]
    for share in (0.01, 0.1, 0.5):
        assert sum(is_sampled(each, share) for each in ids) == pytest.approx(share * len(ids), rel=0.35)
    assert all(is_sampled(each, 0.1) for each in ids if is_sampled(each, 0.01))
    assert all(is_sampled(each, 1.0) for each in ids) and not any(is_sampled(each, 0.0) for each in ids)
    known = UUID("01a1e480-b491-7cac-937f-428a764ae347")
    assert [is_sampled(known, share) for share in (0.3, 0.6, 0.7, 0.9)] == [False, False, True, True]


def test_successes_are_sampled_for_each_observer_and_failures_are_not() -> None:
    """OBS-1."""
    some, none, everything = Observed(sample=0.25), Observed(sample=0.0), Observed()
    group = DirectObservers((some, none, everything))
    ids = [uuid7() for _ in range(400)]
    assert group.share(Handled) == group.share(Published) == 1.0
    for each in ids:
        group(handled(each))
        group(Published(each, "order.placed", "shop", None, None, 0, "c", None))
        group(
            Failed(each, each, "t", "s", None, "h.h", 1, "c", failure_reason="r", last_error=None, error_signature=None)
        )
    kept = {each for each in ids if is_sampled(each, 0.25)}
    assert {fact.event_id for fact in some.of(Handled)} == {fact.event_id for fact in some.of(Published)} == kept
    assert len(some.of(Failed)) == len(none.of(Failed)) == 400 and len(none) == 400
    assert len(everything) == 1200
    assert DirectObservers((some, none)).share(Handled) == 0.25
    assert not DirectObservers((none,)).wants(Handled) and DirectObservers(()).share(Handled) == 0.0


def test_an_observer_that_raises_costs_the_caller_nothing() -> None:
    """OBS-1."""
    seen = Observed()

    def raises(_fact: Fact) -> None:
        raise OSError("no")

    DirectObservers((raises, seen))(Notice("info", "x"))
    assert seen[-1] == Notice("info", "x")


def raising(error: Exception) -> Callable[[Fact], None]:
    def observer(_fact: Fact) -> None:
        raise error

    return observer


@pytest.mark.parametrize("direct", [True, False])
async def test_the_others_are_told_of_an_observer_that_raises(direct: bool) -> None:
    """Once for each type of its errors, with its name and the place; what it has not got is counted (OBS-1)."""
    seen, before = Observed(), Measurements.of_publishing().facts_dropped
    errors = iter([OSError("canary-3141592")] * 3 + [ValueError("no")] * 2)

    def broken(_fact: Fact) -> None:
        raise next(errors)

    observers = DirectObservers((broken, seen)) if direct else Observers((broken, seen))
    for number in range(5):
        observers(Failed(uuid4(), uuid4(), "a.b", "a", None, "a.c", number, "c", "rejected", None, None))
    await until(lambda: len(seen.notices("observer_failed")) == 2 and len(seen) == 7, what="they are told")
    first, second = (notice.details for notice in seen.notices("observer_failed"))
    assert (first["error"], second["error"], first["fact"]) == ("OSError", "ValueError", "Failed")
    assert str(first["observer"]).endswith("<locals>.broken") and "test_observing.py:" in str(first["place"])
    assert "canary" not in str(first)
    if isinstance(observers, Observers):
        assert observers.dropped == 5
    else:
        assert Measurements.of_publishing().facts_dropped == before + 5


@pytest.mark.parametrize("direct", [True, False])
async def test_the_log_is_told_where_no_other_observer_takes_notices(direct: bool) -> None:
    """No one else is there, or all of them raise (OBS-1)."""
    with structlog.testing.capture_logs() as entries:
        for observers in ((raising(OSError()),), (raising(OSError()), raising(KeyError()))):
            group = DirectObservers(observers, log_fact) if direct else Observers(observers)
            del entries[:]
            for _ in range(3):
                group(Notice("info", "x"))
            await until(lambda: any(entry["event"] == "observer_failed" for entry in entries), what="it is logged")
            assert len(entries) <= len(observers) and entries[0]["log_level"] == "error"


def test_an_observer_of_a_publisher_that_raises_is_in_the_log() -> None:
    """A publisher and an exchange have no other observer (OBS-1)."""
    publisher = Publisher("shop", observers=(raising(OSError()),))
    with structlog.testing.capture_logs() as entries:
        publisher._steps._observe(Notice("info", "x"))
    assert [(entry["event"], entry["error"]) for entry in entries] == [("observer_failed", "OSError")]


async def test_an_observer_without_notices_is_not_told_of_what_it_missed() -> None:
    """It gets what it names, also after it could not take facts (OBS-1)."""
    calls: list[Fact] = []

    class Flaky:
        facts = frozenset((Claimed,))

        def __call__(self, fact: Fact) -> None:
            calls.append(fact)
            if len(calls) == 1:
                raise OSError("no")

    observers = Observers((Flaky(),))
    for number in range(3):
        observers(Claimed("c", number, 0.0))
    await observers.flush(5)
    assert [type(fact) for fact in calls] == [Claimed] * 3 and observers.dropped == 1


# --- a fact that no observer wants is not made ---


@pytest.fixture
def only_notices_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(fact: Fact, *_: object, **__: object) -> None:
        raise AssertionError(f"{type(fact).__name__} was made, and no observer wants it")

    for kind in FACTS - {Notice}:
        monkeypatch.setattr(kind, "__init__", made)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the facts that observers were asked for, one after the other."""
    found: list[str] = []

    def noting(question: Callable[[ObserverGroup, Any], Any]) -> Callable[[ObserverGroup, Any], Any]:
        def ask(group: ObserverGroup, kind: Any) -> Any:
            found.append(kind.__name__)
            return question(group, kind)

        return ask

    for name in ("wants", "share"):
        monkeypatch.setattr(ObserverGroup, name, noting(getattr(ObserverGroup, name)))
    return found


@pytest.mark.usefixtures("only_notices_are_made")
async def test_nothing_is_made_for_nobody(dsn: str, conn: asyncpg.Connection, asked: list[str]) -> None:
    """Publishing, claiming, handling, failing and settling; nor is an observer asked for each event (OBS-1)."""
    registry, notices = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="shop.note")
    async def note(event: EventEnvelope) -> None: ...

    @registry.handler("order.placed", name="shop.fail", retry=RetryPolicy(strategy="none"))
    async def fail(event: EventEnvelope) -> None:
        raise TypeError("no")

    def only_notices(fact: Fact) -> None:
        notices.append(fact)

    only_notices.facts = frozenset((Notice,))  # type: ignore[attr-defined]
    publisher = Publisher("shop", observers=(only_notices,))
    async with conn.transaction():
        await publisher.publish(conn, "order.placed", {})
        await publisher.publish(conn, "order.placed", {}, correlation_id="c")
        await publisher.publish_many(conn, [NewEvent("order.placed", {}) for _ in range(50)])
    async with Worker(dsn, registry, WorkerSettings(), observers=(only_notices,)) as worker:
        await drained(conn)
        before = len(asked)
        await publish_many(conn, "order.placed", 50)
        await drained(conn)
        assert len(asked) == before, "asked once, when the worker is made"
        await until(lambda: worker.counters.failed == 102, what="every failure")
    assert not notices.notices("loop_failed") and not notices.notices("runner_failed")


async def test_what_is_made_is_what_is_wanted(dsn: str, conn: asyncpg.Connection) -> None:
    """A sample of the successes, and every claim and settle, whose counts come to the same (OBS-1)."""
    observed = Observed((Claimed, Settled, Handled), sample=0.2)
    await publish_many(conn, "order.placed", 300)
    ids = [row["id"] for row in await conn.fetch("SELECT id FROM core.outbox")]
    async with running(dsn, one_handler(), observed):
        await drained(conn)
        await until(lambda: sum(fact.count for fact in observed.of(Settled)) == 300, what="every settle is told")
    assert sum(fact.count for fact in observed.of(Claimed)) == 300
    assert all(fact.took >= 0 for fact in (*observed.of(Claimed), *observed.of(Settled)))
    assert {fact.way for fact in observed.of(Settled)} == {"deliver"}
    assert {fact.event_id for fact in observed.of(Handled)} == {each for each in ids if is_sampled(each, 0.2)}


def test_the_default_log_wants_no_successes() -> None:
    """A worker that is not configured makes no fact for an event that is handled (OBS-1)."""
    assert not log_fact.facts & {Handled, Published, Claimed, Settled}
