"""The rows of an outbox in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from pydantic_core import from_json

from holdfast.envelope import EventEnvelope
from holdfast.testing.records import Status


@dataclass
class Row:
    """One event, or one delivery of it, as a row of the outbox is one."""

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
        """What is delivered first."""
        return self.priority, self.available_at, self.id

    def envelope(self) -> EventEnvelope:
        names = ("event_type", "event_version", "occurred_at", "source", "target", "domain_id", "idempotency_key")
        values = {name: getattr(self, name) for name in (*names, "trace_context")}
        identity = self.id if self.origin is None else self.origin.id
        return EventEnvelope.trusted({**values, "event_id": identity, "payload": from_json(self.payload)})
