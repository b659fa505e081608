"""Batch handlers: one call for several events, and an outcome for each of them.

    @registry.handler("order.placed", name="ledger.book_many", batch=500, within="200ms")
    async def book_many(events: list[EventEnvelope]) -> None: ...

A call gets up to `batch` events, gathered for at most `within` after the first. It returns nothing, which is `Done` for
all of them, or a list with the result of each event, in the order of the events, or a mapping from event ids to
results; events that are not in the mapping are done. A result is an outcome, None, or the exception with which the
event failed, as `asyncio.gather(..., return_exceptions=True)` returns them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import Any, TypeAlias
from uuid import UUID

from holdfast.checks import quoted, whole
from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError, TerminalHandlerError
from holdfast.outcome import DONE, Outcome

__all__ = ["BatchResult", "EventResult"]

MOST_EVENTS = 5_000
DEFAULT_WITHIN = 0.2
LONGEST_WITHIN = 60.0

# The result of one event of a batch. The retry policy judges an exception as if the handler had raised it.
EventResult: TypeAlias = Outcome | BaseException | None
# What a batch handler may return.
BatchResult: TypeAlias = Sequence[EventResult] | Mapping[UUID, EventResult] | None

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}
_REMEDY = 'give seconds, a timedelta or text like "200ms", from 0 to 60 s'


@dataclass(frozen=True, slots=True)
class Batch:
    """How a batch handler is called: its function, the most events of a call, and the seconds to gather them."""

    function: Callable[..., Any] = field(repr=False)
    size: int
    within: float


def batch_of(name: str, size: object, within: object, function: Callable[..., Any]) -> Batch | None:
    """Return how a batch handler is called; None for a handler that takes events one by one."""
    if size is None:
        if within is not None:
            remedy = "give batch= too: how many events one call gets at most"
            raise ConfigurationError(f"{name}.within", "is given without batch", remedy)
        return None
    most = whole(f"{name}.batch", size, 1, MOST_EVENTS)
    return Batch(function, most, DEFAULT_WITHIN if within is None else _seconds(f"{name}.within", within))


def _seconds(name: str, within: object) -> float:
    if isinstance(within, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m)", within.strip())
        seconds = float(found[1]) * _UNITS[found[2]] if found else -1.0
    elif isinstance(within, timedelta):
        seconds = within.total_seconds()
    else:
        seconds = float(within) if isinstance(within, int | float) and not isinstance(within, bool) else -1.0
    if not 0 <= seconds <= LONGEST_WITHIN:
        raise ConfigurationError(name, f"is {quoted(within)}", _REMEDY)
    return seconds


def alone(name: str, function: Callable[..., Any], *, asynchronous: bool) -> Callable[..., Any]:
    """Return a function that calls a batch handler with a single event, and returns its outcome or raises."""
    if asynchronous:

        @wraps(function)
        async def call(event: EventEnvelope[Any], **extras: Any) -> Outcome:
            return _only(name, function, await function([event], **_listed(extras)), event)
    else:

        @wraps(function)
        def call(event: EventEnvelope[Any], **extras: Any) -> Outcome:
            return _only(name, function, function([event], **_listed(extras)), event)

    return call


def _listed(extras: dict[str, Any]) -> dict[str, Any]:
    context: HandlerContext | None = extras.get("context")
    return extras if context is None else {**extras, "context": [context]}


def _only(name: str, function: Callable[..., Any], returned: object, event: EventEnvelope[Any]) -> Outcome:
    (result,) = results_of(name, function, returned, [event])
    if isinstance(result, Exception):
        raise result
    return result


def results_of(
    name: str, function: Callable[..., Any], returned: object, events: Sequence[EventEnvelope[Any]]
) -> list[Outcome | Exception]:
    """Return the result of each event for what the function returned.

    What says nothing that can be understood fails every event, for good: to call the function again would not help.
    """
    if returned is None:
        return [DONE] * len(events)
    try:
        if isinstance(returned, Mapping):
            return _mapped(name, returned, events)
        if isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
            return _listed_results(name, returned, len(events))
        if inspect.iscoroutine(returned):
            returned.close()  # or Python warns that it was never awaited, long after
        problem = "which was not awaited" if inspect.isawaitable(returned) else "not results"
        raise _unreadable(name, f"returned {type(returned).__name__}, {problem}")
    except TerminalHandlerError as error:
        return [error.blaming(function)] * len(events)


def _mapped(
    name: str, returned: Mapping[Any, object], events: Sequence[EventEnvelope[Any]]
) -> list[Outcome | Exception]:
    by_id = {key.event_id if isinstance(key, EventEnvelope) else key: value for key, value in returned.items()}
    unknown = by_id.keys() - {event.event_id for event in events}
    if unknown:
        raise _unreadable(name, f"returned a result for {quoted(unknown.pop())}, which is no event of the batch")
    return [_result(name, by_id.get(event.event_id)) for event in events]


def _listed_results(name: str, returned: Sequence[object], count: int) -> list[Outcome | Exception]:
    if len(returned) != count:
        raise _unreadable(name, f"returned {len(returned)} results for {count} events")
    return [_result(name, each) for each in returned]


def _result(name: str, given: object) -> Outcome | Exception:
    if given is None:
        return DONE
    if isinstance(given, Outcome | Exception):
        return given
    if isinstance(given, BaseException):  # a task of the handler's was cancelled
        error = RuntimeError(f"the event ended with {type(given).__name__}")
        error.__cause__ = given
        return error
    raise _unreadable(name, f"returned {type(given).__name__} for an event")


def _unreadable(name: str, problem: str) -> TerminalHandlerError:
    return TerminalHandlerError(
        f"{name} {problem}; return nothing, a list with Done, Retry, Snooze, Reject or an exception for each event, or "
        "a mapping from event ids to those"
    )
