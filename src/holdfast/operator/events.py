"""Events that are open, and everything that is known about one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.errors import ConfigurationError
from holdfast.failure import FailureCycle
from holdfast.operator import arguments
from holdfast.operator.audit import AuditLine, line_of
from holdfast.operator.session import Operator

LONGEST_PAGE = 1_000
ERROR_LENGTH = 500
MOST_LINES = 200


@dataclass(frozen=True, slots=True)
class OpenEvent:
    """An event that waits or runs."""

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
    """A plan that has, or had, something to do with a delivery."""

    plan_id: int
    state: str
    why: str | None
    replayed_at: datetime | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """What an event is for one handler: where it is now, and what it went through."""

    id: UUID
    handler_name: str | None  # '*': it was split, and every handler has a delivery of its own
    route: str
    status: str
    attempts: int
    last_error: str | None
    error_signature: str | None
    failure_reason: str | None
    first_failed_at: datetime | None
    failed_at: datetime | None
    created_at: datetime
    available_at: datetime  # of a pending one: its next attempt
    expires_at: datetime | None
    delivered_at: datetime | None
    deleted_at: datetime | None
    lease_expires_at: datetime | None
    channel: str
    generation: int
    priority: int
    cycles: list[FailureCycle]
    plans: list[PlannedRow]
    actions: list[AuditLine]


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
    trace_context: str | None
    deliveries: list[Delivery]
    handled_by: dict[str, datetime]  # what the inbox remembers
    payload: Any = None  # only when it was asked for, like the headers
    headers: Any = None


async def listing(
    operator: Operator,
    *,
    limit: int = 50,
    event_type: str | None = None,
    handler: str | None = None,
    source: str | None = None,
    generation: int | None = None,
) -> list[OpenEvent]:
    """Some of the events that are open."""
    arguments.whole("limit", limit, 1, LONGEST_PAGE)
    async with operator.reading():
        rows = await operator.fetch(
            "list_open",
            most=limit,
            error_length=ERROR_LENGTH,
            event_type=None if event_type is None else arguments.name("event_type", event_type),
            handler=None if handler is None else arguments.handler(handler),
            source=None if source is None else arguments.name("source", source),
            generation=None if generation is None else arguments.whole("generation", generation),
        )
    return [OpenEvent(**row) for row in rows]


async def detail(operator: Operator, id: UUID | str, *, payload: bool = False) -> EventDetail:
    """Everything about the event that an id names: its own, or that of one of its deliveries."""
    row_id = arguments.identity(id)
    async with operator.reading():
        rows = await operator.fetch("read_event_rows", id=row_id, payload=payload)
        if not rows:
            raise await _unknown(operator, row_id)
        first = rows[0]
        handled = await operator.fetch("list_handled", key=first["idempotency_key"])
        deliveries = [await _delivery(operator, row) for row in rows]
    parsed: dict[str, Any] = {n: None if first[n] is None else json.loads(first[n]) for n in ("payload", "headers")}
    common = ("event_type", "event_version", "occurred_at", "source", "target", "content_class", "domain_id")
    return EventDetail(
        event_id=first["origin_id"] or first["id"],
        **{name: first[name] for name in (*common, "idempotency_key", "trace_context")},
        deliveries=deliveries,
        handled_by={row["handler_name"]: row["handled_at"] for row in handled},
        **parsed,
    )


async def _unknown(operator: Operator, row_id: UUID) -> ConfigurationError:
    (archived,) = await operator.fetch("find_archived", ids=[row_id], most=1)
    if archived["number"] is not None:
        return ConfigurationError("id", f"{row_id} is in the archive", f"holdfast archive show {row_id}")
    return ConfigurationError("id", f"{row_id} names no event", "retention may have removed it; check the id")


async def _delivery(operator: Operator, row: asyncpg.Record) -> Delivery:
    fields = [name for name in Delivery.__dataclass_fields__ if name not in ("cycles", "plans", "actions")]
    actions = await operator.fetch("list_audit_of_row", id=row["id"], most=MOST_LINES)
    plans = await operator.fetch("list_plans_of_row", id=row["id"])
    return Delivery(
        **{name: row[name] for name in fields},
        cycles=[FailureCycle.model_validate(cycle) for cycle in json.loads(row["failure_history"])],
        plans=[PlannedRow(**plan) for plan in plans],
        actions=[line_of(line) for line in actions],
    )
