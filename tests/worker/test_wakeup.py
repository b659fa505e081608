"""Waking up: promptly, without polling, whoever sleeps, whoever dies, and without bothering producers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.embedded import EmbeddedPostgres
from tests.servers import SessionServer, apply_schema
from tests.worker.support import (
    Latencies,
    drained,
    insert,
    make_tables,
    missing,
    process,
    publish_many,
    running,
    settled,
    until,
)

CHANNEL = "outbox_default"


class Handled(dict[int, float]):
    """When each event was handled, by its number."""

    def registry(self, event_type: str = "order.placed", name: str = "billing.charge") -> HandlerRegistry:
        registry = HandlerRegistry()

        @registry.handler(event_type, name=name)
        async def handle(event: EventEnvelope) -> None:
            self.setdefault(event.payload["n"], time.perf_counter())

        return registry


async def asleep(conn: asyncpg.Connection) -> None:
    """Wait until a worker sleeps on the channel and no commit is under way."""
    query = "SELECT count(*) >= 2 FROM pg_locks WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'"
    await until(lambda: conn.fetchval(query), what="somebody sleeps")


async def commit(conn: asyncpg.Connection, n: int, event_type: str = "order.placed") -> None:
    await conn.execute(
        "INSERT INTO core.outbox (event_type, source, payload) VALUES ($1, 'shop', jsonb_build_object('n', $2::int))",
        event_type,
        n,
    )


@pytest.fixture
async def bell(dsn: str) -> AsyncIterator[list[str]]:
    """The notifications on the channel, as a session of its own hears them."""
    connection = await asyncpg.connect(dsn)
    heard: list[str] = []
    await connection.add_listener(CHANNEL, lambda *arguments: heard.append(arguments[3]))
    yield heard
    await connection.close()


async def test_sleeping_worker_wakes_at_once(dsn: str, conn: asyncpg.Connection) -> None:
    """Fifty events committed by plain SQL, each handled within 100 ms, with hourly polling (P4, LSN-1)."""
    handled, late = Handled(), Latencies()
    async with running(dsn, handled.registry(), poll_interval=3600) as worker:
        for n in range(50):
            await asleep(conn)
            started = time.perf_counter()
            await commit(conn, n)
            await until(lambda: n in handled, within=5, what=f"event {n}")  # noqa: B023
            late.append(handled[n] - started)
        await drained(conn)
        assert worker.counters.polls == 0
    print(f"commit to handler, asleep: {late}")
    assert late.percentile(0.95) <= 0.1
    assert max(late) <= 0.5


async def test_idle_worker_is_silent(dsn: str, conn: asyncpg.Connection) -> None:
    """A worker that sleeps sends nothing but a ping now and then (LSN-1, P4)."""
    handled = Handled()
    async with running(dsn, handled.registry(), poll_interval=3600) as worker:
        await publish_many(conn, "order.placed", 300)
        await drained(conn)
        await asleep(conn)
        await until(lambda: worker.in_flight == 0, what="everything is settled")
        before = worker.counters.claims
        await asyncio.sleep(2)
        assert worker.counters.claims - before <= 2


@pytest.mark.slow
async def test_idle_workers_need_few_connections(dsn: str, conn: asyncpg.Connection) -> None:
    """Two to claim and to listen; a third for the sleeper and its deputy alone (P4)."""
    sessions = """SELECT count(*) FROM pg_stat_activity
                  WHERE datname = current_database() AND application_name LIKE 'holdfast %'"""
    handled = Handled()
    async with (
        running(dsn, handled.registry()),
        running(dsn, handled.registry()),
        running(dsn, handled.registry()),
    ):
        await asleep(conn)
        await until(lambda: conn.fetchval(f"SELECT ({sessions}) = 8"), within=10, what="what idles is closed")
        started = time.monotonic()
        await insert(conn, "order.placed", '{"n": 1}')
        await drained(conn)
        assert time.monotonic() - started <= 1.0


async def test_the_connection_that_has_settled_stays(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is handled must not depend on whether the server has room for a session (OBX-7)."""
    monkeypatch.setattr("holdfast.worker.settler._UNUSED", 0.5)
    sessions = """SELECT count(*) FROM pg_stat_activity
                  WHERE datname = current_database() AND application_name LIKE 'holdfast settle%'"""
    handled = Handled()
    async with running(dsn, handled.registry()):
        await until(lambda: conn.fetchval(f"SELECT ({sessions}) = 0"), what="one that was not used is closed")
        await insert(conn, "order.placed", '{"n": 1}')
        await drained(conn)
        await asyncio.sleep(1.5)  # longer than one that was not used stays
        assert await conn.fetchval(sessions) == 1


@pytest.mark.slow
async def test_lone_events_at_a_steady_pace(dsn: str, conn: asyncpg.Connection) -> None:
    """Fifty events a second for five seconds, one at a time, are each handled at once: they are no noise (P4)."""
    handled, late = Handled(), Latencies()
    async with running(dsn, handled.registry(), poll_interval=3600):
        await asleep(conn)
        for n in range(250):
            started = time.perf_counter()
            await commit(conn, n)
            await until(lambda: n in handled, within=5, what=f"event {n}")  # noqa: B023
            late.append(handled[n] - started)
            await asyncio.sleep(max(0.0, 0.02 - (time.perf_counter() - started)))
        await drained(conn)
    print(f"commit to handler, 50 events a second: {late}")
    assert late.percentile(0.5) <= 0.03
    assert late.percentile(0.95) <= 0.1
    assert late.percentile(0.99) < 0.25


@pytest.mark.slow
async def test_several_sleepers_on_one_channel(dsn: str, conn: asyncpg.Connection) -> None:
    """One is the sleeper for all of them, and one its deputy; any of them may take the event, and one does (P4)."""
    handled, late = Handled(), Latencies()
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(running(dsn, handled.registry(), poll_interval=3600)) for _ in range(4)
        ]
        for n in range(40):
            await asleep(conn)
            started = time.perf_counter()
            await commit(conn, n)
            await until(lambda: n in handled, within=5, what=f"event {n}")  # noqa: B023
            late.append(handled[n] - started)
        await drained(conn)
        await until(lambda: not any(each.in_flight for each in workers), what="everything is settled")
        await asleep(conn)
        await asyncio.sleep(2)  # each of the others has asked for the post, in vain
        sleepers = "SELECT count(DISTINCT pid), count(*) FROM pg_locks WHERE locktype = 'advisory'"
        assert tuple(await conn.fetchrow(sleepers)) == (2, 3), "the sleeper, and its deputy"
        assert sum(each.counters.delivered for each in workers) == 40
        assert max(each.counters.polls for each in workers) <= 1
    print(f"commit to handler, four asleep: {late}")
    assert late.percentile(0.5) < 0.05
    assert late.percentile(0.95) < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
async def test_no_wake_up_is_lost(dsn: str, conn: asyncpg.Connection, workers: int) -> None:
    """A burst that keeps everybody busy, then one commit at a random moment around their falling asleep.

    Nobody polls and nothing follows: alone, a worker that missed the bell would sleep for an hour (P4).
    """
    handled, late, dice = Handled(), Latencies(), random.Random(workers)
    numbers = itertools.count()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(workers):
            # Claims of a few rows each: it takes several in a row for a worker to count as busy.
            await stack.enter_async_context(running(dsn, handled.registry(), poll_interval=3600, batch=10))
        ends = time.monotonic() + 5
        while time.monotonic() < ends:
            burst = [next(numbers) for _ in range(100)]
            query = "INSERT INTO core.outbox (event_type, source, payload) SELECT 'order.placed', 'shop', "
            await conn.execute(query + "jsonb_build_object('n', n) FROM unnest($1::int[]) AS n", burst)
            await until(lambda: burst[-1] in handled and len(handled) > burst[-1], what="the burst")  # noqa: B023
            await asyncio.sleep(dice.uniform(0, 0.025))
            n = next(numbers)
            started = time.perf_counter()
            await commit(conn, n)
            await until(lambda: n in handled, within=5, what="the event after the burst")  # noqa: B023
            late.append(handled[n] - started)
        await drained(conn)
    print(f"commit to handler while falling asleep, {workers} workers: {late}")
    assert len(late) > 20
    assert max(late) <= 1.5
    assert late.percentile(0.9) <= 0.25


@pytest.mark.slow
async def test_many_producers_and_handlers_on_one_channel(dsn: str, conn: asyncpg.Connection) -> None:
    """Commits at random moments, two workers of one handler and one of another: no event waits for the next (P4)."""
    plain, other = Handled(), Handled()
    committed: dict[int, float] = {}
    ends = time.monotonic() + 6
    numbers = itertools.count()

    async def produce(seed: int) -> None:
        dice = random.Random(seed)
        connection = await asyncpg.connect(dsn)
        while time.monotonic() < ends:
            # From bursts to pauses in which everybody falls asleep; claims take a few milliseconds.
            await asyncio.sleep(dice.choice((0.0, dice.uniform(0, 0.01), dice.uniform(0, 0.1), dice.uniform(0, 0.4))))
            n = next(numbers)
            committed[n] = time.perf_counter()
            await commit(connection, n, "order.placed" if dice.random() < 0.5 else "order.shipped")
        await connection.close()

    async with (
        running(dsn, plain.registry(), poll_interval=3600),
        running(dsn, plain.registry(), poll_interval=3600),
        running(dsn, other.registry("order.shipped", "mail.thank"), poll_interval=3600),
    ):
        await asyncio.gather(*(produce(seed) for seed in range(4)))
        await until(lambda: len(plain) + len(other) == len(committed), within=5, what="every event handled")
        await drained(conn)
    handled = plain | other
    assert missing(committed, list(handled)) == []
    late = Latencies(handled[n] - committed[n] for n in committed)
    print(f"commit to handler, four producers, two handlers: {late}")
    assert max(late) <= 1.5
    assert late.percentile(0.99) <= 0.25


@pytest.mark.slow
async def test_sleeper_is_killed(dsn: str, conn: asyncpg.Connection, bell: list[str]) -> None:
    """An idle worker takes over within 1.5 s; when all are dead, no lock stays and nobody is notified (P4, A1)."""
    settings = {"poll_interval": 3600}
    async with process(dsn, "slow", **settings) as one, process(dsn, "slow", **settings) as two:
        workers = {each.told("worker_started")[0]["worker_id"]: each for each in (one, two)}
        await asleep(conn)
        sleepers = await until(
            lambda: [hint.split()[1] for hint in bell if hint.startswith("asleep ")], what="a worker sleeps"
        )
        await asyncio.sleep(1.5)  # the other one has asked in vain, more than once
        assert len(set(sleepers)) == 1
        sleeper = workers.pop(sleepers[0])
        (heir,) = workers.values()
        sleeper.signal(signal.SIGKILL)
        await sleeper.end()
        started = time.monotonic()
        identity = await insert(conn, "order.placed", '{"seconds": 0.001, "n": 1}')
        await heir.wait_told("handler_started", within=5)
        assert time.monotonic() - started <= 1.5
        await settled(conn, identity)
        await asleep(conn)
        started = time.monotonic()
        await insert(conn, "order.placed", '{"seconds": 0.001, "n": 2}')
        await heir.wait_told("handler_started", times=2, within=5)
        assert time.monotonic() - started <= 1.5
        await drained(conn)
        heir.signal(signal.SIGKILL)
        await heir.end()
    none = "SELECT count(*) = 0 FROM pg_locks WHERE locktype = 'advisory'"
    await until(lambda: conn.fetchval(none), within=5, what="the locks are gone with their holders")
    bell.clear()
    for _ in range(5):
        await insert(conn, "order.placed")
    await conn.execute("SELECT pg_notify($1, 'end')", CHANNEL)
    await until(lambda: "end" in bell, what="the last notification")
    assert bell == ["end"]


@pytest.mark.slow
@pytest.mark.parametrize(("open_for", "beside"), [(3.0, 0), (1.0, 2000)])
async def test_late_commit(dsn: str, conn: asyncpg.Connection, open_for: float, beside: int) -> None:
    """An event published seconds before its commit is handled right after it, below every mark (E4, P4)."""
    handled = Handled()
    producer = await asyncpg.connect(dsn)
    async with running(dsn, handled.registry(), poll_interval=3600):
        await asleep(conn)
        async with producer.transaction():
            await commit(producer, -1)
            opened = time.perf_counter()
            if beside:
                await publish_many(conn, "order.placed", beside)
                await until(lambda: len(handled) == beside, what="what was published meanwhile")
            await asyncio.sleep(max(0.0, open_for - (time.perf_counter() - opened)))
            assert -1 not in handled
            committed = time.perf_counter()
        await until(lambda: -1 in handled, within=5, what="the late event")
        await drained(conn)
    await producer.close()
    print(f"late commit beside {beside} events: {(handled[-1] - committed) * 1000:.1f} ms")
    assert handled[-1] - committed <= 0.5


async def test_two_phase_commit(postgres_server: SessionServer) -> None:
    """A producer that prepares opts out of the bell; one that prepared while nobody slept is waited for (E6)."""
    settings = {"max_prepared_transactions": "5"}
    with EmbeddedPostgres(binaries=postgres_server.binaries, settings=settings) as server:
        dsn = server.create_database("holdfast")
        await asyncio.to_thread(apply_schema, dsn)
        conn, handled = await asyncpg.connect(dsn), Handled()

        # Nobody sleeps yet: the transaction shares the channel's lock until it is committed.
        await conn.execute("BEGIN")
        await commit(conn, 1)
        await conn.execute("PREPARE TRANSACTION 'before'")
        async with running(dsn, handled.registry(), poll_interval=1.0) as worker:
            waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            await until(lambda: conn.fetchval(waits), what="the worker waits for the commit")
            await commit(conn, 2)
            await until(lambda: 2 in handled, within=0.9, what="an event meanwhile")
            await conn.execute("COMMIT PREPARED 'before'")
            await until(lambda: 1 in handled, within=0.9, what="the prepared event")

            # Now somebody sleeps. A pending notification cannot be prepared, which the opt-out is for.
            await asleep(conn)
            await conn.execute("BEGIN")
            await commit(conn, 3)
            with pytest.raises(asyncpg.FeatureNotSupportedError):
                await conn.execute("PREPARE TRANSACTION 'loud'")
            await conn.execute("BEGIN")
            await conn.execute("SET LOCAL holdfast.notify = 'off'")
            await commit(conn, 4)
            await conn.execute("PREPARE TRANSACTION 'silent'")
            polls = worker.counters.polls
            await conn.execute("COMMIT PREPARED 'silent'")
            await until(lambda: 4 in handled, within=2.0, what="the silent event, by polling")
            assert worker.counters.polls > polls
            await drained(conn)
        assert sorted(handled) == [1, 2, 4]
        await conn.close()


@pytest.mark.slow
async def test_busy_workers_are_not_rung_for(dsn: str, conn: asyncpg.Connection, bell: list[str]) -> None:
    """Eight producers beside a busy worker send fewer than one notification for twenty events (B17)."""
    await make_tables(conn)
    producers, each = 8, 200

    async def produce(number: int) -> None:
        connection = await asyncpg.connect(dsn)
        for n in range(each):
            async with connection.transaction():
                await connection.execute("INSERT INTO outside (n) VALUES ($1)", n)
                await commit(connection, number * each + n)
        await connection.close()

    async with process(dsn, "steady", concurrency=2):
        await asleep(conn)
        # So many that the worker is busy from the first to the last, however slow the producers are on this machine.
        await publish_many(conn, "order.placed", producers * each)
        bell.clear()
        await asyncio.gather(*map(produce, range(producers)))
        heard = len(bell)
        await drained(conn, within=60)
    events = producers * each
    print(f"{heard} notifications for {events} events: {heard / events:.4f} per event")
    assert heard / events < 0.05


async def test_flood_of_notifications(dsn: str, conn: asyncpg.Connection) -> None:
    """Anybody can notify; nonsense costs a look in 50 ms at most, and real events are still handled (S6)."""
    handled = Handled()
    async with running(dsn, handled.registry(), poll_interval=3600) as worker:
        await asleep(conn)
        before, started = worker.counters.claims, time.monotonic()
        while time.monotonic() - started < 2:
            await conn.execute(
                "SELECT pg_notify('outbox_default', hint || n) FROM generate_series(1, 20) AS n, "
                "unnest(ARRAY['nonsense', 'rescan ', 'cancel ', 'cancel not-an-id ', 'asleep ', 'awake ']) AS hint"
            )
            await asyncio.sleep(0.001)
        elapsed = time.monotonic() - started
        # The first twenty of a second are answered at once.
        assert worker.counters.claims - before <= 20 + 25 * elapsed
        await commit(conn, 1)
        await until(lambda: 1 in handled, within=5, what="a real event")
        await drained(conn)
