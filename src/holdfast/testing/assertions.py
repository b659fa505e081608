"""Assertions about an outbox. When one fails, its message shows what is there instead."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError
from holdfast.handlers import HandlerRegistry
from holdfast.names import meant_type
from holdfast.testing.matching import error_matches, explain, matches, shown
from holdfast.testing.records import DeliveryRecord, PublishedEvent
from holdfast.typed_events import TypedEvent, declared_type

_MOST_LINES = 20
_FIELDS = ("source", "target", "domain_id", "idempotency_key", "event_version", "occurred_at", "trace_context")

EventType = str | type[TypedEvent]
Payload = Mapping[str, Any] | None


class OutboxAssertions(ABC):
    """Assertions about an outbox, made of its lists of published events, deliveries and handled events.

    A payload that is expected is a part: the event may have more in it.
    """

    _registries: Sequence[HandlerRegistry] = ()  # registries whose handlers get events here, if they are known

    @abstractmethod
    def published(self) -> list[PublishedEvent]:
        """Return every event that was published and committed, in that order."""

    @abstractmethod
    def deliveries(self) -> list[DeliveryRecord]:
        """Return the deliveries: each event at each of its handlers, with its state."""

    @abstractmethod
    def handled(self) -> list[tuple[str, EventEnvelope]]:
        """Return the pairs of a handler and an event that it has handled."""

    # --- published ------------------------------------------------------------------------------------

    def assert_published(
        self, event_type: EventType, payload: Payload = None, *, times: int | None = None, **fields: Any
    ) -> EventEnvelope:
        """Assert that an event of this type, with this in its payload, was published; return the last one.

        `fields` are fields of the envelope, such as source and target, and `headers`, of which a part is enough.
        """
        __tracebackhide__ = True
        events, kind = self.published(), _type_of(event_type)
        of_type = [each for each in events if each.event_type == kind]
        found = [each for each in of_type if matches(payload, each.payload) and _has(each, fields)]
        if found and times in (None, len(found)):
            return found[-1].envelope
        wanted = _wanted(kind, payload, fields)
        if times is not None:
            problem = f"{wanted} was published {_times(len(found))}, not {_times(times)}."
        else:
            problem = f"{wanted} was not published."
        hint = "" if found else explain(payload, [each.payload for each in of_type])
        raise AssertionError(f"{problem}\n{_listed('Published', [_event_line(each) for each in events])}{hint}")

    def assert_not_published(self, event_type: EventType, payload: Payload = None, **fields: Any) -> None:
        """Assert that no event of this type, with this in its payload, was published."""
        __tracebackhide__ = True
        kind = _type_of(event_type)
        for each in self.published():
            if each.event_type == kind and matches(payload, each.payload) and _has(each, fields):
                raise AssertionError(f"{_wanted(kind, payload, fields)} was published.\n  {_event_line(each)}")

    # --- handled --------------------------------------------------------------------------------------

    def assert_handled(self, handler: str, payload: Payload = None, *, times: int | None = None) -> EventEnvelope:
        """Assert that this handler has handled an event with this in its payload; return the last one."""
        __tracebackhide__ = True
        handled = [event for name, event in self.handled() if name == handler]
        found = [event for event in handled if matches(payload, event.payload)]
        if found and times in (None, len(found)):
            return found[-1]
        wanted = "an event" if payload is None else f"an event with {shown(payload)}"
        if times is not None:
            problem = f"{handler} has handled {wanted} {_times(len(found))}, not {_times(times)}."
        else:
            problem = f"{handler} has not handled {wanted}."
        hint = "" if found else explain(payload, [event.payload for event in handled])
        raise AssertionError(f"{problem}{self._misnamed(handler)}\n{self.describe()}{hint}")

    def assert_not_handled(self, handler: str, payload: Payload = None) -> None:
        """Assert that this handler has handled no event with this in its payload."""
        __tracebackhide__ = True
        for name, event in self.handled():
            if name == handler and matches(payload, event.payload):
                raise AssertionError(f"{handler} has handled {event.event_type} {shown(event.payload)}.")
        if misnamed := self._misnamed(handler):
            raise AssertionError(f"{handler} cannot have handled anything.{misnamed}")

    # --- failed ---------------------------------------------------------------------------------------

    def assert_failed(
        self,
        handler: str,
        payload: Payload = None,
        *,
        reason: str | None = None,
        error: str | type[BaseException] | re.Pattern[str] | None = None,
        attempts: int | None = None,
        archived: bool | None = None,
    ) -> DeliveryRecord:
        """Assert that this handler has a matching dead letter, in place or archived; return it.

        `reason` is the failure reason, such as `retry_terminal` or `rejected`; `error` a part of the last error's text,
        a pattern or an exception class.
        """
        __tracebackhide__ = True
        failed = [each for each in self.deliveries() if each.failed and each.handler_name == handler]
        expected = {"reason": reason, "attempts": attempts, "archived": archived}
        for each in failed:
            actual = {"reason": each.failure_reason, "attempts": each.attempts, "archived": each.archived}
            if (
                matches(payload, each.event.payload)
                and all(value is None or actual[name] == value for name, value in expected.items())
                and error_matches(error, each.last_error)
            ):
                return each
        words = [f"{name} {value!r}" for name, value in {**expected, "error": error}.items() if value is not None]
        words += [] if payload is None else [f"payload {shown(payload)}"]
        wanted = f" with {', '.join(words)}" if words else ""
        raise AssertionError(f"{handler} has no dead letter{wanted}.{self._misnamed(handler)}\n{self.describe()}")

    def assert_nothing_failed(self) -> None:
        """Assert that no delivery is a dead letter."""
        __tracebackhide__ = True
        failed = [each for each in self.deliveries() if each.failed]
        if failed:
            raise AssertionError(_listed("Failed", [self._delivery_line(each) for each in failed]))

    def assert_all_delivered(self) -> None:
        """Assert that every delivery was delivered: none has failed, and none is open."""
        __tracebackhide__ = True
        left = [each for each in self.deliveries() if each.failed or each.open]
        if left:
            raise AssertionError(_listed("Not delivered", [self._delivery_line(each) for each in left]))

    # --- for messages ---------------------------------------------------------------------------------

    def _misnamed(self, handler: str) -> str:
        """Return a sentence about a name that no handler has; an empty text if the handlers are not known."""
        names = {each.name for registry in self._registries for each in registry}
        if not names or handler in names or handler in {each.handler_name for each in self.deliveries()}:
            return ""
        nearest = get_close_matches(handler, names, n=1)
        return f" No handler has this name; did you mean {nearest[0]}?" if nearest else " No handler has this name."

    def _delivery_line(self, delivery: DeliveryRecord) -> str:
        handlers = [each for registry in self._registries for each in registry]
        if not handlers or delivery.handler_name is not None:
            return _delivery_line(delivery, delivery.handler_name or "(no handler yet)")
        event_type = delivery.event.event_type
        if any(each.wants(event_type) for each in handlers):
            return _delivery_line(delivery, "(no handler yet)")
        meant = meant_type(event_type, (kind for each in handlers for kind in each.event_types))
        asked = f"; did you mean {meant}?" if meant else ""
        return _delivery_line(delivery, f"(no handler subscribes to {event_type}{asked})")

    def describe(self) -> str:
        """Return a readable list of what is in the outbox."""
        lines = [self._delivery_line(each) for each in self.deliveries()]
        known = {(each.handler_name, each.event.event_id) for each in self.deliveries() if each.status == "delivered"}
        lines += [
            _line(name, "handled", event) for name, event in self.handled() if (name, event.event_id) not in known
        ]
        return _listed("Deliveries", lines)


def _type_of(event_type: EventType) -> str:
    return event_type if isinstance(event_type, str) else declared_type(event_type)[0]


def _has(event: PublishedEvent, fields: Mapping[str, Any]) -> bool:
    for name, value in fields.items():
        if name == "headers":
            if not matches(value, event.headers):
                return False
        elif name not in _FIELDS:
            remedy = f"use one of {', '.join((*_FIELDS, 'headers'))}"
            raise ConfigurationError(name, "is not a field of an event", remedy)
        elif getattr(event.envelope, name) != value:
            return False
    return True


def _wanted(kind: str, payload: Payload, fields: Mapping[str, Any]) -> str:
    words = [] if payload is None else [shown(payload)]
    words += [f"{name}={value!r}" for name, value in fields.items()]
    return f"{kind} with {', '.join(words)}" if words else kind


def _event_line(event: PublishedEvent) -> str:
    target = "" if event.envelope.target is None else f" to {event.envelope.target}"
    return f"{event.event_type}  {shown(event.payload)}  from {event.envelope.source}{target}"


def _delivery_line(delivery: DeliveryRecord, handler: str) -> str:
    state: str = delivery.status
    error = (delivery.last_error or "").strip().splitlines()
    text = f": {shown(error[0])[1:-1]}" if error else ""
    if delivery.failed:
        place = "archived" if delivery.archived else "failed"
        state = f"{place} ({delivery.failure_reason}, attempt {delivery.attempts}{text})"
    elif delivery.open and delivery.attempts:
        state = f"{delivery.status} (after attempt {delivery.attempts}{text})"
    return _line(handler, state, delivery.event)


def _line(handler: str, state: str, event: EventEnvelope) -> str:
    return f"{handler}  {state}  {event.event_type}  {shown(event.payload)}"


def _listed(what: str, lines: list[str]) -> str:
    if not lines:
        return f"{what}: nothing."
    left = f"\n  … and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return f"{what}:\n" + "\n".join(f"  {line}" for line in lines[:_MOST_LINES]) + left


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
