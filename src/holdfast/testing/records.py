"""What tests see of an outbox: published events, their deliveries, and the results of drains."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from holdfast.envelope import EventEnvelope

# More deliveries than this, and than ten for each event that was there, are events that follow events without end.
MOST_FOLLOWING = 10_000
MOST_FOR_EACH = 10

Status = Literal["pending", "in_flight", "delivered", "failed"]


@dataclass(frozen=True, slots=True)
class PublishedEvent:
    """An event as it was published."""

    envelope: EventEnvelope
    headers: Mapping[str, str]
    available_at: datetime | None  # None: it has been archived

    @property
    def event_id(self) -> UUID:
        return self.envelope.event_id

    @property
    def event_type(self) -> str:
        return self.envelope.event_type

    @property
    def payload(self) -> dict[str, Any]:
        return self.envelope.payload


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """One event at one handler, with its state. Without a handler's name, no worker has looked at the event yet."""

    event: EventEnvelope
    handler_name: str | None
    status: Status
    attempts: int
    failure_reason: str | None = None
    last_error: str | None = None
    available_at: datetime | None = None
    archived: bool = False

    @property
    def failed(self) -> bool:
        """Whether it is a dead letter, in place or archived."""
        return self.status == "failed"

    @property
    def open(self) -> bool:
        """Whether it is still to be delivered."""
        return self.status in ("pending", "in_flight")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What a request with an idempotency key did: the response that is stored for it, and the events it published."""

    key: str
    scope: str
    status_code: int | None
    failed: bool
    headers: list[tuple[str, str]]
    body: bytes = field(repr=False)
    events: list[EventEnvelope] = field(repr=False)

    @property
    def json(self) -> Any:
        """The body, as JSON."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did. `moved` is how far the clock was moved for delays, retries and schedules."""

    delivered: int = 0
    retried: int = 0
    snoozed: int = 0
    failed: int = 0
    duplicates: int = 0
    fired: int = 0
    moved: timedelta = timedelta(0)

    def __add__(self, other: Drained) -> Drained:
        return Drained(
            self.delivered + other.delivered,
            self.retried + other.retried,
            self.snoozed + other.snoozed,
            self.failed + other.failed,
            self.duplicates + other.duplicates,
            self.fired + other.fired,
            self.moved + other.moved,
        )


def without_end(event_types: Iterable[str]) -> str:
    """Return the message about a drain in which events follow events without end."""
    (event_type, count), *_ = Counter(event_types).most_common(1)
    return (
        f"Events follow events without end: {event_type} was published {count:,} times. A handler publishes what it, "
        "or one that follows it, handles. To test one step of it, use run_handler."
    )
