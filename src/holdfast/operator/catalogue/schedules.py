"""Verbs for schedules."""

from __future__ import annotations

from uuid import UUID

from pydantic import Field

from holdfast.operator.catalogue.overview import Nothing
from holdfast.operator.catalogue.verb import Arguments, Catalogue, Change, Name
from holdfast.operator.operator import Operator
from holdfast.operator.roles import Role
from holdfast.operator.schedules import ScheduleChange, ScheduleReport
from holdfast.postgres.schedules import ScheduleStatus

VERBS = Catalogue()


class Named(Arguments):
    name: Name


class Shown(Named):
    payload: bool = Field(False, description="Include the payload.")


class Turn(Named, Change):
    pass


@VERBS.reads("schedules.list")
async def every(operator: Operator, given: Nothing) -> list[ScheduleStatus]:
    """Every schedule that was declared and not removed."""
    return await operator.schedules.all()


@VERBS.reads("schedules.show")
async def show(operator: Operator, given: Shown) -> ScheduleReport:
    """One schedule, with its next slots."""
    return await operator.schedules.detail(given.name, payload=given.payload)


@VERBS.changes("schedules.trigger")
async def trigger(operator: Operator, given: Turn) -> dict[str, UUID | None]:
    """Publish the event of a schedule now, in addition to its slots."""
    event = await operator.schedules.trigger(given.name, reason=given.reason, dry_run=given.dry_run)
    return {"event_id": None if given.dry_run else event}


@VERBS.changes("schedules.pause")
async def pause(operator: Operator, given: Turn) -> ScheduleChange:
    """Pause a schedule. Slots that come while it is paused are not fired, also not later."""
    return await operator.schedules.pause(given.name, reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("schedules.resume")
async def resume(operator: Operator, given: Turn) -> ScheduleChange:
    """Resume a paused schedule, from its next slot on."""
    return await operator.schedules.resume(given.name, reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("schedules.remove", Role.ADMIN)
async def remove(operator: Operator, given: Turn) -> dict[str, bool]:
    """Remove a schedule that no living worker declares."""
    await operator.schedules.remove(given.name, reason=given.reason, dry_run=given.dry_run)
    return {"removed": not given.dry_run}
