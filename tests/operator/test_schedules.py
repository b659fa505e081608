"""What operators see of schedules and do with them: verbs, the command line, doctor, metrics (IDM-4, OPS-1, OPS-5)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest

from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Refused
from holdfast.postgres import doctor
from holdfast.postgres.doctor import Finding
from holdfast.schedules import due
from tests.operator.support import ACTOR, actions
from tests.operator.test_commands import Run, db, holdfast, made
from tests.worker.schedules import HOUR, NAME, declare, declaring, rewind, schedules, slots, stored
from tests.worker.support import drained, running, until

__all__ = ["db", "holdfast"]  # fixtures


@pytest.fixture
async def operator(dsn: str) -> AsyncIterator[Operator]:
    async with Operator(dsn, actor=ACTOR) as each:
        yield each


async def forsake(conn: asyncpg.Connection) -> None:
    """As if no worker had looked for a while."""
    await conn.execute("UPDATE core.schedules SET attended_at = now() - interval '2 minutes'")


async def plan(conn: asyncpg.Connection) -> None:
    """What a worker does at its first look."""
    (seen,) = await schedules().watch(conn, [NAME])
    assert await schedules().fire(conn, seen, due(seen.timing, seen.missed, seen.owed_after, seen.looked_at))


# --- looking ---


async def test_schedules_are_listed_with_their_state(conn: asyncpg.Connection, operator: Operator) -> None:
    """Waiting, overdue, unserved or paused; when the next slots are, and whose declaration it is (IDM-4)."""
    assert await operator.schedules.all() == []
    await declare(conn, generation=3, cron="0 7 * * *", timezone="Europe/Berlin")
    await plan(conn)
    (seen,) = await operator.schedules.all()
    assert (seen.state, seen.when, seen.generation) == ("waiting", "0 7 * * * (Europe/Berlin)", 3)
    assert (seen.fired, seen.payload, seen.overdue_for) == (0, None, None)
    report = await operator.schedules.detail(NAME, payload=True)
    assert report.schedule.payload == "{}"
    assert report.upcoming[0] == seen.next_slot
    assert len(report.upcoming) == 5
    await forsake(conn)
    assert (await operator.schedules.all())[0].state == "unserved"
    await rewind(conn, timedelta(minutes=3))
    (seen,) = await operator.schedules.all()
    assert seen.state == "overdue"
    assert 170 < (seen.overdue_for or 0) < 200
    await operator.schedules.pause(NAME)
    assert (await operator.schedules.all())[0].state == "paused"
    assert (await operator.schedules.detail(NAME)).upcoming == []


# --- changing ---


async def test_a_schedule_is_triggered(dsn: str, conn: asyncpg.Connection, operator: Operator) -> None:
    """An event now, beside its slots, also while it is paused; audited with the event's id (IDM-4)."""
    await declare(conn, payload={"n": 1})
    await operator.schedules.pause(NAME)
    before = await stored(conn)
    assert await operator.schedules.trigger(NAME, dry_run=True)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0
    first = await operator.schedules.trigger(NAME, reason="the first was lost")
    second = await operator.schedules.trigger(NAME)
    assert {**await stored(conn), "now": None} == {**before, "now": None}
    rows = await conn.fetch("SELECT * FROM core.outbox ORDER BY occurred_at")
    assert [row["id"] for row in rows] == [first, second]
    assert len({row["idempotency_key"] for row in rows}) == 2
    assert json.loads(rows[0]["headers"]) == {"schedule": NAME, "triggered_by": ACTOR}
    assert json.loads(rows[0]["payload"]) == {"n": 1}
    assert await actions(conn) == ["schedule.pause", "schedule.trigger", "schedule.trigger"]
    (delivery,) = (await operator.events.detail(first)).deliveries
    assert [line.action for line in delivery.actions] == ["schedule.trigger"]
    async with running(dsn, declaring(payload={"n": 1})):
        await drained(conn)
    assert {row[0] for row in await conn.fetch("SELECT status FROM core.outbox")} == {"delivered"}


@pytest.mark.slow
async def test_a_pause_leaves_slots_out_and_a_resume_begins_now(
    dsn: str, conn: asyncpg.Connection, operator: Operator
) -> None:
    """Whatever the policy is; a worker that runs notices; audited; again it changes nothing (IDM-4)."""
    registry = declaring(every=timedelta(seconds=1), missed="all")
    async with running(dsn, registry):
        await until(lambda: conn.fetchval("SELECT count(*) > 0 FROM core.outbox"), what="a slot")
        assert (await operator.schedules.pause(NAME, dry_run=True)).changed
        assert (await operator.schedules.pause(NAME, reason="a holiday")).changed
        assert not (await operator.schedules.pause(NAME)).changed
        paused = (await stored(conn))["owed_after"]
        later = "SELECT clock_timestamp() > $1::timestamptz + interval '1.5 seconds'"
        await until(lambda: conn.fetchval(later, paused), what="some time")
        await drained(conn)
    assert (await slots(conn))[-1] <= paused
    assert (await operator.schedules.resume(NAME)).changed
    resumed = (await stored(conn))["owed_after"]
    assert not (await operator.schedules.resume(NAME)).changed
    async with running(dsn, registry):
        await until(lambda: conn.fetchval("SELECT last_slot > $1 FROM core.schedules", resumed), what="another slot")
        await drained(conn)
    assert not [slot for slot in await slots(conn) if paused < slot <= resumed]
    assert await actions(conn) == ["schedule.pause", "schedule.resume"]


async def test_a_paused_schedule_is_not_fired_by_who_saw_it_before(
    conn: asyncpg.Connection, operator: Operator
) -> None:
    """A pause holds from the moment of its commit, also for a worker that was about to fire (IDM-4)."""
    await declare(conn)
    await rewind(conn, HOUR)
    (seen,) = await schedules().watch(conn, [NAME])
    await operator.schedules.pause(NAME)
    assert not await schedules().fire(conn, seen, due(seen.timing, "latest", seen.owed_after, seen.looked_at))
    await operator.schedules.resume(NAME)
    assert not await schedules().fire(conn, seen, due(seen.timing, "latest", seen.owed_after, seen.looked_at))
    assert await slots(conn) == []


async def test_a_schedule_is_removed_when_nobody_declares_it(conn: asyncpg.Connection, operator: Operator) -> None:
    """Refused while a living worker does, which is written down as well (IDM-4)."""
    await declare(conn)
    with pytest.raises(Refused, match="a living worker declares"):
        await operator.schedules.remove(NAME, reason="it is gone")
    await forsake(conn)
    await operator.schedules.remove(NAME, dry_run=True)
    assert await stored(conn)
    await operator.schedules.remove(NAME, reason="it is gone")
    assert await operator.schedules.all() == []
    rows = await conn.fetch("SELECT action, arguments FROM core.audit ORDER BY id")
    assert [row["action"] for row in rows] == ["schedule.remove", "schedule.remove"]
    refused, done = (json.loads(row["arguments"]) for row in rows)
    assert "declares" in refused["refused"]
    assert (done["schedule"], done["every"], done["event_type"]) == (NAME, "01:00:00", "report.due")


async def test_what_is_not_there_cannot_be_changed(conn: asyncpg.Connection, operator: Operator) -> None:
    """The error names the command that lists them; nothing is audited (OPS-1)."""
    calls = (
        operator.schedules.detail("reports.none"),
        operator.schedules.trigger("reports.none"),
        operator.schedules.pause("reports.none"),
        operator.schedules.remove("reports.none"),
    )
    for call in calls:
        with pytest.raises(ConfigurationError, match=r"reports\.none. is unknown; .*holdfast schedules list"):
            await call
    for name in ("Reports", "a b.c", "x" * 300):
        with pytest.raises(ConfigurationError, match="schedule"):
            await operator.schedules.trigger(name)
    assert await actions(conn) == []


# --- the command line ---


def test_the_command_line(dsn: str, holdfast: Run, db: psycopg.Connection[Any]) -> None:
    """Tables and JSON, questions, dry runs, reasons, and exit codes 0, 1 and 2 (OPS-1)."""
    made(dsn, declare, payload={"card": "canary"})
    made(dsn, plan)
    code, out, _ = holdfast("schedules", "list")
    assert code == 0 and NAME in out and "waiting" in out and "every 1:00:00" in out
    code, out, _ = holdfast("schedules", "list", "--json")
    assert code == 0 and [(each["name"], each["state"]) for each in json.loads(out)] == [(NAME, "waiting")]
    assert "canary" not in out
    code, out, _ = holdfast("schedules", "show", NAME)
    assert code == 0 and "next slots" in out and "canary" not in out
    code, out, _ = holdfast("schedules", "show", NAME, "--payload", "--json")
    assert code == 0 and json.loads(out)["payload"] == {"card": "canary"} and len(json.loads(out)["upcoming"]) == 5

    code, out, err = holdfast("schedules", "trigger", NAME)
    assert code == 2 and "--yes is needed" in err
    code, out, _ = holdfast("schedules", "trigger", NAME, "--dry-run", "--json")
    assert code == 0 and json.loads(out) == {"schedule": NAME, "event_id": None, "dry_run": True}
    assert db.execute("SELECT count(*) FROM core.outbox").fetchall() == [(0,)]
    code, out, _ = holdfast("schedules", "trigger", NAME, "--yes", "--reason", "by hand", "--json")
    assert code == 0
    assert db.execute("SELECT id FROM core.outbox").fetchall() == [(UUID(json.loads(out)["event_id"]),)]

    code, out, _ = holdfast("schedules", "pause", NAME, "--yes", "--reason", "a holiday")
    assert (code, out) == (0, f"{NAME} paused\n")
    code, out, _ = holdfast("schedules", "pause", NAME, "--yes")
    assert (code, out) == (1, f"{NAME} was paused already\n")
    code, out, _ = holdfast("schedules", "resume", NAME, "--dry-run")
    assert (code, out) == (0, f"{NAME} would be resumed\n")
    code, out, _ = holdfast("schedules", "resume", NAME, "--yes", "--json")
    assert code == 0 and json.loads(out)["changed"]

    code, _, err = holdfast("schedules", "remove", NAME, "--yes")
    assert code == 1 and "a living worker declares" in err and f"holdfast schedules pause {NAME}" in err
    made(dsn, forsake)
    code, out, _ = holdfast("schedules", "remove", NAME, "--dry-run")
    assert (code, out) == (0, f"{NAME} would be removed\n")
    code, out, _ = holdfast("schedules", "remove", NAME, "--yes", "--actor", "bob@example.org")
    assert (code, out) == (0, f"{NAME} removed\n")
    code, _, err = holdfast("schedules", "show", NAME)
    assert code == 2 and "is unknown" in err
    audit = db.execute("SELECT action, actor, reason FROM core.audit WHERE NOT arguments ? 'refused' ORDER BY id")
    assert audit.fetchall() == [
        ("schedule.trigger", ACTOR, "by hand"),
        ("schedule.pause", ACTOR, "a holiday"),
        ("schedule.resume", ACTOR, None),
        ("schedule.remove", "bob@example.org", None),
    ]


# --- doctor and metrics ---


async def findings(conn: asyncpg.Connection) -> list[Finding]:
    report = await doctor.examine(conn, only="health")
    return [finding for finding in report.findings if finding.code.startswith("schedule-")]


@pytest.mark.slow
async def test_doctor_names_schedules_that_nobody_fires(dsn: str, conn: asyncpg.Connection, operator: Operator) -> None:
    """Overdue is a problem, with or without somebody who looks; unserved is a warning; paused is neither (OPS-5)."""
    await declare(conn)
    await plan(conn)
    assert await findings(conn) == []
    await forsake(conn)
    (unserved,) = await findings(conn)
    assert (unserved.code, unserved.severity, unserved.object) == ("schedule-unserved", "warning", NAME)
    assert re.search(r"last served 1[2-9]\d s ago", unserved.evidence)
    assert unserved.remedy.endswith(f"holdfast schedules remove {NAME}")
    await rewind(conn, timedelta(minutes=5))
    (overdue,) = await findings(conn)
    assert (overdue.code, overdue.severity, overdue.object) == ("schedule-overdue", "problem", NAME)
    assert re.search(r"overdue for 3\d\d s", overdue.evidence)
    assert overdue.remedy.endswith(f"holdfast schedules remove {NAME}")
    await conn.execute("UPDATE core.schedules SET attended_at = now()")
    (overdue,) = await findings(conn)
    assert "schedule_unreadable" in overdue.remedy
    await operator.schedules.pause(NAME)
    assert await findings(conn) == []
    await operator.schedules.resume(NAME)
    async with running(dsn, declaring()):
        await until(lambda: _calm(conn), what="nothing to say")


async def test_doctor_names_schedules_that_are_ahead_of_the_clock(
    dsn: str, conn: asyncpg.Connection, operator: Operator
) -> None:
    """The server's clock was ahead when a slot was fired; the remedy, as it is printed, helps (OPS-5, IDM-4)."""
    await declare(conn)
    await plan(conn)
    slot = (await stored(conn))["next_slot"]
    ahead = "UPDATE core.schedules SET owed_after = $1, last_slot = $1, next_slot = $2"
    await conn.execute(ahead, slot + 2 * HOUR, slot + 3 * HOUR)
    (found,) = await findings(conn)
    assert (found.code, found.severity, found.object) == ("schedule-ahead", "problem", NAME)
    assert f"before {slot + 2 * HOUR:%Y-%m-%d %H:%M:%S} UTC" in found.what
    assert (await operator.schedules.detail(NAME)).upcoming[0] == slot + 3 * HOUR
    assert found.remedy.splitlines()[1:] == [f"holdfast schedules {verb} {NAME}" for verb in ("pause", "resume")]
    for command in found.remedy.splitlines()[1:]:
        assert (await getattr(operator.schedules, command.split()[2])(NAME)).changed
        assert await findings(conn) == []
    async with running(dsn, declaring()):
        planned = "SELECT next_slot < now() + interval '1 hour' FROM core.schedules"
        await until(lambda: conn.fetchval(planned), what="a next slot within the hour")
    assert (await stored(conn))["last_slot"] is None


async def _calm(conn: asyncpg.Connection) -> bool:
    return await findings(conn) == []


async def test_schedules_are_metrics(conn: asyncpg.Connection, operator: Operator) -> None:
    """How long each is overdue, whether somebody declares it, and whether it is paused (OBS-3)."""

    async def samples() -> list[str]:
        text = await operator.metrics()
        return [line for line in text.splitlines() if line.startswith("holdfast_schedule_")]

    assert await samples() == []
    await declare(conn)
    await rewind(conn, timedelta(minutes=5))
    seconds, served, paused = await samples()
    assert 300 <= float(seconds.rpartition(" ")[2]) < 330
    assert (served, paused) == (
        f'holdfast_schedule_served{{schedule="{NAME}"}} 0.0',
        f'holdfast_schedule_paused{{schedule="{NAME}"}} 0.0',
    )
    await operator.schedules.pause(NAME)
    seconds, _, paused = await samples()
    assert seconds.endswith(" 0.0")
    assert paused.endswith(" 1.0")
