"""Registering handlers: what is understood, and what is refused with a remedy."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from pydantic import BaseModel, ValidationError

from holdfast import (
    Done,
    EventEnvelope,
    HandlerContext,
    HandlerRegistry,
    Reject,
    Retry,
    RetryPolicy,
    Snooze,
    WorkerSettings,
)
from holdfast.errors import ConfigurationError, HandlerNameError, TerminalHandlerError


class Order(BaseModel):
    order_id: int


@dataclass
class Parcel:
    weight: float


async def plain(event: EventEnvelope) -> None: ...


def event(**payload: Any) -> EventEnvelope:
    return EventEnvelope(
        event_id=uuid4(),
        event_type="order.placed",
        event_version=1,
        occurred_at=datetime.now(UTC),
        source="shop",
        target=None,
        domain_id=None,
        payload=payload,
        idempotency_key="k",
        trace_context=None,
    )


def context() -> HandlerContext:
    return HandlerContext(uuid4(), uuid4(), "billing.charge", 1, {})


def test_decorator_returns_the_function() -> None:
    """What is registered stays an ordinary function (LSN-5)."""
    registry = HandlerRegistry()
    assert registry.handler("order.placed", name="billing.charge")(plain) is plain
    handler = registry["billing.charge"]
    assert (handler.name, handler.domain_context, handler.event_types) == (
        "billing.charge",
        "billing",
        ("order.placed",),
    )
    assert handler.asynchronous and handler.plain and not handler.transactional
    assert handler.retry == RetryPolicy()
    assert (handler.timeout, handler.on_error) == (300.0, "retry")
    assert "billing.charge" in registry and "billing.other" not in registry
    assert len(registry) == 1
    assert list(registry) == [handler]


def test_kinds_are_recognised_by_their_parameters() -> None:
    """Async and plain functions, typed payloads, transactions and the context, in any combination (LSN-5)."""
    registry = HandlerRegistry()

    async def everything(event: EventEnvelope, context: HandlerContext, tx: Any, payload: Order) -> None: ...

    def threaded(event: EventEnvelope, *, payload: Parcel, verbose: bool = False) -> None: ...

    full = registry.add("a.everything", ("x",), everything)
    assert (full.asynchronous, full.transactional, full.plain) == (True, True, False)
    given = context()
    extras = full.extras(event(order_id=7), given, "the transaction")
    assert extras == {"payload": Order(order_id=7), "context": given, "tx": "the transaction"}

    thread = registry.add("a.threaded", ("x",), threaded)
    assert (thread.asynchronous, thread.transactional) == (False, False)
    assert thread.extras(event(weight=2), given, None) == {"payload": Parcel(2.0)}
    with pytest.raises(ValidationError):
        thread.extras(event(weight="heavy"), given, None)


class Charge:
    def __init__(self) -> None:
        self.seen: list[EventEnvelope] = []

    async def __call__(self, event: EventEnvelope, payload: Order) -> None:
        self.seen.append(event)

    async def method(self, event: EventEnvelope, tx: Any) -> None: ...

    def threaded(self, event: EventEnvelope) -> None: ...


def test_callables_of_every_shape() -> None:
    """Objects with __call__, bound methods, partials and lambdas are what they look like (LSN-5)."""
    registry, charge = HandlerRegistry(), Charge()

    async def with_rate(rate: float, event: EventEnvelope, payload: Order) -> None: ...

    instance = registry.add("a.instance", ("x",), charge)
    assert instance.asynchronous and instance.payload_model is not None
    method = registry.add("a.method", ("x",), charge.method)
    assert method.asynchronous and method.transactional
    assert not registry.add("a.threaded", ("x",), charge.threaded).asynchronous
    assert not registry.add("a.lambda", ("x",), lambda event: None).asynchronous
    partial = registry.add("a.partial", ("x",), functools.partial(with_rate, 0.19))
    assert partial.asynchronous and partial.payload_model is not None
    assert partial.extras(event(order_id=1), context(), None) == {"payload": Order(order_id=1)}


def test_event_types_are_kept_once() -> None:
    """A type named twice is one interest (LSN-7)."""
    handler = HandlerRegistry().add("a.b", ("x", "y.*", "x", "*"), plain)
    assert handler.event_types == ("x", "y.*", "*")


def test_context_of_a_registry() -> None:
    """A worker's context is a setting, by default the part of the name before the first dot (LSN-7)."""
    assert HandlerRegistry(domain_context="archive").add("billing.keep.copy", ("x",), plain).domain_context == "archive"
    assert HandlerRegistry().add("billing.keep.copy", ("x",), plain).domain_context == "billing"


def test_include() -> None:
    """Registries of several modules become one; a name stays unique (LSN-5)."""
    first, second = HandlerRegistry(), HandlerRegistry(domain_context="archive")
    first.add("a.one", ("x",), plain)
    second.add("a.two", ("x",), plain)
    first.include(second)
    assert [handler.name for handler in first] == ["a.one", "a.two"]
    assert first["a.two"].domain_context == "archive"
    with pytest.raises(ConfigurationError, match=r"a\.two is registered twice"):
        first.include(second)


@pytest.mark.parametrize("name", ["charge", "Billing.charge", "billing.", ".charge", "billing charge", "", "a.1b"])
def test_names_must_begin_with_a_domain_context(name: str) -> None:
    """The error says what to write (ENV-2)."""
    with pytest.raises(HandlerNameError) as caught:
        HandlerRegistry().add(name, ("x",), plain)
    assert caught.value.remedy


def test_name_is_taken_once() -> None:
    """A handler's name is half of the inbox's key (LSN-6)."""
    registry = HandlerRegistry()
    registry.add("a.b", ("x",), plain)
    with pytest.raises(ConfigurationError, match=r"a\.b is registered twice"):
        registry.add("a.b", ("y",), plain)


@pytest.mark.parametrize(
    "event_types", [(), ("",), ("order placed",), ("a/b",), ("a\x00",), (7,), ("x" * 201,), "order"]
)
def test_event_types_are_checked(event_types: Any) -> None:
    """What could never match, and a bare string, which would be taken letter by letter, are refused (LSN-7)."""
    with pytest.raises(ConfigurationError) as caught:
        HandlerRegistry().add("a.b", event_types, plain)
    assert caught.value.field == "a.b"
    assert caught.value.remedy


def test_functions_that_nobody_can_call() -> None:
    """A function without an event, or with a parameter that nobody fills, is refused at once (LSN-5)."""

    def nothing() -> None: ...
    def keyword(*, event: EventEnvelope) -> None: ...
    def unknown(event: EventEnvelope, session: object) -> None: ...
    def threaded(event: EventEnvelope, tx: object) -> None: ...
    async def untyped(event: EventEnvelope, payload) -> None: ...  # type: ignore[no-untyped-def]
    async def undefined(event: EventEnvelope, payload: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    wrong: list[tuple[Any, str]] = [
        (nothing, "takes no event"),
        (keyword, "takes no event"),
        (unknown, "'session', which Holdfast cannot fill"),
        (threaded, "the handler is a plain def; annotate it with sqlalchemy.orm.Session"),
        (untyped, "has no annotation"),
        (undefined, "not defined"),
    ]
    for function, problem in wrong:
        with pytest.raises(ConfigurationError, match=problem) as caught:
            HandlerRegistry().add("a.b", ("x",), function)
        assert caught.value.field.startswith("a.b")
        assert caught.value.remedy


@pytest.mark.parametrize("timeout", [0, -1, 86_401, float("nan"), float("inf"), True, "5", None])
def test_time_limits_are_checked(timeout: Any) -> None:
    """A limit that cannot be kept is refused (LSN-11)."""
    with pytest.raises(ConfigurationError, match=r"give a number from 0\.001 to 86,400"):
        HandlerRegistry().add("a.b", ("x",), plain, timeout=timeout)


def test_reaction_to_errors_is_checked() -> None:
    """Retry or reject (LSN-8)."""
    with pytest.raises(ConfigurationError, match="on_error"):
        HandlerRegistry().add("a.b", ("x",), plain, on_error="ignore")  # type: ignore[arg-type]


def test_answers() -> None:
    """Nothing is done; outcomes are themselves; anything else fails at once, and says so (LSN-8)."""
    handler = HandlerRegistry().add("a.b", ("x",), plain)
    assert handler.outcome_of(None) == Done()
    for outcome in (Done(), Retry(1), Snooze(1), Reject("no")):
        assert handler.outcome_of(outcome) is outcome
    with pytest.raises(TerminalHandlerError, match=r"a\.b returned bool; return nothing, Done\(\)"):
        handler.outcome_of(True)
    with pytest.raises(TerminalHandlerError, match=r"returned the class Done; return an object of it: Done\(\.\.\.\)"):
        handler.outcome_of(Done)


def test_context_object() -> None:
    """An event without a correlation is the first of its chain (PUB-2)."""
    first = context()
    assert first.correlation_id == str(first.event_id)
    assert first.causation_id is None
    later = HandlerContext(uuid4(), uuid4(), "a.b", 2, {"correlation_id": "c", "causation_id": "e"}, "00-trace")
    assert (later.correlation_id, later.causation_id, later.trace_context) == ("c", "e", "00-trace")


def test_a_handler_runs_no_more_at_once_than_a_worker_may() -> None:
    """A limit that no worker can reach is a mistake; those of the whole fleet are larger."""
    registry = HandlerRegistry()
    with pytest.raises(ConfigurationError, match=r"concurrency is 10001; give a whole number from 1 to 10,000"):
        registry.handler("order.placed", name="mail.confirm", concurrency=10_001)(lambda event: None)
    with pytest.raises(ConfigurationError, match="from 1 to 10,000"):
        WorkerSettings(concurrency=10_001)
    registry.handler("order.placed", name="mail.confirm", concurrency=10_000, fleet_concurrency=100_000)(
        lambda event: None
    )
