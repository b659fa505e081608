"""The database's clock is set while events are open: no delivery overlaps, none is left behind (LSN-3, T14)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, Operator, Retry
from holdfast.errors import ConfigurationError
from holdfast.operator import Refused
from holdfast.postgres.clock import DatabaseClock, steady
from tests.outbox import HANDLER, LANE, InFlight, Lane, Outbox
from tests.outbox import connect as outbox_connect
from tests.servers import SessionServer
from tests.worker.schedules import slots
from tests.worker.stepping import SteppingServer, stepping_server
from tests.worker.support import insert, publish, running, settled, until

pytestmark = pytest.mark.trust

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def stepping(postgres_server: SessionServer) -> Iterator[SteppingServer]:
    with stepping_server(postgres_server) as server:
        yield server


@pytest.fixture
async def sessions(stepping: SteppingServer) -> AsyncIterator[list[asyncpg.Connection]]:
    opened = [await asyncpg.connect(stepping.dsn) for _ in range(2)]
    yield opened
    for connection in opened:
        await connection.close()


@pytest.fixture
async def outbox(dsn: str) -> AsyncIterator[Outbox]:
    connection = await outbox_connect(dsn)
    outbox = Outbox(connection)
    await outbox.subscribe(HANDLER, "order.placed")
    yield outbox
    await connection.close()


# --- whole workers, with a server whose clock is set ---


@pytest.mark.slow
@pytest.mark.parametrize("step", ["+2h", "-1h", "+10y", "-10y"])
async def test_deliveries_survive_a_step(
    stepping: SteppingServer, sessions: list[asyncpg.Connection], step: str
) -> None:
    """A live lease is kept, a dead one ends, what is due at once is, a retry comes, slots once (LSN-3, T14)."""
    registry, runs = HandlerRegistry(), list[str]()
    finish = asyncio.Event()

    @registry.handler("order.slow", name="billing.slow")
    async def slow(event: EventEnvelope) -> None:
        runs.append("slow")
        await finish.wait()

    @registry.handler("order.retried", name="billing.retried")
    async def retried(event: EventEnvelope, context: HandlerContext) -> Retry | None:
        runs.append("retried")
        return Retry(3.0) if context.attempt == 1 else None

    @registry.handler("order.placed", name="billing.placed")
    async def placed(event: EventEnvelope) -> None:
        runs.append("placed")

    registry.schedule("order.placed", name="orders.tick", every=timedelta(seconds=1))
    conn, producer = sessions
    kept = await conn.fetchval(
        """INSERT INTO core.outbox (event_type, source, payload, status, delivered_at, settled_at, handler_name)
           VALUES ('order.placed', 'shop', '{}', 'delivered', now(), now(), 'billing.placed') RETURNING id"""
    )
    abandoned = await insert(conn, "order.placed")
    await conn.execute(
        """UPDATE core.outbox SET status = 'in_flight', attempts = 1, claimed_by = gen_random_uuid(),
               lease_token = gen_random_uuid(), lease_expires_at = now() + interval '2 seconds' WHERE id = $1""",
        abandoned,
    )
    options = {"lease": 4.0, "poll_interval": 0.2, "concurrency": 5}
    async with (
        running(stepping.dsn, registry, **options, grace=1.0) as one,
        running(stepping.dsn, registry, **options, grace=1.0) as other,
    ):
        await publish(conn, "order.slow")
        failing = await publish(conn, "order.retried")
        await until(lambda: {"slow", "retried"} <= set(runs), what="both have begun")
        clocks = [worker._parts.shared.deliveries.clock for worker in (one, other)]
        await until(lambda: all(clock.ended_before() for clock in clocks), what="both know the clock")
        transaction = producer.transaction()
        await transaction.start()
        undelayed = await insert(producer, "order.placed")  # due at the time before the step
        stepping.set(step)
        await transaction.commit()
        await settled(conn, undelayed, within=8)
        await settled(conn, failing, within=8)
        await settled(conn, abandoned, within=8)
        assert runs.count("slow") == 1, "a live lease was taken for ended"
        finish.set()
        await until(lambda: conn.fetchval("SELECT count(*) FROM core.clock_steps"), what="the step is recorded")
        assert await conn.fetchval("SELECT count(*) FROM core.clock_steps") == 1, "by one worker"
        assert one.counters.lost_leases + other.counters.lost_leases == 0
    assert runs.count("slow") == 1
    assert await conn.fetchval("SELECT deleted_at FROM core.outbox WHERE id = $1", kept) is None
    await slots(conn, "orders.tick")  # each once
    async with Operator(stepping.dsn, actor="tests") as operator:
        found = [finding for finding in (await operator.doctor("health")).findings if finding.code == "clock-stepped"]
    assert [finding.severity for finding in found] == ["warning"]


@pytest.mark.slow
async def test_a_step_back_while_no_worker_lives(stepping: SteppingServer, sessions: list[asyncpg.Connection]) -> None:
    """What a dead worker held and what was due is delivered by the worker that starts after the step (LSN-3, T14)."""
    registry, runs = HandlerRegistry(), list[UUID]()

    @registry.handler("order.placed", name="billing.placed")
    async def placed(event: EventEnvelope) -> None:
        runs.append(event.event_id)

    conn, _ = sessions
    gone = uuid4()
    await conn.execute("SELECT core.worker_beat($1, 'shop:1', 'shop', 1, '1', 0, '{outbox_default}', '{}')", gone)
    await conn.execute("SELECT core.worker_alive($1, interval '2 seconds')", gone)
    held, due = await insert(conn, "order.placed"), await insert(conn, "order.placed")
    await conn.execute(
        """UPDATE core.outbox SET status = 'in_flight', attempts = 1, claimed_by = $2,
               lease_token = gen_random_uuid(), lease_expires_at = now() + interval '2 seconds' WHERE id = $1""",
        held,
        gone,
    )
    stepping.set("-1h")
    async with Operator(stepping.dsn, actor="ada") as operator:
        (listed,) = await operator.workers.all()
        assert not listed.living, "its heartbeat lies an hour ahead"
        assert (await operator.workers.release(gone, dry_run=True)).released == 1, "the remedy that doctor names works"
    async with running(stepping.dsn, registry, lease=2.0, poll_interval=0.2):
        await settled(conn, due, within=10)
        await settled(conn, held, within=15)
        assert sorted(runs) == sorted([held, due])
    (step,) = await conn.fetch("SELECT extract(epoch FROM step)::int AS step FROM core.clock_steps")
    assert -3600 <= step["step"] < -3500
    await conn.execute("SELECT core.worker_alive($1, interval '2 seconds')", gone)
    assert await conn.fetchval("SELECT core.clock_unrecorded()") is None


# --- the worker's reckoning ---


def test_a_step_forward_does_not_end_leases() -> None:
    """For the longest lease time in the fleet the worker goes by the clock before the step (LSN-3)."""
    clock, now = DatabaseClock(30.0), steady()
    assert clock.ended_before() is None
    clock.observe(NOON - timedelta(seconds=61), now - 61.002, now - 61)
    clock.observe(NOON + timedelta(hours=2), now - 0.002, now, longest_lease=60)
    assert _near(clock.ended_before(), NOON)
    assert [round(step) for step in clock.steps] == [7200]


def test_after_a_lease_time_the_step_counts() -> None:
    clock, now = DatabaseClock(30.0), steady()
    clock.observe(NOON - timedelta(seconds=70), now - 70.002, now - 70)
    clock.observe(NOON + timedelta(hours=2, seconds=-31), now - 31.002, now - 31)
    assert _near(clock.ended_before(), NOON + timedelta(hours=2))


def test_a_step_back_counts_at_once() -> None:
    clock, now = DatabaseClock(30.0), steady()
    clock.observe(NOON, now - 0.004, now - 0.002)
    clock.observe(NOON - timedelta(hours=1), now - 0.002, now)
    assert _near(clock.ended_before(), NOON - timedelta(hours=1))
    assert [round(step) for step in clock.steps] == [-3600]


@pytest.mark.parametrize("width", [0.002, 9.0])
def test_a_slow_answer_is_no_step(width: float) -> None:
    clock, now = DatabaseClock(30.0), steady()
    clock.observe(NOON - timedelta(seconds=10), now - 10 - width, now - 10)
    clock.observe(NOON + timedelta(seconds=0.9), now - 0.002, now)
    clock.observe(NOON + timedelta(seconds=4), now, now + 8)
    assert not clock.steps


def _near(found: datetime | None, wanted: datetime) -> bool:
    return found is not None and abs(found - wanted) < timedelta(seconds=5)


# --- in SQL ---


async def test_the_claim_goes_by_the_earlier_time(outbox: Outbox) -> None:
    """A lease has ended when it has by the database's clock and by the worker's reckoning (LSN-3)."""
    (held,) = await _held(outbox)
    await outbox.expire_lease(held.id)
    long_ago = datetime.now(UTC) - timedelta(hours=2)
    assert await outbox.claim(Lane(LANE), ended_before=long_ago) == []
    assert len(await outbox.claim(Lane(LANE), ended_before=datetime.now(UTC) + timedelta(hours=1))) == 1


async def test_times_of_workers_move_with_a_step_back(outbox: Outbox) -> None:
    """Retries and snoozes move once, however many workers see the step; a producer's own time stays (T14)."""
    conn = outbox.connection
    snoozed, retried, held = await _held(outbox, 3)
    delayed = await outbox.insert(available_at=datetime.now(UTC) + timedelta(minutes=90))
    await outbox.release(snoozed, delay=5400)
    await outbox.retry(retried, delay=5400, error="one")
    hour, lease = timedelta(hours=1), timedelta(seconds=30)
    await conn.execute("UPDATE core.clock SET latest = clock_timestamp() + interval '1 hour'")  # what a heartbeat saw
    for _ in range(2):
        await outbox.call("clock_stepped", worker=uuid4(), by=-hour, lease=lease)
    ahead = {
        row["id"]: row["ahead"] for row in await conn.fetch("SELECT id, available_at - now() AS ahead FROM core.outbox")
    }
    assert timedelta(minutes=29) < ahead[snoozed.id] < timedelta(minutes=31)
    assert timedelta(minutes=29) < ahead[retried.id] < timedelta(minutes=31)
    assert ahead[delayed] > timedelta(minutes=89)
    # A lease further ahead than any can be, and an event that was due at once.
    await conn.execute(
        "UPDATE core.outbox SET lease_expires_at = lease_expires_at + interval '2 hours' WHERE id = $1", held.id
    )
    due = await outbox.insert()
    await conn.execute(
        "UPDATE core.outbox SET created_at = now() + interval '1 hour', available_at = now() + interval '1 hour' "
        "WHERE id = $1",
        due,
    )
    assert (await outbox.call("clock_repair", most=10))[0][0] == 2
    assert (await outbox.call("clock_repair", most=10))[0][0] == 0
    assert (await outbox.row(due))["available_at"] < datetime.now(UTC) + timedelta(minutes=1)
    assert (await outbox.row(held.id))["lease_expires_at"] < datetime.now(UTC) + timedelta(minutes=61)


async def test_a_jump_back_waits_to_be_recorded(outbox: Outbox) -> None:
    """Also while no worker lives for a time; a clock that was set right again leaves nothing to repair (T14)."""
    conn, alive = outbox.connection, "SELECT core.worker_alive(gen_random_uuid(), interval '30 seconds')"
    unrecorded = "SELECT core.clock_unrecorded()"
    assert await conn.fetchval(unrecorded) is None
    await conn.execute("UPDATE core.clock SET latest = clock_timestamp() + interval '1 hour'")
    await conn.execute(alive)
    await conn.execute("UPDATE core.clock SET latest = clock_timestamp() - interval '10 minutes'")
    await conn.execute(alive)
    assert -3601 < await conn.fetchval(unrecorded) < -3590
    await conn.execute("UPDATE core.clock SET latest = clock_timestamp() - interval '1 hour'")
    await conn.execute(alive)
    assert await conn.fetchval(unrecorded) is None


async def test_nothing_is_deleted_early(conn: asyncpg.Connection) -> None:
    """After +10 years workers do not sweep, and an idempotency record is kept as long as was promised (T14)."""
    begin = "SELECT core.idempotency_begin('tenant', 'key', ARRAY['hash'], 1, interval '1 hour', 2000, NULL)"
    assert await conn.fetchval(begin) is None
    await conn.execute("UPDATE core.sweeps SET finished_at = now() - interval '1 day'")
    await conn.execute(
        "UPDATE core.idempotency_records SET created_at = now() - interval '10 years', "
        "expires_at = now() - interval '10 years' + interval '1 hour'"
    )
    sweep = "SELECT core.sweep_acquire(gen_random_uuid(), interval '10 minutes', $1)"
    await conn.execute("UPDATE core.clock SET latest = clock_timestamp() - interval '10 years'")  # what a heartbeat saw
    await conn.execute("SELECT core.clock_stepped(gen_random_uuid(), interval '10 years', interval '30 seconds')")
    assert json.loads(await conn.fetchval(begin))["outcome"] == "unfinished"
    assert await conn.fetchval(sweep, False) is None
    assert await conn.fetchval(sweep, True) is not None, "an operator may"


@pytest.mark.parametrize("shown", [timedelta(0), timedelta(minutes=1), -timedelta(minutes=1)])
async def test_a_step_that_only_one_worker_tells_of_is_not_believed(outbox: Outbox, shown: timedelta) -> None:
    """The database has its own evidence; neither sweeps nor delays follow a worker that makes a step up (SEC-1)."""
    conn = outbox.connection
    (retried,) = await _held(outbox, 1)
    await outbox.retry(retried, delay=5400, error="one")
    due = (await outbox.row(retried.id))["available_at"]
    await conn.execute("UPDATE core.sweeps SET finished_at = now() - interval '1 day'")
    await conn.execute("SELECT core.worker_alive(gen_random_uuid(), interval '30 seconds')")
    await conn.execute("UPDATE core.clock SET latest = clock_timestamp() - $1::interval", shown)
    for years in (900, -900):
        step = timedelta(days=365 * years)
        for _ in range(3):
            (told,) = await outbox.call("clock_stepped", worker=uuid4(), by=step, lease=timedelta(seconds=30))
            assert told[0] is False
    assert (await outbox.row(retried.id))["available_at"] == due
    assert await conn.fetchval("SELECT count(*) FROM core.clock_steps") == 0
    assert await conn.fetchval("SELECT core.sweep_acquire(gen_random_uuid(), interval '10 minutes', false)") is not None


async def test_a_transaction_that_stays_open_makes_no_step(dsn: str, outbox: Outbox) -> None:
    """Nor does one that holds the row hold up another worker's heartbeat (SEC-1)."""
    old = await asyncpg.connect(dsn)
    transaction = old.transaction()
    await transaction.start()
    began = await old.fetchval("SELECT now()")
    await outbox.connection.execute("UPDATE core.clock SET latest = clock_timestamp() - interval '5 seconds'")
    await until(lambda: datetime.now(UTC) - began > timedelta(seconds=1.5))
    alive = "SELECT core.worker_alive(gen_random_uuid(), interval '30 seconds')"
    await old.execute(alive)
    await asyncio.wait_for(outbox.connection.execute(alive), 5)
    await transaction.commit()
    await old.close()
    assert await outbox.value("SELECT jumped_at FROM core.clock") == await outbox.value(
        "SELECT '-infinity'::timestamptz"
    )


async def test_the_largest_number_of_attempts(outbox: Outbox) -> None:
    """A row whose attempts are at the maximum does not stop its lane (T28)."""
    conn = outbox.connection
    first, second = await outbox.insert(), await outbox.insert(event_version=2**31 - 1)
    await conn.execute("UPDATE core.outbox SET attempts = 2147483647 WHERE id = $1", first)
    claimed = {row["id"]: row["attempts"] for row in await outbox.claim(Lane(LANE))}
    assert claimed == {first: 2**31 - 1, second: 1}


# --- for people ---


@pytest.mark.parametrize("heard", [timedelta(minutes=-5), timedelta(hours=1)], ids=["long ago", "before a step back"])
async def test_an_operator_releases_what_a_worker_holds(dsn: str, outbox: Outbox, heard: timedelta) -> None:
    """Fenced, audited, no attempt counted, off the list; refused while the worker lives."""
    conn = outbox.connection
    worker = uuid4()
    held = await _held(outbox, 2, worker=worker)
    other = (await _held(outbox, 1))[0]
    beat = "SELECT core.worker_beat($1, 'shop:1', 'shop', 1, '1', 0, '{outbox_default}', '{}')"
    await conn.execute(beat, worker)
    async with Operator(dsn, actor="ada") as operator:
        with pytest.raises(Refused, match=r"was heard of -?\d+ s ago"):
            await operator.workers.release(worker)
        await conn.execute("UPDATE core.workers SET heartbeat_at = now() + $1", heard)
        assert (await operator.workers.release(worker, dry_run=True)).released == 2
        assert await outbox.states(*(each.id for each in held)) == ["in_flight", "in_flight"]
        done = await operator.workers.release(worker, reason="the machine is gone")
        with pytest.raises(ConfigurationError, match="is unknown"):  # it is off the list
            await operator.workers.release(worker)
    assert (done.released, done.left) == (2, 0)
    assert await outbox.states(*(each.id for each in held), other.id) == ["pending", "pending", "in_flight"]
    assert {(await outbox.row(each.id))["attempts"] for each in held} == {0}
    assert len(await outbox.deliver(*held)) == 2, "its tokens settle nothing"
    lines = await conn.fetch("SELECT action, reason, counts FROM core.audit ORDER BY id")
    assert [line["action"] for line in lines] == ["worker.release"] * 2
    assert (lines[1]["reason"], lines[1]["counts"]) == ("the machine is gone", {"moved": 2})


async def test_doctor_names_leases_far_ahead(dsn: str, outbox: Outbox) -> None:
    """A lease beyond any lease, with the command that releases it (T14)."""
    conn = outbox.connection
    worker = uuid4()
    (held,) = await _held(outbox, worker=worker)
    await conn.execute("UPDATE core.outbox SET lease_expires_at = now() + interval '3 hours' WHERE id = $1", held.id)
    async with Operator(dsn, actor="ada") as operator:
        report = await operator.doctor("health")
    (finding,) = [finding for finding in report.findings if finding.code == "clock-stepped"]
    assert finding.severity == "problem"
    assert f"holdfast workers release {worker}" in finding.remedy


async def _held(outbox: Outbox, count: int = 1, *, worker: UUID | None = None) -> list[InFlight]:
    for _ in range(count):
        await outbox.insert()
    return await outbox.hold(worker=worker)
