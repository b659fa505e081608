"""Logins that the server refuses for a while are an outage: what is handled is settled when it is over."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import asyncpg
import psycopg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy, Worker, WorkerSettings
from tests.servers import SessionServer
from tests.worker.support import Facts, backends, drained, make_tables, publish_many, running, terminate, until

pytestmark = pytest.mark.trust

LEASE = 1.5
OUTAGE = 2.5  # longer than a lease
EVENTS = 40
# How an administrator keeps a login or a database closed, and opens it again.
FAULTS = {
    "password": ("ALTER ROLE {login} PASSWORD 'another'", "ALTER ROLE {login} PASSWORD 'secret'"),
    "nologin": ("ALTER ROLE {login} NOLOGIN", "ALTER ROLE {login} LOGIN"),
    "no connections": (
        "ALTER DATABASE {database} ALLOW_CONNECTIONS false",
        "ALTER DATABASE {database} ALLOW_CONNECTIONS true",
    ),
    "renamed": ("ALTER DATABASE {database} RENAME TO {database}_x", "ALTER DATABASE {database}_x RENAME TO {database}"),
    "too many": ("ALTER DATABASE {database} CONNECTION LIMIT 0", "ALTER DATABASE {database} CONNECTION LIMIT -1"),
}
END_ALL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"


class Login:
    """A login of its own for a database, which may run workers and write to the tables of the test."""

    def __init__(self, admin: psycopg.Connection[Any], dsn: str) -> None:
        self.admin = admin
        parts = urlsplit(dsn)
        self.database = parts.path.lstrip("/")
        self.name = f"worker_{self.database}"
        self.dsn = urlunsplit(parts._replace(netloc=f"{self.name}:secret@{parts.hostname}:{parts.port}"))
        admin.execute(f"CREATE ROLE {self.name} LOGIN PASSWORD 'secret' IN ROLE holdfast_worker")

    def run(self, statement: str) -> None:
        self.admin.execute(statement.format(login=self.name, database=self.database))


@pytest.fixture
def login(dsn: str, postgres_server: SessionServer) -> Iterator[Login]:
    login = Login(postgres_server.admin(), dsn)
    yield login
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"DROP OWNED BY {login.name}")
    login.admin.execute(f"DROP ROLE {login.name}")


@pytest.mark.slow
@pytest.mark.new_database
@pytest.mark.parametrize("fault", FAULTS)
async def test_refused_logins_are_an_outage(dsn: str, login: Login, fault: str) -> None:
    """No finished handler runs again, no attempt is counted without a run; back within 5 s (LSN-2, LSN-5, T12)."""
    conn = await asyncpg.connect(dsn)
    await make_tables(conn)
    await conn.execute(f"GRANT INSERT ON ledger TO {login.name}")
    plain: Counter[int] = Counter()
    transactional: Counter[UUID] = Counter()
    registry = HandlerRegistry()
    soon = RetryPolicy(strategy="constant", base_delay=0.1)

    @registry.handler("order.placed", name="billing.charge", retry=soon)
    async def charge(event: EventEnvelope) -> None:
        plain[event.payload["n"]] += 1
        await asyncio.sleep(0.05)

    @registry.handler("order.shipped", name="billing.close", retry=soon)
    async def close(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        transactional[event.event_id] += 1
        await asyncio.sleep(0.02)
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])

    await publish_many(conn, "order.placed", EVENTS)
    await publish_many(conn, "order.shipped", EVENTS)
    await conn.close()
    closes, opens = FAULTS[fault]
    facts = Facts()
    async with running(
        login.dsn, registry, facts, lease=LEASE, concurrency=4, connections=2, settle_after=0.2
    ) as worker:
        await until(lambda: sum(plain.values()) >= 3, what="the worker is busy")
        login.run(closes) if fault != "renamed" else None
        login.admin.execute(END_ALL, (login.database,))
        if fault == "renamed":
            login.run("ALTER DATABASE {database} ALLOW_CONNECTIONS false")
            await until(lambda: _closed(login), what="no session is left")
            login.run(closes)
            login.run("ALTER DATABASE {database}_x ALLOW_CONNECTIONS true")
        done = worker.counters.delivered
        await asyncio.sleep(OUTAGE)
        # Two transactions at most had been committed, and their answers were still to come.
        assert worker.counters.delivered <= done + 2
        done = worker.counters.delivered
        login.run(opens)
        opened = time.monotonic()
        await until(lambda: worker.counters.delivered > done, within=5, what="the worker delivers again")
        await until(lambda: worker.counters.delivered >= 2 * EVENTS, what=f"all delivered, {opened=}")
        assert worker.counters.lost_leases == 0
        assert facts.notices("database_unavailable")
    conn = await asyncpg.connect(dsn)
    rows = await conn.fetch("SELECT id, event_type, attempts FROM core.outbox")
    ledger = await conn.fetchval("SELECT count(*) = count(DISTINCT n) AND count(*) = $1 FROM ledger", EVENTS)
    await conn.close()
    assert ledger
    assert plain == dict.fromkeys(range(EVENTS), 1)
    burned = [row for row in rows if row["attempts"] > max(transactional[row["id"]], 1)]
    assert not burned


def _closed(login: Login) -> bool:
    count = "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = %s"
    row = login.admin.execute(count, (login.database,)).fetchone()
    return bool(row["n"] == 0) if row else False


async def test_worker_does_not_claim_again_what_it_has_handled(dsn: str, conn: asyncpg.Connection) -> None:
    """After an outage longer than its leases, the claim is back before the settle: nothing runs again (LSN-3, T12)."""
    seen: Counter[int] = Counter()
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen[event.payload["n"]] += 1

    async with running(dsn, registry, poll_interval=0.5) as worker:
        settle = worker._parts.connections.settle
        async with settle._lock:  # no connection to settle with, for now
            await terminate(conn, "settle")
            await publish_many(conn, "order.placed", 5)
            await until(lambda: len(seen) == 5, what="all handled")
            async with worker._parts.connections.claim._lock:
                for pid in await backends(conn, "claim"):
                    assert await conn.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
                await conn.execute("UPDATE core.outbox SET lease_expires_at = now() - interval '1 s'")
            claims = worker.counters.claims
            await until(lambda: worker.counters.claims > claims + 1, what="the worker claims again")
        await drained(conn)
        assert seen == dict.fromkeys(range(5), 1)
        assert worker.counters.lost_leases == 0


async def test_wrong_password_at_the_start_is_an_answer(dsn: str, login: Login) -> None:
    """A worker that has never been connected says what is wrong, and ends (T12)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None: ...

    login.run("ALTER ROLE {login} PASSWORD 'another'")
    async with asyncio.timeout(5):
        with pytest.raises(asyncpg.InvalidPasswordError):
            await Worker(login.dsn, registry, observers=()).run()


async def test_no_connections_for_slow_handlers(conn: asyncpg.Connection, login: Login) -> None:
    """Where the server allows no more than `connections`, one is left for a handler that has none (LSN-17)."""
    registry, released, done = HandlerRegistry(), asyncio.Event(), Counter[str]()

    @registry.handler("slow.happened", name="slow.call")
    async def call(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        done["slow"] += 1
        await released.wait()

    @registry.handler("fast.happened", name="fast.note")
    async def note(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        done["fast"] += 1

    connections = 4
    limit = WorkerSettings(connections=connections).connections_needed(1)
    login.run(f"ALTER ROLE {{login}} CONNECTION LIMIT {limit}")
    await publish_many(conn, "slow.happened", 20)
    facts = Facts()
    try:
        async with running(login.dsn, registry, facts, connections=connections, grace=0.1) as worker:
            await until(lambda: done["slow"] == connections - 1, what="the slow one has its sessions")
            await publish_many(conn, "fast.happened", 100)
            await until(lambda: done["fast"] == 100, what="the fast one has done its work")
            assert worker.counters.snoozed < 10
            await until(lambda: bool(facts.notices("connections_exhausted")), what="it was said")
            released.set()
    finally:
        released.set()
    await conn.execute("DELETE FROM core.outbox")
