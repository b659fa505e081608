"""Events for tests, and those that are recorded on aggregates. No database is needed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Unpack, overload

from pydantic_core import from_json

from holdfast.domain_events import recorded_on
from holdfast.envelope import EventEnvelope
from holdfast.ids import uuid7
from holdfast.new_event import EventOptions, NewEvent
from holdfast.outbox_row import envelope_of, origin, prepare
from holdfast.payload import PAYLOAD_LIMIT, encode
from holdfast.testing.matching import explain, matches, shown
from holdfast.typed_events import TypedEvent, declared_type

__all__ = ["assert_recorded", "make_event", "recorded_events"]


@overload
def make_event(
    event_type: str, payload: Any = None, /, *, source: str = "test", **options: Unpack[EventOptions]
) -> EventEnvelope: ...
@overload
def make_event(
    event: TypedEvent | NewEvent, /, *, source: str = "test", **options: Unpack[EventOptions]
) -> EventEnvelope: ...
def make_event(
    event: Any, payload: Any = None, /, *, source: str = "test", **options: Unpack[EventOptions]
) -> EventEnvelope:
    """Return an event as a handler receives it: checked and encoded as publishing does it, with the payload as JSON.

    >>> make_event("order.placed", {"order_id": 17}).payload
    {'order_id': 17}
    """
    if isinstance(event, str):
        event = NewEvent(event, {} if payload is None else payload, **options)
    elif not isinstance(event, NewEvent):
        event = NewEvent.of(event, **options)
    identity, now = event.event_id or uuid7(), datetime.now(UTC)
    text, encoded = encode(event.payload, PAYLOAD_LIMIT)
    row = prepare(event, origin(source, 0, None), PAYLOAD_LIMIT, None, None, now.isoformat(), identity, text)
    return envelope_of(event, encoded, row, identity, now).model_copy(update={"payload": from_json(row.payload)})


def recorded_events(aggregate: object) -> list[NewEvent]:
    """Return the domain events that are recorded on an aggregate and not published yet, in their order.

    A function that was recorded in place of an event is called: it may need what only the database knows.
    """
    return [each.event() for each in recorded_on(aggregate)]


def assert_recorded(
    aggregate: object, event_type: str | type[TypedEvent], payload: Mapping[str, Any] | None = None
) -> NewEvent:
    """Return the first event of this type that is recorded on an aggregate and has this in its payload."""
    kind = event_type if isinstance(event_type, str) else declared_type(event_type)[0]
    found = recorded_events(aggregate)
    for event in found:
        if event.event_type == kind and matches(payload, _json(event)):
            return event
    lines = [f"  {event.event_type}  {shown(_json(event))}" for event in found]
    near = [_json(event) for event in found if event.event_type == kind]
    wanted = f"{kind}" if payload is None else f"{kind} with {shown(payload)}"
    recorded = "\n".join(["Recorded are:", *lines]) if lines else "Nothing is recorded on it."
    raise AssertionError(
        f"{type(aggregate).__name__} has no recorded event {wanted}.\n{recorded}{explain(payload, near)}"
    )


def _json(event: NewEvent) -> dict[str, Any]:
    payload: dict[str, Any] = from_json(encode(event.payload, PAYLOAD_LIMIT)[0])
    return payload
