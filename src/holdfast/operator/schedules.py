"""Verbs for schedules: list them, show the next slots, trigger, pause, resume, remove."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any
from uuid import UUID

from holdfast.checks import quoted
from holdfast.errors import ConfigurationError, NotFound
from holdfast.names import schedule_name
from holdfast.operator import arguments
from holdfast.operator.session import Refused, Session
from holdfast.postgres.operations import schedules
from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.schedules import ScheduleVerb
from holdfast.postgres.schedules import ScheduleStatus

UPCOMING = 5
MOST_NAMED = 10  # schedules in an error


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """One schedule and its next slots; none when it is paused, or when this machine cannot compute them."""

    schedule: ScheduleStatus
    upcoming: list[datetime]


@dataclass(frozen=True, slots=True)
class ScheduleChange:
    """A pause or resumption of a schedule; `changed` is false when it was in that state already."""

    name: str
    verb: ScheduleVerb
    changed: bool
    dry_run: bool = False


class Schedules:
    """Schedules, as `operator.schedules`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def all(self) -> list[ScheduleStatus]:
        """Every schedule that was declared and not removed."""
        async with self._session.reading() as statements:
            return await schedules.every(statements)

    async def detail(self, name: str, *, payload: bool = False) -> ScheduleReport:
        """One schedule, with its payload only on request."""
        await self._named(name)
        async with self._session.reading() as statements:
            found = await schedules.read(statements, name, payload=payload)
            if found is None:
                raise await _unknown(statements, name)
        return ScheduleReport(found, _upcoming(found))

    async def trigger(self, name: str, *, reason: str | None = None, dry_run: bool = False) -> UUID:
        """Publish the event of a schedule now, in addition to its slots; the id of the event."""
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "schedule": await self._named(name)}
        async with self._session.changing("schedule.trigger", dry_run=dry_run, **asked) as statements:
            identity = await schedules.trigger(statements, name, actor=self._session.actor, reason=reason)
            if identity is None:
                raise await _unknown(statements, name)
        return identity

    async def pause(self, name: str, *, reason: str | None = None, dry_run: bool = False) -> ScheduleChange:
        """Pause a schedule. Slots that come while it is paused are not fired, also not later."""
        return await self._change(name, "pause", reason, dry_run)

    async def resume(self, name: str, *, reason: str | None = None, dry_run: bool = False) -> ScheduleChange:
        """Resume a paused schedule, from its next slot on."""
        return await self._change(name, "resume", reason, dry_run)

    async def _named(self, name: str) -> str:
        """A schedule's name. What cannot be one is as unknown as what no schedule has."""
        try:
            return schedule_name(name, error=ConfigurationError)
        except ConfigurationError:
            async with self._session.reading() as statements:
                raise await _unknown(statements, name) from None

    async def _change(self, name: str, verb: ScheduleVerb, reason: str | None, dry_run: bool) -> ScheduleChange:
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "schedule": await self._named(name)}
        async with self._session.changing(f"schedule.{verb}", dry_run=dry_run, **asked) as statements:
            changed = await schedules.change_state(statements, name, verb, actor=self._session.actor, reason=reason)
            if changed is None:
                raise await _unknown(statements, name)
        return ScheduleChange(name, verb, changed, dry_run)

    async def remove(self, name: str, *, reason: str | None = None, dry_run: bool = False) -> None:
        """Remove a schedule that no living worker declares."""
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "schedule": await self._named(name)}
        async with self._session.changing("schedule.remove", dry_run=dry_run, **asked) as statements:
            answer = await schedules.remove(statements, name, actor=self._session.actor, reason=reason)
            if answer == "unknown":
                raise await _unknown(statements, name)
            if answer == "declared":
                raise Refused(
                    f"a living worker declares {name}",
                    f"remove the schedule from its code and restart it, or: holdfast schedules pause {name}",
                )


def _upcoming(found: ScheduleStatus) -> list[datetime]:
    if found.paused_at is not None:
        return []
    try:
        return list(islice(found.timing.after(max(found.looked_at, found.owed_after)), UPCOMING))
    except ConfigurationError:
        return []  # without the extra, or without its time zone


async def _unknown(statements: Statements, name: str) -> NotFound:
    declared = [each.name for each in await schedules.every(statements)]
    more = f" and {len(declared) - MOST_NAMED} more" if len(declared) > MOST_NAMED else ""
    remedy = f"name one of {', '.join(declared[:MOST_NAMED])}{more}" if declared else "no schedule is declared"
    return NotFound("schedule", f"{quoted(name)} is unknown", f"{remedy}; holdfast schedules list shows all")
