"""Facts about what the library does, for observers, and counters.

The contracts know neither loggers nor exporters. Whoever has observers asks them once which facts they want (see
observing.py), constructs no others, and hands these on; `observability` has the observer that writes structured logs.
"""

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Final, Literal
from uuid import UUID

from holdfast.handler_tally import DeliveryOutcome

RequestResult = Literal["completed", "replayed", "refused", "unavailable", "failed"]

# The most characters of a correlation id in facts: producers may write long ones.
LONGEST_CORRELATION: Final = 128

# --- one event --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Published:
    """An event was recorded in the outbox, in the caller's transaction: it exists if and only if that commits."""

    event_id: UUID
    event_type: str
    source: str
    target: str | None
    domain_id: UUID | None
    generation: int | None
    correlation_id: str
    trace_id: str | None


@dataclass(frozen=True, slots=True)
class DeliveryFact:
    """The fields of every fact about one delivery. Payloads are never part of it.

    Each delivery that a worker has claimed is closed by exactly one of them, whose `result` says how.
    """

    event_id: UUID
    delivery_id: UUID
    event_type: str
    source: str
    target: str | None
    handler_name: str
    attempts: int
    correlation_id: str
    _: KW_ONLY
    result: DeliveryOutcome
    domain_id: UUID | None = None
    generation: int | None = None
    trace_id: str | None = None
    took: float | None = None  # seconds that the handler ran; None: it did not


@dataclass(frozen=True, slots=True)
class Handled(DeliveryFact):
    """A delivery is settled: its handler has succeeded, or had already succeeded before (`duplicate`)."""

    result: DeliveryOutcome = field(default="delivered", kw_only=True)


@dataclass(frozen=True, slots=True)
class Retried(DeliveryFact):
    """An attempt failed and will be repeated."""

    last_error: str
    retry_in: float
    error_signature: str | None = None
    traceback: str | None = None  # its first line is the place in the user's code
    held: bool = False  # the handler's breaker is open: it is repeated when that says so, not after `retry_in`
    result: DeliveryOutcome = field(default="retried", kw_only=True)


@dataclass(frozen=True, slots=True)
class Snoozed(DeliveryFact):
    """A delivery is due again later. No attempt is counted."""

    due_in: float
    result: DeliveryOutcome = field(default="snoozed", kw_only=True)


@dataclass(frozen=True, slots=True)
class Failed(DeliveryFact):
    """A delivery failed for good; `result` tells a dead letter from an event that expired or was cancelled."""

    failure_reason: str
    last_error: str | None
    error_signature: str | None
    traceback: str | None = None  # its first line is the place in the user's code
    result: DeliveryOutcome = field(default="failed", kw_only=True)


@dataclass(frozen=True, slots=True)
class Released(DeliveryFact):
    """A worker that stops has released a delivery: it is due at once for any other."""

    result: DeliveryOutcome = field(default="released", kw_only=True)


@dataclass(frozen=True, slots=True)
class LostLease(DeliveryFact):
    """A delivery was not settled by this worker: another one has its lease, or will have it when it expires."""

    result: DeliveryOutcome = field(default="lost_lease", kw_only=True)


# --- the work of a worker and of an exchange ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claim found deliveries; each of them is closed by one `DeliveryFact` later."""

    channel: str
    count: int
    took: float  # seconds until the rows were here


@dataclass(frozen=True, slots=True)
class Settled:
    """A statement has settled deliveries in one way: deliver, duplicate, retry, fail, archive, release or snooze."""

    way: str
    count: int
    lost: int  # of them, those whose lease was lost
    took: float  # seconds, with the waits for the database


@dataclass(frozen=True, slots=True)
class Outage:
    """The database cannot be reached, as one of a worker's loops has found, or (`over`) can be reached again."""

    loop: str
    over: bool
    error: str | None = None
    lasted: float | None = None  # seconds, when it is over


@dataclass(frozen=True, slots=True)
class Fired:
    """A schedule's slots were fired: an event was published for each."""

    schedule: str
    slots: tuple[datetime, ...]


@dataclass(frozen=True, slots=True)
class Requested:
    """An idempotent request was answered: carried out, replayed, refused, not carried out, or ended by an error."""

    operation: str  # method and path
    result: RequestResult
    status: int | None  # None: the application raised an error, of which its server makes an answer
    keyed: bool  # whether it came with an Idempotency-Key
    attempts: int  # how often the endpoint was run, or was about to be
    took: float


@dataclass(frozen=True, slots=True)
class Notice:
    """Something an operator should know about a worker, a publisher or reactions."""

    level: str  # info, warning or error
    name: str
    details: dict[str, object] = field(default_factory=dict)


Fact = (
    Published | Handled | Retried | Snoozed | Failed | Released | LostLease
    | Claimed | Settled | Outage | Fired | Requested | Notice
)  # fmt: skip
Observer = Callable[[Fact], None]

# What an event carries: a W3C traceparent, of this version or a later one, which may have more at its end; after a
# space, a tracestate.
TRACEPARENT: Final = re.compile(
    r"(?:00|(?!00|ff)(?P<later>[0-9a-f]{2}))-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<span>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?(later)(?:-[^ ]*)?)(?: (?P<state>.*))?"
)


def trace_id_of(trace_context: str | None) -> str | None:
    """Return the trace id of a W3C traceparent; None without one, and of anything else."""
    found = TRACEPARENT.fullmatch(trace_context) if trace_context else None
    return found["trace"] if found else None


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
