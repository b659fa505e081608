"""Schedules: when each fires next, whether somebody does it, and what an operator may do with it (IDM-4)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Literal
from uuid import UUID

from holdfast.errors import ConfigurationError
from holdfast.operator import arguments
from holdfast.operator.session import Operator, Refused
from holdfast.postgres.schedules import LISTING, ScheduleSeen

Verb = Literal["pause", "resume"]
UPCOMING = 5


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """One schedule, and the slots that come next; none when it is paused, or this machine cannot work them out."""

    schedule: ScheduleSeen
    upcoming: list[datetime]


@dataclass(frozen=True, slots=True)
class Turned:
    """A schedule that was paused or resumed; it did not change when it was already."""

    name: str
    verb: Verb
    changed: bool
    dry_run: bool = False


async def listing(operator: Operator) -> list[ScheduleSeen]:
    """Every schedule that was declared and not removed."""
    async with operator.reading():
        return [ScheduleSeen(**row) for row in await operator.fetch("list_schedules", **LISTING)]


async def show(operator: Operator, name: str, *, payload: bool = False) -> ScheduleReport:
    """One of them."""
    async with operator.reading():
        values = LISTING | {"only": arguments.handler(name, "schedule"), "payload": payload}
        rows = await operator.fetch("list_schedules", **values)
    if not rows:
        raise _unknown(name)
    found = ScheduleSeen(**rows[0])
    return ScheduleReport(found, _upcoming(found))


def _upcoming(found: ScheduleSeen) -> list[datetime]:
    if found.paused_at is not None:
        return []
    try:
        return list(islice(found.timing.after(max(found.looked_at, found.owed_after)), UPCOMING))
    except ConfigurationError:
        return []  # without the extra, or without its time zone


async def trigger(operator: Operator, name: str, *, reason: str | None = None, dry_run: bool = False) -> UUID:
    """Publish the event of a schedule now, beside its slots; the id of the event."""
    asked = {"reason": arguments.reason(reason), "schedule": arguments.handler(name, "schedule")}
    async with operator.changing("schedule.trigger", dry_run=dry_run, **asked):
        values = {"name": name, "actor": operator.actor, "reason": reason}
        identity: UUID | None = (await operator.fetch("trigger_schedule", **values))[0][0]
        if identity is None:
            raise _unknown(name)
    return identity


async def turn(
    operator: Operator, name: str, verb: Verb, *, reason: str | None = None, dry_run: bool = False
) -> Turned:
    """Pause or resume a schedule. Slots that come while it is paused are left out."""
    asked = {"reason": arguments.reason(reason), "schedule": arguments.handler(name, "schedule")}
    async with operator.changing(f"schedule.{verb}", dry_run=dry_run, **asked):
        values = {"name": name, "verb": verb, "actor": operator.actor, "reason": reason}
        rows = await operator.fetch("change_schedule_state", **values)
        if not rows:
            raise _unknown(name)
    return Turned(name, verb, rows[0]["before"] != rows[0]["after"], dry_run)


async def remove(operator: Operator, name: str, *, reason: str | None = None, dry_run: bool = False) -> None:
    """Take away a schedule that no living worker declares any more."""
    asked = {"reason": arguments.reason(reason), "schedule": arguments.handler(name, "schedule")}
    async with operator.changing("schedule.remove", dry_run=dry_run, **asked):
        answer = (await operator.fetch("remove_schedule", name=name, actor=operator.actor, reason=reason))[0][0]
        if answer == "unknown":
            raise _unknown(name)
        if answer == "declared":
            raise Refused(
                f"a worker that declares {name} was heard of in the last minute",
                f"take it out of the code and stop that worker, or: holdfast schedules pause {name}",
            )


def _unknown(name: str) -> ConfigurationError:
    return ConfigurationError("schedule", f"{name} is unknown", "holdfast schedules list has those that there are")
