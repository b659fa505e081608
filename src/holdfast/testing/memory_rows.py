"""The rows of an outbox in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from pydantic_core import from_json

from holdfast.envelope import EventEnvelope
from holdfast.testing.records import Status


@dataclass
class Row:
    """One event, or one delivery of it, like a row of the outbox."""

    id: UUID
    event_type: str
    event_version: int
    occurred_at: datetime
    source: str
    target: str | None
    domain_id: UUID | None
    payload: str
    headers: str | None
    idempotency_key: str
    trace_context: str | None
    available_at: datetime
    expires_at: datetime | None
    priority: int
    dedupe_key: str | None
    ordering_key: str | None = None
    seq: int = 0  # its place among the events of its ordering key
    origin: Row | None = None
    handler_name: str | None = None
    status: Status = "pending"
    attempts: int = 0
    first_failed_at: datetime | None = None
    failure_reason: str | None = None
    last_error: str | None = None
    archived: bool = False
    split: bool = field(default=False)

    @property
    def place(self) -> tuple[int, datetime, UUID]:
        """The key by which rows are sorted: the least is delivered first."""
        return self.priority, self.available_at, self.id

    def envelope(self) -> EventEnvelope:
        names = ("event_type", "event_version", "occurred_at", "source", "target", "domain_id", "idempotency_key")
        values = {name: getattr(self, name) for name in (*names, "trace_context")}
        identity = self.id if self.origin is None else self.origin.id
        return EventEnvelope.trusted({**values, "event_id": identity, "payload": from_json(self.payload)})


class Rows:
    """All rows of an outbox, in the order in which they were committed."""

    def __init__(self) -> None:
        self._all: list[Row] = []
        self._by_ordering_key: dict[str, list[Row]] = {}
        self._ids: set[UUID] = set()
        self._open: list[Row] = []  # rows that may be pending, so that a drain need not look at all delivered ones

    def __iter__(self) -> Iterator[Row]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def commit(self, rows: Iterable[Row]) -> None:
        """Add the rows of a transaction."""
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add a row; an event with an ordering key takes the last place of its key."""
        if row.ordering_key is not None:
            row.seq = len(self._all) if row.origin is None else row.seq
            self._by_ordering_key.setdefault(row.ordering_key, []).append(row)
        self._all.append(row)
        self._ids.add(row.id)
        self._open.append(row)

    def events(self) -> Iterator[Row]:
        """The rows of events as they were published, without the siblings of those that were split."""
        return (row for row in self._all if row.origin is None)

    def pending(self) -> list[Row]:
        """Return the rows that are not settled; forget settled ones, which nothing opens again."""
        self._open = [row for row in self._open if row.status in ("pending", "in_flight")]
        return [row for row in self._open if row.status == "pending"]

    def before(self, row: Row) -> Iterator[Row]:
        """The rows that stand before one in its ordering key, those of other handlers included."""
        of_key = () if row.ordering_key is None else self._by_ordering_key[row.ordering_key]
        return (each for each in of_key if each.seq < row.seq and not each.split)

    def find_key(self, source: str, key: str) -> Row | None:
        """Return the pending event that holds a producer's key."""
        found = (row for row in self.events() if (row.source, row.dedupe_key) == (source, key))
        return next((row for row in found if row.status == "pending"), None)

    def taken(self, identity: UUID) -> bool:
        """Return whether an event with this id was published before."""
        return identity in self._ids
