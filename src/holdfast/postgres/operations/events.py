"""Events: those that are open, and one with all its deliveries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.failure import FailureCycle
from holdfast.postgres.operations import audit
from holdfast.postgres.operations.audit import AuditLine
from holdfast.postgres.operations.connection import Statements
from holdfast.stored_json import decode

ERROR_LENGTH = 500
MOST_LINES = 200
MOST_TRACES = 32


@dataclass(frozen=True, slots=True)
class OpenEvent:
    """A delivery that is pending or in flight."""

    id: UUID
    event_id: UUID
    event_type: str
    source: str
    target: str | None
    route: str
    handler_name: str | None
    status: str
    attempts: int
    last_error: str | None
    created_at: datetime
    available_at: datetime
    lease_expires_at: datetime | None
    channel: str
    generation: int


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A replay plan that contains, or contained, a delivery."""

    plan_id: int
    state: str
    why: str | None
    replayed_at: datetime | None


@dataclass(frozen=True, slots=True)
class Head:
    """What a handler has to be done with before it gets a delivery that has an ordering key."""

    handler_name: str
    id: UUID  # of that delivery
    failed: bool  # it is a dead letter: the key waits for an operator


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event for one handler: its state and its history."""

    id: UUID
    handler_name: str | None  # '*': it was split, and every handler has a delivery of its own
    route: str
    status: str
    attempts: int
    last_error: str | None
    error_signature: str | None
    traceback: str | None
    failure_reason: str | None
    first_failed_at: datetime | None
    failed_at: datetime | None
    created_at: datetime
    available_at: datetime  # of a pending one: its next attempt
    expires_at: datetime | None
    delivered_at: datetime | None
    deleted_at: datetime | None
    lease_expires_at: datetime | None
    worker: str | None  # of one in flight: its name, host and process
    claimed_at: datetime | None
    owed_to: list[str]  # of one without a handler: the handlers that subscribe to it
    channel: str
    generation: int
    priority: int
    archive_id: int | None  # its number, if it is in the archive
    state: str  # the status; or archived; or fanned_out: settled, because every handler has a delivery of its own
    cycles: list[FailureCycle]
    plans: list[PlannedRow]
    actions: list[AuditLine]
    ordering_key: str | None = None
    fairness_key: str | None = None
    behind: list[Head] = field(default_factory=list)  # of a pending one


@dataclass(frozen=True, slots=True)
class EventDetail:
    """An event with all its deliveries."""

    event_id: UUID
    event_type: str
    event_version: int
    occurred_at: datetime
    source: str
    target: str | None
    content_class: str
    domain_id: UUID | None
    idempotency_key: str
    event_key: str | None  # the name that its producer gave it with `key=`
    trace_context: str | None
    deliveries: list[Delivery]
    handled_by: dict[str, datetime]  # from the inbox
    payload: Any = None  # only on request, like the headers
    headers: Any = None


async def page(
    statements: Statements, filters: Mapping[str, object], *, limit: int, alone: bool = False
) -> list[OpenEvent]:
    """Some of the events that are open, and match the filters; `alone`: those owed to no other handler as well."""
    rows = await statements.fetch("list_open", most=limit, error_length=ERROR_LENGTH, alone=alone, **filters)
    return [OpenEvent(**row) for row in rows]


async def detail(statements: Statements, id: UUID, *, payload: bool) -> EventDetail | None:
    """The event that an id names: its own id, or that of one of its deliveries."""
    rows = await statements.fetch("read_event_rows", id=id, payload=payload)
    rows += await statements.fetch("read_archived_rows", id=id, payload=payload)
    if not rows:
        return None
    first = rows[0]
    handled = await statements.fetch("list_handled", key=first["idempotency_key"])
    parsed: dict[str, Any] = {n: None if first[n] is None else decode(first[n]) for n in ("payload", "headers")}
    common = ("event_type", "event_version", "occurred_at", "source", "target", "content_class", "domain_id")
    return EventDetail(
        event_id=first["origin_id"] or first["id"],
        **{name: first[name] for name in (*common, "idempotency_key", "trace_context")},
        event_key=first["dedupe_key"],
        deliveries=[await _delivery(statements, row) for row in rows],
        handled_by={row["handler_name"]: row["handled_at"] for row in handled},
        **parsed,
    )


async def cancel(statements: Statements, id: UUID, *, actor: str, reason: str | None) -> bool:
    """Cancel one delivery; false when it is settled."""
    return bool(await statements.value("outbox_cancel_event", id=id, cancelled_by=actor, reason=reason))


async def cancel_many(statements: Statements, ids: list[UUID], *, actor: str, reason: str | None) -> list[UUID]:
    """Cancel deliveries; return those that were not settled already."""
    rows = await statements.fetch("cancel_deliveries", ids=ids, cancelled_by=actor, reason=reason)
    return [row["id"] for row in rows if row["cancelled"]]


async def _delivery(statements: Statements, row: asyncpg.Record) -> Delivery:
    fields = [name for name in Delivery.__dataclass_fields__ if name not in ("cycles", "plans", "actions", "behind")]
    plans = await statements.fetch("list_plans_of_row", id=row["id"])
    return Delivery(
        **{name: row[name] for name in fields},
        cycles=[FailureCycle.model_validate(cycle) for cycle in json.loads(row["failure_history"])],
        plans=[PlannedRow(**plan) for plan in plans],
        actions=await audit.of_row(statements, row["id"], most=MOST_LINES),
        behind=await _behind(statements, row),
    )


async def _behind(statements: Statements, row: asyncpg.Record) -> list[Head]:
    if row["status"] != "pending" or row["ordering_key"] is None:
        return []
    handlers = row["owed_to"] if row["handler_name"] is None else [row["handler_name"]]
    values = {"handlers": handlers, "key": row["ordering_key"], "id": row["id"]}
    return [Head(**each) for each in await statements.fetch("list_heads", **values)]


async def trace_contexts(
    statements: Statements, ids: Sequence[UUID], numbers: Sequence[int], *, most: int = MOST_TRACES
) -> list[str]:
    """Trace contexts of some of the rows of the outbox and of the archive, each once."""
    values = {"ids": list(ids)[:most], "numbers": list(numbers)[:most], "most": most}
    return [row["trace_context"] for row in await statements.fetch("read_trace_contexts", **values)]
