"""Connections that break and databases that go away: the worker comes back by itself, and nothing is lost."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Worker, WorkerSettings
from holdfast.embedded import EmbeddedPostgres
from holdfast.errors import SchemaMismatch
from tests.worker.proxies import proxied
from tests.worker.support import (
    Facts,
    drained,
    effects,
    insert,
    make_tables,
    missing,
    publish,
    running,
    settled,
    terminate,
    until,
)


def counting(seen: list[int]) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.payload.get("n", 0))

    return registry


async def asleep(conn: asyncpg.Connection) -> None:
    """Wait until a worker sleeps on the channel."""
    query = "SELECT count(*) >= 2 FROM pg_locks WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'"
    await until(lambda: conn.fetchval(query), what="the worker sleeps")


async def test_listener_is_killed(dsn: str, conn: asyncpg.Connection) -> None:
    """With hourly polling the next event is there within five seconds; one reconnect is counted (B1, LSN-2, P4)."""
    seen: list[int] = []
    async with running(dsn, counting(seen), poll_interval=3600) as worker:
        await asleep(conn)
        assert worker.listening
        assert await terminate(conn, "listen") == 1
        identity = await insert(conn, "order.placed")
        await settled(conn, identity, within=5)
        await until(lambda: worker.listening, within=5, what="it listens again")
        assert worker.counters.listen_reconnects == 1
        await asleep(conn)
        started = time.monotonic()
        await settled(conn, await insert(conn, "order.placed"), within=5)
        assert time.monotonic() - started < 0.5


@pytest.mark.parametrize("purpose", ["sleeper", "claim", "settle", "leases", "maintenance", "handler"])
async def test_any_one_connection_is_killed(dsn: str, conn: asyncpg.Connection, purpose: str) -> None:
    """Whichever it is, the next event is there within five seconds, without polling, exactly once (B1, LSN-2)."""
    await make_tables(conn)
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])

    @registry.handler("order.shipped", name="billing.close")
    async def close(event: EventEnvelope) -> None: ...

    released = asyncio.Event()

    @registry.handler("order.held", name="billing.hold")
    async def hold(event: EventEnvelope) -> None:
        await released.wait()

    async with running(dsn, registry, poll_interval=3600, lease=1.5):
        # So that each connection is there.
        await settled(conn, await publish(conn, "order.placed", {"n": 0}))
        await settled(conn, await publish(conn, "order.shipped"))
        if purpose == "leases":  # which are extended while something is in flight
            await publish(conn, "order.held")
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE $1"
        await until(lambda: conn.fetchval(query, f"holdfast {purpose}%"), what=f"the {purpose} connection is open")
        await asleep(conn)
        assert await terminate(conn, purpose) >= 1
        for n, event_type in enumerate(("order.placed", "order.shipped"), start=1):
            await settled(conn, await publish(conn, event_type, {"n": n}), within=5)
        released.set()
    assert await effects(conn) == [0, 1]


@pytest.mark.slow
async def test_all_connections_are_killed_again_and_again(dsn: str, conn: asyncpg.Connection) -> None:
    """Nothing lost, transactional effects once, and never more connections than promised (B2, P1, P2)."""
    await make_tables(conn)
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])
        await asyncio.sleep(0.005)

    settings = {"connections": 4, "lease": 2.0, "poll_interval": 0.5}
    limit = WorkerSettings(**settings).connections_needed(1)
    most, n = 0, 0
    async with running(dsn, registry, facts, **settings):
        for _ in range(8):
            kill = time.monotonic() + 0.5
            while time.monotonic() < kill:
                await publish(conn, "order.placed", {"n": n})
                n += 1
                await asyncio.sleep(0.005)
            alive = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'holdfast %'"
            most = max(most, await conn.fetchval(alive))
            await terminate(conn)
        await drained(conn, within=15)
    assert facts.notices("database_unavailable"), "no kill was noticed"
    assert missing(range(n), await effects(conn)) == []
    assert await effects(conn) == list(range(n))
    assert most <= limit
    assert await conn.fetchval("SELECT count(*) FROM core.failed") == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_server_restarts(own_server: EmbeddedPostgres, own_dsn: str, mode: str) -> None:
    """The worker outlives it and claims within five seconds after the server accepts connections (B6, P7)."""
    seen: list[int] = []
    facts = Facts()
    async with running(own_dsn, counting(seen), facts, poll_interval=3600) as worker:
        for n in range(2):
            conn = await asyncpg.connect(own_dsn)
            await publish(conn, "order.placed", {"n": 2 * n})
            await drained(conn)
            await conn.close()
            await asyncio.to_thread(own_server.restart, mode)
            accepted = time.monotonic()
            conn = await asyncpg.connect(own_dsn)
            await publish(conn, "order.placed", {"n": 2 * n + 1})
            await until(lambda: 2 * n + 1 in seen, what="the event after the restart")  # noqa: B023
            assert time.monotonic() - accepted <= 5
            await drained(conn)
            await conn.close()
            await until(lambda: worker.listening, what="it listens again")
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.slow
async def test_long_outage(own_server: EmbeddedPostgres, own_dsn: str) -> None:
    """After nine seconds without a server the first claim is still made within five; attempts are paced (P7, B6)."""
    seen: list[int] = []
    facts = Facts()
    async with proxied(own_dsn) as (proxy, through), running(through, counting(seen), facts, poll_interval=3600):
        conn = await asyncpg.connect(own_dsn)
        await asleep(conn)
        identity = await publish(conn, "order.placed", {"n": 1}, delay=1.0)
        await conn.close()
        await asyncio.to_thread(own_server.kill)
        down = time.monotonic()
        before = len(proxy.attempts)
        await asyncio.sleep(9)
        # However many loops there are.
        assert len(proxy.attempts) - before <= time.monotonic() - down + 1
        await asyncio.to_thread(own_server.start)
        accepted = time.monotonic()
        await until(lambda: seen, what="the first event after the outage")
        assert time.monotonic() - accepted <= 5
        conn = await asyncpg.connect(own_dsn)
        await settled(conn, identity)
        # Until the listener is back as well, the worker looks for itself.
        await publish(conn, "order.placed", {"n": 2})
        await until(lambda: 2 in seen, within=2.5, what="an event while nobody listens yet")
        await drained(conn)
        await until(lambda: facts.notices("database_back"), within=10, what="all loops are over it")
        await conn.close()
    # Each outage is told once, by whoever met it first, and once more when the last one is over it.
    assert len(facts.notices("database_unavailable")) == len(facts.notices("database_back")) == 1


async def test_server_is_down_at_the_start(own_server: EmbeddedPostgres, own_dsn: str) -> None:
    """The worker waits for the database, says so once, and then works (LSN-2)."""
    await asyncio.to_thread(own_server.kill)
    seen: list[int] = []
    facts = Facts()
    worker = Worker(own_dsn, counting(seen), WorkerSettings(), observers=(facts.append,))
    run = asyncio.create_task(worker.run())
    try:
        await until(lambda: facts.notices("database_unavailable"), what="it says that there is no database")
        assert not facts.notices("worker_started")
        await asyncio.to_thread(own_server.start)
        conn = await asyncpg.connect(own_dsn)
        await publish(conn, "order.placed", {"n": 1})
        await until(lambda: seen == [1], what="it works")
        await drained(conn)
        await conn.close()
        assert len([n for n in facts.notices("database_unavailable") if n.details["loop"] == "start"]) == 1
    finally:
        worker.stop()
        await run


@pytest.mark.slow
async def test_half_open_connections(dsn: str, conn: asyncpg.Connection) -> None:
    """Lines on which nothing comes any more are found out within fifteen seconds (LSN-2, B3, P4)."""
    seen: list[int] = []
    async with proxied(dsn) as (proxy, through), running(through, counting(seen)) as worker:
        await settled(conn, await publish(conn, "order.placed", {"n": 0}))
        await asleep(conn)
        assert proxy.freeze() >= 5
        frozen = time.monotonic()
        await publish(conn, "order.placed", {"n": 1})
        await until(lambda: 1 in seen, within=20, what="the event behind the dead lines")
        assert time.monotonic() - frozen <= 15
        await until(lambda: worker.listening and worker.counters.listen_reconnects, within=15, what="it listens")
        await drained(conn)
    assert seen == [0, 1]


async def test_without_notifications(dsn: str, conn: asyncpg.Connection) -> None:
    """With the bell taken away, polling alone delivers within its interval (LSN-2)."""
    await conn.execute("ALTER TABLE core.outbox DISABLE TRIGGER outbox_bell")
    seen: list[int] = []
    async with running(dsn, counting(seen), poll_interval=0.5) as worker:
        await asleep(conn)
        for n in range(3):
            started = time.monotonic()
            await publish(conn, "order.placed", {"n": n})
            await until(lambda: n in seen, within=5, what="the event")  # noqa: B023
            assert time.monotonic() - started < 0.5 + 0.5
        assert worker.counters.polls >= 1


async def test_without_listening(dsn: str, conn: asyncpg.Connection) -> None:
    """Listen=False needs four connections, leaves the bell alone, and polls (LSN-2, OBX-7)."""
    seen: list[int] = []
    async with running(dsn, counting(seen), poll_interval=0.3, listen=False) as worker:
        await publish(conn, "order.placed", {"n": 1})
        await until(lambda: seen, within=2, what="the event")
        await until(lambda: worker.counters.polls >= 2, what="it polls")
        assert await conn.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
        opened = await conn.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'holdfast %'")
        assert opened <= WorkerSettings(listen=False).connections_needed(0) == 4


async def test_listener_has_a_dsn_of_its_own_that_fails(dsn: str, conn: asyncpg.Connection) -> None:
    """While the listening connection stays down, events are found by polling, at five seconds or less (LSN-2,
    OBX-7).
    """
    seen: list[int] = []
    async with proxied(dsn) as (proxy, through):
        proxy.refusing = True
        async with running(dsn, counting(seen), poll_interval=3600, listen_dsn=through) as worker:
            started = time.monotonic()
            await publish(conn, "order.placed", {"n": 1})
            await until(lambda: 1 in seen, within=6, what="the first event")
            await publish(conn, "order.placed", {"n": 2})
            await until(lambda: 2 in seen, within=6, what="the second event")
            assert time.monotonic() - started <= 10
            assert not worker.listening
            proxy.refusing = False
            await until(lambda: worker.listening, within=35, what="it listens")


async def test_table_is_locked_for_a_moment(dsn: str, conn: asyncpg.Connection) -> None:
    """Statements that run into their time limit are sent again; no event fails by it (B11)."""
    seen: list[int] = []
    facts = Facts()
    async with running(dsn, counting(seen), facts, lease=0.6, poll_interval=0.1):
        await publish(conn, "order.placed", {"n": 0})
        await until(lambda: seen, what="it works")
        async with conn.transaction():
            await conn.execute("LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE")
            await asyncio.sleep(1)
        await publish(conn, "order.placed", {"n": 1})
        await until(lambda: 1 in seen, what="it works again")
        await drained(conn)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 2


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
async def test_isolation_of_the_database(dsn: str, conn: asyncpg.Connection, level: str) -> None:
    """Whatever the database's default isolation is, everything works (B13)."""
    await make_tables(conn)
    await conn.execute(
        f"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = ''{level}''', "
        "current_database()); END $$"
    )
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])

    facts = Facts()
    async with running(dsn, registry, facts, lease=1.0) as one, running(dsn, registry, facts, lease=1.0) as two:
        for n in range(100):
            await publish(conn, "order.placed", {"n": n})
        await drained(conn)
        assert one.counters.retried + two.counters.retried == 0
    assert await effects(conn) == list(range(100))


async def test_schema_is_missing(empty_dsn: str) -> None:
    """The error names the command, and no connection stays behind (OBX-3)."""
    with pytest.raises(SchemaMismatch, match="holdfast migrate apply") as caught:
        async with running(empty_dsn, counting([])):
            pass
    assert "not installed" in caught.value.found


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (
            "DROP TABLE core.contract",
            "holdfast migrate apply",
        ),
        (
            "UPDATE core.contract SET provides = provides + 2, oldest_code = provides + 1, oldest_release = '9.0.0'",
            "install holdfast-outbox 9.0.0 or later, from a checkout or a wheel of it",
        ),
    ],
    ids=["older", "newer"],
)
async def test_schema_of_another_version(dsn: str, conn: asyncpg.Connection, change: str, remedy: str) -> None:
    """A worker refuses a schema that it was not written for, and says what to do (OBX-3)."""
    await conn.execute(change)
    with pytest.raises(SchemaMismatch) as caught:
        await Worker(dsn, counting([])).run()
    assert caught.value.remedy == remedy
    with suppress(SchemaMismatch):
        async with running(dsn, counting([])):
            pytest.fail("it started")
