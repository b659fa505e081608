"""How batch handlers are registered, and what is refused with a remedy. Called without a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel

from holdfast import Done, EventEnvelope, HandlerContext, HandlerRegistry, Reject, Retry, TerminalHandlerError
from holdfast.errors import ConfigurationError
from holdfast.middleware import CallNext
from holdfast.outcome import Outcome
from holdfast.testing import run_handler


class Placed(BaseModel):
    n: int


async def plain(events: list[EventEnvelope]) -> None: ...
async def typed(events: list[EventEnvelope[dict[str, Any]]]) -> None: ...
async def several(events: Sequence[EventEnvelope]) -> None: ...
async def one(event: EventEnvelope) -> None: ...
async def numbers(events: list[int]) -> None: ...
async def payloads(events: list[Placed]) -> None: ...
async def with_payload(events: list[EventEnvelope], payload: dict[str, Any]) -> None: ...
async def with_context(events: list[EventEnvelope], context: HandlerContext) -> None: ...
async def unannotated(events, context) -> None: ...  # type: ignore[no-untyped-def]


def add(function: Callable[..., Any], **options: Any) -> HandlerRegistry:
    registry = HandlerRegistry()
    registry.add("ledger.book_many", ("order.placed",), function, **options)
    return registry


@pytest.mark.parametrize("function", (plain, typed, several, unannotated))
@pytest.mark.parametrize(
    ("within", "seconds"),
    ((None, 0.2), ("200ms", 0.2), ("1.5s", 1.5), ("1m", 60.0), (2, 2.0), (timedelta(seconds=3), 3.0), (0, 0.0)),
)
def test_what_is_accepted(function: Callable[..., Any], within: Any, seconds: float) -> None:
    """Lists of envelopes, and times as people write them (LSN-12)."""
    batch = add(function, batch=500, within=within)["ledger.book_many"].batch
    assert batch is not None
    assert (batch.size, batch.within) == (500, seconds)


@pytest.mark.parametrize(
    ("function", "options", "field", "remedy"),
    (
        (plain, {"batch": 0}, "ledger.book_many.batch", "from 1 to 5,000"),
        (plain, {"batch": 5_001}, "ledger.book_many.batch", "from 1 to 5,000"),
        (plain, {"batch": True}, "ledger.book_many.batch", "from 1 to 5,000"),
        (one, {"within": "1s"}, "ledger.book_many.within", "batch="),
        (plain, {"batch": 5, "within": "soon"}, "ledger.book_many.within", "200ms"),
        (plain, {"batch": 5, "within": -1}, "ledger.book_many.within", "200ms"),
        (plain, {"batch": 5, "within": "61s"}, "ledger.book_many.within", "200ms"),
        (plain, {"batch": 5, "via": "in_process"}, "ledger.book_many.batch", 'via="outbox"'),
        (one, {"batch": 5}, "ledger.book_many", "list[EventEnvelope]"),
        (numbers, {"batch": 5}, "ledger.book_many", "events: list[EventEnvelope]"),
        (payloads, {"batch": 5}, "ledger.book_many", "events: list[EventEnvelope[Placed]]"),
        (plain, {}, "ledger.book_many", "batch="),
        (with_payload, {"batch": 5}, "ledger.book_many.payload", "event.payload"),
        (with_context, {"batch": 5}, "ledger.book_many.context", "list[HandlerContext]"),
    ),
)
def test_what_is_refused(function: Callable[..., Any], options: dict[str, Any], field: str, remedy: str) -> None:
    """What would fail on the first batch is refused when it is registered, with the line to write instead (LSN-12)."""
    with pytest.raises(ConfigurationError) as refused:
        add(function, **options)
    assert refused.value.field == field
    assert remedy in refused.value.remedy


def test_results_are_read() -> None:
    """Lists, mappings by id or by event, and exceptions; `run_handler` returns what they stand for (LSN-12)."""
    returned: Any = None
    failed = ValueError("bad")

    async def handle(events: list[EventEnvelope]) -> Any:
        return returned(events)

    registry = add(handle, batch=10)

    def run() -> list[Any]:
        found: list[Any] = run_handler(registry, "ledger.book_many", [{"n": 1}, {"n": 2}, {"n": 3}])
        return found

    returned = lambda events: None  # noqa: E731
    assert run() == [Done()] * 3
    returned = lambda events: [None, Retry(1), failed]  # noqa: E731
    assert run() == [Done(), Retry(1), failed]
    returned = lambda events: {events[1].event_id: Reject("no"), events[2]: failed}  # noqa: E731
    assert run() == [Done(), Reject("no"), failed]
    returned = lambda events: [None, None, asyncio.CancelledError()]  # noqa: E731
    assert isinstance(run()[2], RuntimeError)
    wrong: list[Callable[[Any], Any]] = [
        lambda events: [None],
        lambda events: True,
        lambda events: "done",
        lambda events: {uuid4(): Done()},
        lambda events: [1, 2, 3],
    ]
    for each in wrong:
        returned = each
        results = run()
        assert len(results) == 3
        assert all(isinstance(result, TerminalHandlerError) for result in results)
    returned = lambda events: True  # noqa: E731
    with pytest.raises(TerminalHandlerError):
        run_handler(registry, "ledger.book_many", {"n": 1})


def test_payloads_and_contexts_of_each_event() -> None:
    """An event that its model refuses fails alone; the contexts are in the order of the events (LSN-12, LSN-13)."""
    seen: list[tuple[int, UUID]] = []

    async def handle(events: list[EventEnvelope[Placed]], context: list[HandlerContext]) -> None:
        seen.extend((event.payload.n, each.event_id) for event, each in zip(events, context, strict=True))
        assert [event.event_id for event in events] == [each.event_id for each in context]

    registry = HandlerRegistry()
    registry.handler("order.placed", name="ledger.book_many", batch=10)(handle)
    results = run_handler(registry, "ledger.book_many", [{"n": 1}, {"n": "no number"}, {"n": 3}])
    assert [type(each).__name__ for each in results] == ["Done", "ValidationError", "Done"]
    assert [n for n, _ in seen] == [1, 3]


def test_middleware_runs_around_each_event() -> None:
    """One call for the events that arrive; what middleware ends early is left out, or changed (LSN-14, LSN-12)."""
    calls: list[list[int]] = []
    around: list[int] = []

    async def gate(event: EventEnvelope, call_next: CallNext) -> Outcome:
        around.append(event.payload["n"])
        if event.payload["n"] == 2:
            return Reject("not this one")
        if event.payload["n"] == 3:
            event = event.model_copy(update={"payload": {"n": 30}})
        return await call_next(event)

    registry = HandlerRegistry(middleware=[gate])

    @registry.handler("order.placed", name="ledger.book_many", batch=10)
    def handle(events: list[EventEnvelope]) -> None:
        calls.append([event.payload["n"] for event in events])
        if len(events) == 4:
            raise ValueError("too many")

    results = run_handler(registry, "ledger.book_many", [{"n": number} for number in (1, 2, 3)])
    assert results == [Done(), Reject("not this one"), Done()]
    assert sorted(around) == [1, 2, 3]
    assert calls == [[1, 30]]
    with pytest.raises(ValueError, match="too many"):
        run_handler(registry, "ledger.book_many", [{"n": number} for number in (1, 4, 5, 6)])
