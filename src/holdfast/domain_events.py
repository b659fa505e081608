"""Domain events: what happened to an aggregate, recorded on it by the method that made it happen.

    class Order(RecordsEvents, Base):
        def place(self) -> None:
            self.status = "placed"
            self.record(NewEvent("order.placed", {"order_id": str(self.id)}))

Recording does no I/O and knows no database. Whoever stores the aggregate publishes what was recorded on it, in the same
transaction: for SQLAlchemy that is `holdfast.integrations.sqlalchemy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from typing import Final
from uuid import UUID

from holdfast.envelope import uuid7
from holdfast.errors import FieldError
from holdfast.publication import NewEvent

_ATTRIBUTE: Final = "_recorded_events"
# One order for everything that is recorded in a process, on whatever aggregate.
_order = count(1)

# Told at once of an object on which something was recorded. An identity map holds unchanged objects weakly: it must
# not let go of this one.
watchers: Final[list[Callable[[RecordsEvents], None]]] = []


def position() -> int:
    """A place in the order of recording: what was recorded before is below it, what follows is above."""
    return next(_order)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event, when and in which order it was recorded. Its id is given here, so that a second try to store it is seen
    as one."""

    position: int
    event_id: UUID
    occurred_at: datetime
    made_by: NewEvent | Callable[[], NewEvent]

    def event(self) -> NewEvent:
        """What to publish. A function is called now."""
        made = self.made_by if isinstance(self.made_by, NewEvent) else self.made_by()
        if not isinstance(made, NewEvent):
            raise _no_event(made)
        return replace(made, event_id=made.event_id or self.event_id, occurred_at=made.occurred_at or self.occurred_at)


class RecordsEvents:
    """A mixin for aggregates."""

    def record(self, event: NewEvent | Callable[[], NewEvent]) -> None:
        """Say what happened. It is published when this object is committed, and not when it is rolled back.

        Give a function where the event needs what only the database knows, like a generated key: it is called when the
        object has been written.
        """
        if not isinstance(event, NewEvent) and not callable(event):
            raise _no_event(event)
        self.__dict__.setdefault(_ATTRIBUTE, []).append(Recorded(position(), uuid7(), datetime.now(UTC), event))
        for watcher in watchers:
            watcher(self)


def recorded_on(aggregate: object) -> list[Recorded]:
    """What is recorded on an object and not published yet."""
    return list(getattr(aggregate, "__dict__", {}).get(_ATTRIBUTE, ()))


def forget(aggregate: object, gone: Callable[[Recorded], bool]) -> None:
    """Take from an object what is published, or will never be."""
    left = [each for each in recorded_on(aggregate) if not gone(each)]
    if left:
        aggregate.__dict__[_ATTRIBUTE] = left
    else:
        aggregate.__dict__.pop(_ATTRIBUTE, None)


def _no_event(given: object) -> FieldError:
    return FieldError("event", f"is {type(given).__name__}", 'record NewEvent("order.placed", {...}), or a function')
