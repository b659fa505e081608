"""Facts about what the library does, for observers, and counters.

The contracts know neither loggers nor exporters. A worker hands each fact to its observers, each in a thread of its
own; `observability` has the observer that writes structured logs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID


@dataclass(frozen=True, slots=True)
class DeliveryFact:
    """The fields of every fact about one delivery. Payloads are never part of it."""

    event_id: UUID
    delivery_id: UUID
    event_type: str
    source: str
    target: str | None
    handler_name: str
    attempts: int
    correlation_id: str


@dataclass(frozen=True, slots=True)
class Retried(DeliveryFact):
    """An attempt failed and will be repeated."""

    last_error: str
    retry_in: float
    traceback: str | None = None  # its first line is the place in the user's code


@dataclass(frozen=True, slots=True)
class Failed(DeliveryFact):
    """A delivery failed for good."""

    failure_reason: str
    last_error: str | None
    error_signature: str | None
    traceback: str | None = None  # its first line is the place in the user's code


@dataclass(frozen=True, slots=True)
class Handled(DeliveryFact):
    """A delivery was handled and is settled. Only reported with `WorkerSettings.log_handled`."""

    took: float  # seconds from the handler's start until the delivery was settled
    level: str  # debug or info


@dataclass(frozen=True, slots=True)
class Notice:
    """Something an operator should know about a worker, a publisher or reactions."""

    level: str  # info, warning or error
    name: str
    details: dict[str, object] = field(default_factory=dict)


Fact = Retried | Failed | Handled | Notice
Observer = Callable[[Fact], None]


@dataclass(slots=True)
class Counters:
    """Counts of what a worker has done since it started."""

    claims: int = 0
    claimed: int = 0
    delivered: int = 0
    duplicates: int = 0
    retried: int = 0
    snoozed: int = 0
    failed: int = 0
    archived: int = 0  # of them, those that moved to the archive
    expired: int = 0
    released: int = 0
    split: int = 0
    lost_leases: int = 0
    wakeups: int = 0
    polls: int = 0
    listen_reconnects: int = 0
    settles: int = 0
    fired: int = 0  # slots of schedules
