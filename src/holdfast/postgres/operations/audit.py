"""`core.audit`: who did what, when and why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.postgres.operations.connection import Statements


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One action. `actor` is the name that was given, `login` the role of the database session."""

    id: int
    at: datetime
    actor: str
    login: str
    action: str
    reason: str | None
    arguments: dict[str, Any]
    counts: dict[str, int]
    rows: int | None  # how many rows it changed, if it changes rows
    first_id: str | None  # of the rows


async def page(
    statements: Statements,
    *,
    limit: int,
    before: int | None,
    actor: str | None,
    action: str | None,
    since: datetime | None,
    steps: bool,
) -> list[AuditLine]:
    """Actions, the latest first."""
    values = {"most": limit, "before": before, "actor": actor, "action": action, "since": since, "steps": steps}
    return [_line(row) for row in await statements.fetch("list_audit", **values)]


async def of_row(statements: Statements, id: UUID, *, most: int) -> list[AuditLine]:
    """Actions that changed one row of the outbox."""
    return [_line(row) for row in await statements.fetch("list_audit_of_row", id=id, most=most)]


async def of_event(statements: Statements, id: UUID, *, limit: int) -> list[AuditLine]:
    """Actions that changed any delivery of an event, the latest first."""
    return [_line(row) for row in await statements.fetch("list_audit_of_event", id=id, most=limit)]


async def note_refusal(
    statements: Statements, *, actor: str, action: str, reason: str | None, arguments: dict[str, Any], problem: str
) -> None:
    """Record that an action was refused."""
    text = json.dumps(arguments, default=str)
    await statements.fetch("audit_refused", actor=actor, action=action, reason=reason, arguments=text, problem=problem)


async def note_reveal(statements: Statements, id: UUID, *, actor: str, reason: str) -> None:
    """Record that somebody has asked for the values of an event."""
    await statements.fetch("audit_reveal", actor=actor, reason=reason, id=id)


def _line(row: asyncpg.Record) -> AuditLine:
    arguments, found = json.loads(row["arguments"]), json.loads(row["counts"])
    counts = {name: value for name, value in found.items() if isinstance(value, int)}
    # A verb may have found more than numbers, such as the head of the key that it released.
    arguments |= {name: value for name, value in found.items() if name not in counts}
    return AuditLine(**(dict(row) | {"arguments": arguments, "counts": counts}))
