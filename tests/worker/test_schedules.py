"""Firing schedules, one worker or several connections at a time: what is published, when, to whom, and how often."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry
from holdfast.errors import ConfigurationError
from holdfast.observing import DirectObservers
from holdfast.postgres.connection import Address, ReservedConnection
from holdfast.postgres.queries import Queries
from holdfast.postgres.schedules import Schedules, Watched
from holdfast.postgres.statements import NamedStatements
from holdfast.schedules import Cron, Due, due
from holdfast.telemetry import Counters
from holdfast.worker.outage import Outages
from holdfast.worker.scheduler import Scheduler
from tests.worker.schedules import HOUR, NAME, declare, declaring, rewind, schedules, slots, stored
from tests.worker.support import Facts, drained, running, terminate, until
from tests.worker.test_pooler import pooled_dsn

__all__ = ["pooled_dsn"]  # a fixture


async def watched(conn: asyncpg.Connection, name: str = NAME) -> Watched:
    (found,) = await schedules().watch(conn, [name])
    return found


def now_due(seen: Watched) -> Due:
    return due(seen.timing, seen.missed, seen.owed_after, seen.looked_at)


# --- a worker ---


async def test_slots_are_fired_in_time_and_handled(dsn: str, conn: asyncpg.Connection) -> None:
    """Within a second of the slot on the database's clock; the event carries slot, payload and headers (IDM-4)."""
    registry, seen = HandlerRegistry(), []

    @registry.handler("clock.ticked", name="clock.note")
    async def note(event: EventEnvelope, context: HandlerContext) -> None:
        seen.append((event, context))

    options: dict[str, Any] = {"payload": {"zone": "Berlin"}, "target": "clock", "priority": 0}
    registry.schedule("clock.ticked", name="clock.second", every=timedelta(seconds=1), **options)
    async with running(dsn, registry, poll_interval=3600) as worker:
        await until(lambda: len(seen) >= 3, what="three slots")
        await drained(conn)
        assert worker.counters.fired >= 3
    fired = await slots(conn, "clock.second")
    assert len(fired) == (fired[-1] - fired[0]).total_seconds() + 1, "none is missing"
    event, context = seen[0]
    assert event.occurred_at == fired[0]
    assert (event.payload, event.source, event.target) == ({"zone": "Berlin"}, "clock", "clock")
    assert dict(context.headers) == {"schedule": "clock.second"}
    rows = await conn.fetch("SELECT created_at - occurred_at AS late, priority FROM core.outbox")
    print("fired late by:", sorted(row["late"].total_seconds() for row in rows))
    assert all(timedelta(0) <= row["late"] < timedelta(seconds=1) and row["priority"] == 0 for row in rows)
    row = await stored(conn, "clock.second")
    assert (row["fired"], row["last_slot"]) == (len(fired), fired[-1])


@pytest.mark.parametrize(
    ("missed", "expected"), [("all", 72), ("latest", 1), ("skip", 0)], ids=["all", "latest", "skip"]
)
async def test_an_outage_is_made_up_for(dsn: str, conn: asyncpg.Connection, missed: Any, expected: int) -> None:
    """Three days without a worker; what is not made up for is told, and nothing is fired again (IDM-4)."""
    # Half an hour from now, because Kolkata is half an hour off: none of its slots comes while the test runs.
    now = await conn.fetchval("SELECT now()")
    options: dict[str, Any] = {"missed": missed, "cron": f"{now.minute} * * * *", "timezone": "Asia/Kolkata"}
    await declare(conn, **options)
    await rewind(conn, timedelta(hours=72))
    first = now.replace(second=0, microsecond=0) - timedelta(hours=71, minutes=30)
    wanted = [first + n * HOUR for n in range(72)]
    facts = Facts()
    for runs in (1, 2):
        async with running(dsn, declaring(**options), facts):
            await until(lambda: _planned(conn), what="its next slot is known")
            await until(lambda runs=runs: _beats(conn, runs), what="its first heartbeat")  # type: ignore[misc]
            await drained(conn)
    assert await slots(conn) == wanted[72 - expected :]
    notices = facts.notices("slots_missed")
    assert [notice.details["schedule"] for notice in notices] == ([] if missed == "all" else [NAME])


async def _planned(conn: asyncpg.Connection, name: str = NAME) -> bool:
    return bool(await conn.fetchval("SELECT next_slot > now() FROM core.schedules WHERE name = $1", name))


async def test_a_hundred_slots_are_made_up_for_and_no_more(dsn: str, conn: asyncpg.Connection) -> None:
    """A schedule that was forgotten for a year does not flood the outbox (IDM-4)."""
    options: dict[str, Any] = {"missed": "all", "cron": "* * * * *"}
    await declare(conn, **options)
    await rewind(conn, timedelta(days=365))
    facts = Facts()
    async with running(dsn, declaring(**options), facts):
        await until(lambda: _planned(conn), what="its next slot is known")
        await drained(conn)
    found = await slots(conn)
    assert 100 <= len(found) <= 102
    assert found[-1] - found[0] == (len(found) - 1) * timedelta(minutes=1)
    assert facts.notices("slots_missed")


async def test_a_first_declaration_owes_nothing_of_the_past(conn: asyncpg.Connection) -> None:
    """Its first slot is the first one after it was declared (IDM-4)."""
    assert await declare(conn) == "declared"
    seen = await watched(conn)
    assert seen.due_in is None
    found = now_due(seen)
    assert found.fire == []
    assert await schedules().fire(conn, seen, found)
    assert (await stored(conn))["next_slot"] == found.next > (await stored(conn))["now"]
    assert await slots(conn) == []


async def test_an_idle_worker_sleeps_until_the_next_slot(dsn: str, conn: asyncpg.Connection) -> None:
    """Five seconds at most, and a look writes nothing; a slot that is nearer ends the sleep sooner (IDM-4)."""
    connection, facts, counters = ReservedConnection(Address(dsn), "schedule"), Facts(), Counters()
    observe = DirectObservers((facts.append,))
    scheduler = Scheduler(connection, schedules(), declaring().schedules, counters, observe, Outages(observe))
    await scheduler.declare()
    await scheduler.run_once(conn)
    await conn.execute("UPDATE core.schedules SET next_slot = owed_after + interval '1 hour'")
    written = await conn.fetchval("SELECT xmin::text FROM core.schedules")
    assert await scheduler.run_once(conn) == 5.0
    assert await conn.fetchval("SELECT xmin::text FROM core.schedules") == written
    await conn.execute("UPDATE core.schedules SET next_slot = clock_timestamp() + interval '2 seconds'")
    assert 1.5 < await scheduler.run_once(conn) < 2.1
    await conn.execute("UPDATE core.schedules SET attended_at = now() - interval '20 seconds'")
    await scheduler.run_once(conn)
    assert await conn.fetchval("SELECT attended_at > now() - interval '5 seconds' FROM core.schedules")
    await connection.close()
    assert (counters.fired, facts) == (0, [])


async def test_a_lost_connection_costs_no_slot(dsn: str, conn: asyncpg.Connection) -> None:
    """The loop reconnects, and fires what came meanwhile (IDM-4, LSN-2)."""
    registry = declaring(name="clock.second", event_type="report.due", every=timedelta(seconds=1), missed="all")
    async with running(dsn, registry):
        await until(lambda: _count(conn, 1), what="a slot")
        assert await terminate(conn, "schedule") == 1
        await until(lambda: _count(conn, 3), what="two more")
        await drained(conn)
    found = await slots(conn, "clock.second")
    assert len(found) == (found[-1] - found[0]).total_seconds() + 1


@pytest.mark.slow
async def test_behind_a_transaction_pooler(pooled_dsn: str, conn: asyncpg.Connection) -> None:
    """Nothing is kept in a session from one statement to the next (IDM-4, LSN-2)."""
    registry = declaring(name="clock.second", event_type="report.due", every=timedelta(seconds=1), missed="all")
    async with running(pooled_dsn, registry, poll_interval=0.2), running(pooled_dsn, registry, poll_interval=0.2):
        await until(lambda: _count(conn, 3), what="three slots")
        await drained(conn)
    found = await slots(conn, "clock.second")
    assert len(found) == (found[-1] - found[0]).total_seconds() + 1


async def _count(conn: asyncpg.Connection, wanted: int) -> bool:
    return bool(await conn.fetchval("SELECT count(*) >= $1 FROM core.outbox", wanted))


async def test_a_worker_without_schedules_has_no_connection_for_them(dsn: str, conn: asyncpg.Connection) -> None:
    """Who declares none pays for none (OBX-7)."""
    registry = HandlerRegistry()

    @registry.handler("report.due", name="reports.send")
    async def send(event: EventEnvelope) -> None: ...

    query = "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
    async with running(dsn, registry):
        await until(lambda: _beats(conn), what="its first heartbeat")
        names = {" ".join(row[0].split()[:2]) for row in await conn.fetch(query)}
    assert "holdfast maintenance" in names
    assert "holdfast schedule" not in names


async def _beats(conn: asyncpg.Connection, workers: int = 1) -> bool:
    return bool(await conn.fetchval("SELECT count(*) >= $1 FROM core.workers", workers))


# --- several at a time ---


async def test_one_of_many_fires_a_slot(dsn: str, conn: asyncpg.Connection) -> None:
    """Five connections that have seen the same slot, thirty times (IDM-4)."""
    await declare(conn, missed="all")
    others = [await asyncpg.connect(dsn) for _ in range(5)]
    try:
        for _ in range(30):
            await conn.execute("DELETE FROM core.outbox")
            await rewind(conn, timedelta(hours=3))
            seen = await watched(conn)
            found = now_due(seen)
            assert len(found.fire) == 3
            answers = await asyncio.gather(*(schedules().fire(other, seen, found) for other in others))
            assert sorted(answers) == [False] * 4 + [True]
            assert await slots(conn) == found.fire
    finally:
        for other in others:
            await other.close()


async def test_whoever_dies_in_the_middle_has_fired_nothing(dsn: str, conn: asyncpg.Connection) -> None:
    """A worker whose session ends while its event is being written; the next one fires the slot, once (IDM-4)."""
    await declare(conn)
    await rewind(conn, HOUR)
    seen = await watched(conn)
    found = now_due(seen)
    first, second = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    try:
        async with conn.transaction():
            await conn.execute("LOCK TABLE core.outbox IN EXCLUSIVE MODE")
            dying = asyncio.create_task(schedules().fire(first, seen, found))
            waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid = $1)"
            await until(lambda: conn.fetchval(waits, first.get_server_pid()), what="it waits with the row in its hands")
            assert await schedules().fire(second, seen, found) is False, "nobody waits for it"
            await conn.fetchval("SELECT pg_terminate_backend($1)", first.get_server_pid())
            with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
                await dying
        gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)"
        await until(lambda: conn.fetchval(gone, first.get_server_pid()), what="its session is over")
        assert await schedules().fire(second, seen, found) is True
    finally:
        first.terminate()
        await second.close()
    assert await slots(conn) == found.fire
    assert len(found.fire) == 1


async def test_whoever_is_frozen_keeps_nobody_from_firing(dsn: str, conn: asyncpg.Connection) -> None:
    """A fire commits by itself; behind a pooler a commit that does not come is not waited for (IDM-4)."""
    await declare(conn)
    await rewind(conn, HOUR)
    seen, sent = await watched(conn), []
    first, second = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    try:
        first.add_query_logger(lambda record: sent.append(record.query))
        assert await schedules().fire(first, seen, now_due(seen))
        await until(lambda: [query for query in sent if "schedule_fire" in query], what="the logger has heard of it")
        assert not [query for query in sent if query.startswith(("BEGIN", "COMMIT"))], "nothing is left to be sent"
        await rewind(conn, HOUR)
        pooled = Address(dsn)
        pooled.pooled = True
        seen = await watched(conn)
        async with second.transaction():
            assert await Schedules(NamedStatements(Queries("core"), pooled), 0).fire(second, seen, now_due(seen))
            assert await second.fetchval("SHOW idle_in_transaction_session_timeout") == "5s"
        assert await second.fetchval("SHOW idle_in_transaction_session_timeout") == "0"
    finally:
        await first.close()
        await second.close()


# --- what the database refuses ---


async def test_the_database_s_clock_decides_what_is_due(conn: asyncpg.Connection) -> None:
    """A worker whose clock is ahead fires nothing before its time (IDM-4)."""
    await declare(conn)
    seen = await watched(conn)
    ahead = due(seen.timing, "latest", seen.owed_after, seen.looked_at + timedelta(days=1))
    assert len(ahead.fire) == 1
    assert await schedules().fire(conn, seen, ahead) is False
    assert await slots(conn) == []
    assert (await stored(conn))["version"] == seen.version


@pytest.mark.parametrize("wrong", ["past", "twice", "beyond", "next"])
async def test_slots_that_cannot_be_are_refused(conn: asyncpg.Connection, wrong: str) -> None:
    """Whatever a worker works out, a slot is never fired again, nor moved backwards (IDM-4)."""
    await declare(conn)
    since = await rewind(conn, timedelta(hours=3))
    seen = await watched(conn)
    slot = now_due(seen).fire[0]
    later = slot + HOUR
    bad = {
        "past": Due([since], slot, later, False),
        "twice": Due([slot, slot], slot, later, False),
        "beyond": Due([slot], slot - HOUR, later, False),
        "next": Due([slot], slot, slot, False),
    }[wrong]
    with pytest.raises(asyncpg.InvalidParameterValueError, match="the slots of"):
        await schedules().fire(conn, seen, bad)
    assert await slots(conn) == []


# --- declaring ---


async def test_an_unchanged_declaration_disturbs_nobody(conn: asyncpg.Connection) -> None:
    """A fleet that restarts unchanged (IDM-4)."""
    await declare(conn)
    before = await stored(conn)
    assert await declare(conn) == "unchanged"
    assert {**before, "now": None} == {**await stored(conn), "now": None}


async def test_an_older_generation_does_not_overwrite_a_newer_one(dsn: str, conn: asyncpg.Connection) -> None:
    """A worker of the last deployment that restarts; it fires what the newer one has declared (IDM-4, GEN-1)."""
    assert await declare(conn, generation=2, every=timedelta(seconds=1), payload={"by": 2}) == "declared"
    assert await declare(conn, generation=1) == "older"
    facts = Facts()
    async with running(dsn, declaring(payload={"by": 1}), facts, generation=1):
        await until(lambda: _count(conn, 2), what="two slots of the newer declaration")
    assert [notice.details["schedule"] for notice in facts.notices("schedule_superseded")] == [NAME]
    row = await stored(conn)
    assert (row["generation"], row["every"]) == (2, timedelta(seconds=1))
    assert {row[0] for row in await conn.fetch("SELECT payload->>'by' FROM core.outbox")} == {"2"}
    # The generation is gone for good: what it declared is not binding any more.
    await conn.execute("INSERT INTO core.deployments (generation, retired_at) VALUES (2, now())")
    assert await declare(conn, generation=1, payload={"by": 1}) == "declared"
    assert ((await stored(conn))["generation"], (await stored(conn))["every"]) == (1, HOUR)


async def test_a_new_timing_begins_now_and_fires_what_the_old_one_owes(dsn: str, conn: asyncpg.Connection) -> None:
    """The slot that was due when the deployment came is fired; those that the new timing had before are not (IDM-4)."""
    await declare(conn)
    await rewind(conn, timedelta(minutes=90))
    (owed,) = now_due(await watched(conn)).fire
    async with running(dsn, declaring(cron="* * * * *")):
        await until(lambda: _planned(conn), what="its next slot is known")
        await drained(conn)
    found = await slots(conn)
    assert found[0] == owed
    row = await stored(conn)
    assert all(slot > row["declared_at"] for slot in found[1:])
    assert (row["cron"], row["timezone"], row["every"]) == ("* * * * *", "UTC", None)


async def test_a_new_timing_waits_for_what_the_old_one_owes(conn: asyncpg.Connection) -> None:
    """Whoever could not fire it, because somebody else had it locked, must not forget it either (IDM-4)."""
    await declare(conn, missed="all")
    await rewind(conn, timedelta(minutes=200))
    before = await stored(conn)
    assert await declare(conn, force=False, cron="* * * * *") == "owed"
    assert (await stored(conn))["version"] == before["version"]
    seen = await watched(conn)
    owed = now_due(seen).fire
    assert await schedules().fire(conn, seen, now_due(seen))
    assert await declare(conn, force=False, cron="* * * * *") == "declared"
    assert len(owed) >= 3 and await slots(conn) == list(owed)


async def test_a_new_payload_keeps_the_slots(conn: asyncpg.Connection) -> None:
    """Only a timing that changes begins anew (IDM-4)."""
    await declare(conn)
    await rewind(conn, timedelta(hours=2))
    before = await stored(conn)
    assert await declare(conn, payload={"new": True}, missed="all") == "declared"
    after = await stored(conn)
    assert (after["owed_after"], after["next_slot"]) == (before["owed_after"], before["next_slot"])
    assert after["version"] == before["version"] + 1


async def test_an_event_goes_to_the_newest_generation_that_is_served(conn: asyncpg.Connection) -> None:
    """Whichever generation fires it; not to one that serves other channels only (IDM-4, GEN-1)."""
    beat = "SELECT core.worker_beat(gen_random_uuid(), $1, 'host', 1, '1.0', $2, $3, '{reports.send}')"
    await declare(conn)
    expected = []
    for generation, channels, wanted in ((0, [], 0), (3, ["outbox_gen_3"], 3), (9, ["hot"], 3)):
        if channels:
            await conn.execute(beat, f"gen {generation}", generation, channels)
        await rewind(conn, HOUR)
        seen = await watched(conn)
        assert await schedules(0).fire(conn, seen, now_due(seen))
        expected.append((wanted, "outbox_default" if wanted == 0 else f"outbox_gen_{wanted}"))
    rows = await conn.fetch("SELECT generation, channel FROM core.outbox ORDER BY id")
    assert [tuple(row) for row in rows] == expected


@pytest.mark.slow
async def test_a_declaration_that_a_worker_cannot_read_is_left_to_others(dsn: str, conn: asyncpg.Connection) -> None:
    """A zone that this machine does not know; told once, and the other schedules go on (IDM-4)."""
    await declare(conn, generation=1, name="reports.far", cron="* * * * *")
    await conn.execute("UPDATE core.schedules SET timezone = 'Mars/Olympus'")
    registry, facts = declaring(name="reports.far"), Facts()
    registry.schedule("report.due", name="reports.near", every=timedelta(seconds=1))
    async with running(dsn, registry, facts):
        await until(lambda: _count(conn, 3), what="three slots of the other")
    (notice,) = facts.notices("schedule_unreadable")
    assert notice.details["schedule"] == "reports.far"
    assert "Mars/Olympus" in str(notice.details["error"])
    assert await slots(conn, "reports.far") == []


@pytest.mark.slow
async def test_a_schedule_that_cannot_be_fired_stops_no_other(dsn: str, conn: asyncpg.Connection) -> None:
    """Somebody's trigger refuses its event; told once, tried again, and the others go on (IDM-4)."""
    await conn.execute(
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no reports today'; END$$;
           CREATE TRIGGER refuse BEFORE INSERT ON core.outbox FOR EACH ROW
               WHEN (NEW.headers->>'schedule' = 'reports.bad') EXECUTE FUNCTION refuse()"""
    )
    registry, facts = declaring(name="reports.bad", every=timedelta(seconds=1)), Facts()
    registry.schedule("report.due", name="reports.good", every=timedelta(seconds=1))
    async with running(dsn, registry, facts):
        await until(lambda: _count(conn, 2), what="two slots of the other")
        (notice,) = facts.notices("schedule_refused")
        await conn.execute("DROP TRIGGER refuse ON core.outbox")
        fired = "SELECT fired > 0 FROM core.schedules WHERE name = 'reports.bad'"
        await until(lambda: conn.fetchval(fired), what="it is tried again")
        await drained(conn)
    assert (notice.details["schedule"], "no reports today" in str(notice.details["error"])) == ("reports.bad", True)


async def test_a_clock_that_is_set_back_fires_nothing_again(conn: asyncpg.Connection) -> None:
    """Slots that were fired before the database's clock was set back stay fired; the next one is later (IDM-4)."""
    await declare(conn)
    future = "UPDATE core.schedules SET owed_after = now() + interval '5 hours', next_slot = NULL RETURNING owed_after"
    dealt_with = await conn.fetchval(future)
    seen = await watched(conn)
    found = now_due(seen)
    assert (found.fire, found.until) == ([], dealt_with)
    assert await schedules().fire(conn, seen, found)
    assert dealt_with < (await stored(conn))["next_slot"] <= dealt_with + HOUR
    assert await declare(conn, cron="* * * * *") == "declared"
    assert (await stored(conn))["owed_after"] == dealt_with, "nor does another timing bring them back"


async def test_workers_and_operators_need_no_other_right(conn: asyncpg.Connection) -> None:
    """A worker declares, looks and fires by functions alone; an operator changes by functions alone (OBX-2)."""
    await conn.execute("SET ROLE holdfast_worker")
    assert await declare(conn) == "declared"
    await conn.execute("RESET ROLE")
    await rewind(conn, HOUR)
    await conn.execute("SET ROLE holdfast_worker")
    seen = await watched(conn)
    assert await schedules().fire(conn, seen, now_due(seen))
    for denied in ("SELECT * FROM core.schedules", f"SELECT core.schedule_trigger('{NAME}', 'me')"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await conn.execute(denied)
    await conn.execute("SET ROLE holdfast_operator")
    assert await conn.fetchval("SELECT core.schedule_trigger($1, 'me')", NAME)
    assert await conn.fetchval("SELECT after FROM core.schedule_change_state($1, 'pause', 'me')", NAME)
    assert await conn.fetchval("SELECT core.schedule_remove($1, 'me')", NAME) == "declared"
    for denied in ("DELETE FROM core.schedules", "SELECT core.schedule_publish('a.b', '{}', '{}', '{}', 0, NULL)"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await conn.execute(denied)
    await conn.execute("RESET ROLE")
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 2


async def test_a_worker_whose_schedule_is_of_another_role_does_not_start(dsn: str, conn: asyncpg.Connection) -> None:
    """The error names the schedule and what to write; nothing is declared, and nobody takes it for alive (OBX-2)."""
    await conn.execute("INSERT INTO core.sources (source, role_name) VALUES ('reports', 'holdfast_operator')")
    with pytest.raises(ConfigurationError, match=r"reports\.hourly\.source source reports belongs to another role"):
        async with running(f"{dsn}?role=holdfast_worker", declaring()):
            pass
    assert await conn.fetchval("SELECT count(*) FROM core.schedules") == 0
    assert await conn.fetchval("SELECT count(*) FROM core.served_channels()") == 0
    await conn.execute("INSERT INTO core.sources (source, role_name) VALUES ('reports', 'holdfast_worker')")
    async with running(f"{dsn}?role=holdfast_worker", declaring()):
        await until(lambda: _planned(conn), what="its next slot is known")


async def test_a_first_worker_of_a_generation_is_known_before_it_declares(dsn: str, conn: asyncpg.Connection) -> None:
    """Nobody has written down a deployment of its number (GEN-1, IDM-4)."""
    async with running(dsn, declaring(), generation=20260131):
        assert (await stored(conn))["generation"] == 20260131


async def test_cron_is_the_same_in_the_database(conn: asyncpg.Connection) -> None:
    """What was declared is what is read back (IDM-4)."""
    await declare(conn, cron="30 2 * * MON-FRI", timezone="America/New_York")
    assert (await watched(conn)).timing == Cron("30 2 * * MON-FRI", "America/New_York")
