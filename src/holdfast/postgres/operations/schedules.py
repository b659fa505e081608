"""Schedules as operators see and change them."""

from __future__ import annotations

from typing import Literal
from uuid import UUID

from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.schedules import LISTING, ScheduleStatus

ScheduleVerb = Literal["pause", "resume"]


async def every(statements: Statements) -> list[ScheduleStatus]:
    """Every schedule that was declared and not removed."""
    return [ScheduleStatus(**row) for row in await statements.fetch("list_schedules", **LISTING)]


async def read(statements: Statements, name: str, *, payload: bool) -> ScheduleStatus | None:
    """One schedule."""
    rows = await statements.fetch("list_schedules", **(LISTING | {"only": name, "payload": payload}))
    return ScheduleStatus(**rows[0]) if rows else None


async def trigger(statements: Statements, name: str, *, actor: str, reason: str | None) -> UUID | None:
    """Publish the event of a schedule now; its id, or None when there is no such schedule."""
    identity: UUID | None = await statements.value("schedule_trigger", name=name, actor=actor, reason=reason)
    return identity


async def change_state(
    statements: Statements, name: str, verb: ScheduleVerb, *, actor: str, reason: str | None
) -> bool | None:
    """Pause or resume a schedule; whether that changed anything, or None when there is no such schedule."""
    rows = await statements.fetch("schedule_change_state", name=name, verb=verb, actor=actor, reason=reason)
    return rows[0]["before"] != rows[0]["after"] if rows else None


async def remove(statements: Statements, name: str, *, actor: str, reason: str | None) -> str:
    """Remove a schedule: `removed`, `unknown`, or `declared` when a living worker declares it."""
    return str(await statements.value("schedule_remove", name=name, actor=actor, reason=reason))
