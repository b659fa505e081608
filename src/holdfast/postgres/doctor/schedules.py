"""Checks whether workers fire the schedules in time."""

from __future__ import annotations

from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import Check, Finding
from holdfast.postgres.schedules import LISTING, ScheduleStatus


async def _overdue(examination: Examination) -> list[Finding]:
    return [
        Finding(
            "problem",
            "schedule-overdue",
            seen.name,
            f"a slot of {seen.name} has passed and was not fired",
            f"overdue for {seen.overdue_for or 0:.0f} s; {seen.when}; {_last_served(seen)}",
            "read the log of the workers that declare it: schedule_unreadable or schedule_refused says why"
            if seen.served
            else _start_or_remove(seen),
        )
        for seen in await _schedules(examination)
        if seen.state == "overdue"
    ]


async def _ahead(examination: Examination) -> list[Finding]:
    return [
        Finding(
            "problem",
            "schedule-ahead",
            seen.name,
            f"no slot of {seen.name} is fired before {seen.owed_after:%Y-%m-%d %H:%M:%S} UTC: the server's clock was "
            "ahead when its slots up to then were dealt with",
            f"that is {(seen.owed_after - seen.looked_at).total_seconds():.0f} s from now; {seen.when}",
            f"if the server's clock is right now, let it begin now:\nholdfast schedules pause {seen.name}\n"
            f"holdfast schedules resume {seen.name}",
        )
        for seen in await _schedules(examination)
        if seen.paused_at is None and seen.owed_after - seen.looked_at > examination.limits.clock
    ]


async def _unserved(examination: Examination) -> list[Finding]:
    return [
        Finding(
            "warning",
            "schedule-unserved",
            seen.name,
            f"no living worker declares {seen.name}, so its slots are not fired",
            f"{_last_served(seen)}; declared by generation {seen.generation}",
            _start_or_remove(seen),
        )
        for seen in await _schedules(examination)
        if not seen.served and seen.state != "overdue"
    ]


async def _schedules(examination: Examination) -> list[ScheduleStatus]:
    await examination.require_installed()
    rows = await examination.rows("list_schedules", **(LISTING | {"overdue": examination.limits.overdue}))
    return [ScheduleStatus(**row) for row in rows]


def _start_or_remove(seen: ScheduleStatus) -> str:
    return f"start a worker that declares it, or, if it is no longer needed: holdfast schedules remove {seen.name}"


def _last_served(seen: ScheduleStatus) -> str:
    return f"last served {(seen.looked_at - seen.served_at).total_seconds():.0f} s ago"


CHECKS = (
    Check(
        "schedules",
        "health",
        "no slot of a schedule passed more than a minute ago without being fired",
        ("schedule-overdue",),
        _overdue,
    ),
    Check(
        "slots",
        "health",
        "no schedule has fired slots of the future, which happens when the server's clock was ahead",
        ("schedule-ahead",),
        _ahead,
    ),
    Check("declarations", "health", "living workers declare every schedule", ("schedule-unserved",), _unserved),
)
