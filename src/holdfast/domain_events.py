"""Domain events: what happened to an aggregate, recorded on it by the method that made it happen.

    class Order(RecordsEvents, Base):
        def place(self) -> None:
            self.status = "placed"
            self.record(NewEvent("order.placed", {"order_id": str(self.id)}))

Recording does no I/O and knows no database. The events are published by the code that stores the aggregate, in the same
transaction: for SQLAlchemy that is `holdfast.integrations.sqlalchemy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from typing import Final
from uuid import UUID

from holdfast.errors import FieldError
from holdfast.ids import uuid7
from holdfast.new_event import NewEvent
from holdfast.typed_events import TypedEvent, is_typed_event

_ATTRIBUTE: Final = "_recorded_events"
# The order of all recorded events of the process, over all aggregates.
_order = count(1)

# Called with each object on which an event is recorded. SQLAlchemy's identity map holds unchanged objects weakly: its
# watcher keeps the object, and the event with it.
watchers: Final[list[Callable[[RecordsEvents], None]]] = []


def position() -> int:
    """Return a place in the order of recording: above all events recorded before, below all that follow."""
    return next(_order)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event, with the time and the order in which it was recorded.

    Its id is given here, so that a second attempt to store it is recognised.
    """

    position: int
    event_id: UUID
    occurred_at: datetime
    made_by: NewEvent | Callable[[], NewEvent | TypedEvent]

    def event(self) -> NewEvent:
        """Return the event to publish. A function that was recorded is called now."""
        made = self.made_by if isinstance(self.made_by, NewEvent) else self.made_by()
        if is_typed_event(made):
            made = NewEvent.of(made)
        if not isinstance(made, NewEvent):
            raise _no_event(made)
        return replace(made, event_id=made.event_id or self.event_id, occurred_at=made.occurred_at or self.occurred_at)


class RecordsEvents:
    """A mixin for aggregates on which events are recorded."""

    def record(self, event: NewEvent | TypedEvent | Callable[[], NewEvent | TypedEvent]) -> None:
        """Record an event. It is published when this object is committed, and not when it is rolled back.

        Give a function where the event needs what only the database knows, like a generated key: it is called when the
        object has been written.
        """
        if is_typed_event(event):
            event = NewEvent.of(event)
        if not isinstance(event, NewEvent) and not callable(event):
            raise _no_event(event)
        self.__dict__.setdefault(_ATTRIBUTE, []).append(Recorded(position(), uuid7(), datetime.now(UTC), event))
        for watcher in watchers:
            watcher(self)


def recorded_on(aggregate: object) -> list[Recorded]:
    """Return the events that are recorded on an object and not published yet."""
    return list(getattr(aggregate, "__dict__", {}).get(_ATTRIBUTE, ()))


def forget(aggregate: object, gone: Callable[[Recorded], bool]) -> None:
    """Remove the recorded events for which `gone` is true from an object."""
    left = [each for each in recorded_on(aggregate) if not gone(each)]
    if left:
        aggregate.__dict__[_ATTRIBUTE] = left
    else:
        aggregate.__dict__.pop(_ATTRIBUTE, None)


def _no_event(given: object) -> FieldError:
    return FieldError("event", f"is {type(given).__name__}", 'record NewEvent("order.placed", {...}), or a function')
