"""What one transactional handler leaves in its database session does not reach the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy
from holdfast.handling.sessions import Session, terminate
from tests.worker.support import publish, running, settled, until

pytestmark = pytest.mark.trust

# What a handler does to its session, and what its successor asks to find out whether it still is as new.
LEAKS = {
    "role": ("SET ROLE holdfast_operator", "SELECT current_user = session_user"),
    "session authorization": (
        "SET SESSION AUTHORIZATION holdfast_operator",
        "SELECT session_user <> 'holdfast_operator' AND current_user <> 'holdfast_operator'",
    ),
    "setting": ("SET work_mem = '77MB'", "SELECT current_setting('work_mem') <> '77MB'"),
    "search path": ("SET search_path = core", "SELECT 'core' <> ALL (current_schemas(false))"),
    "own setting": ("SET app.tenant = 'a'", "SELECT coalesce(current_setting('app.tenant', true), '') = ''"),
    "read-only": (
        "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        "SELECT current_setting('transaction_read_only') = 'off'",
    ),
    "isolation": (
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "SELECT current_setting('transaction_isolation') = 'read committed'",
    ),
    "statement timeout": ("SET statement_timeout = 3", "SELECT pg_sleep(0.01) IS NOT NULL"),
    "temporary table": ("CREATE TEMP TABLE t (n int)", "SELECT to_regclass('pg_temp.t') IS NULL"),
    "temporary view": ("CREATE TEMP VIEW v AS SELECT 1", "SELECT to_regclass('pg_temp.v') IS NULL"),
    "prepared statement": (
        'PREPARE "Mine; too" AS SELECT 1',
        "SELECT NOT EXISTS (SELECT FROM pg_prepared_statements WHERE from_sql)",
    ),
    "listen in a block": (
        "DO $$ BEGIN EXECUTE 'LISTEN something'; END $$",
        "SELECT NOT EXISTS (SELECT FROM pg_listening_channels())",
    ),
    "prepared statement in a trigger": (
        "CREATE TEMP TABLE t (n int);"
        "CREATE FUNCTION pg_temp.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN EXECUTE ''PREP''||''ARE unseen AS"
        " SELECT 1''; RETURN NULL; END'; CREATE TRIGGER t AFTER INSERT ON t EXECUTE FUNCTION pg_temp.f();"
        "INSERT INTO t VALUES (1)",
        "SELECT NOT EXISTS (SELECT FROM pg_prepared_statements WHERE from_sql)",
    ),
    "prepared statement in a block": (
        "DO $$ BEGIN EXECUTE 'PREP' || 'ARE unseen AS SELECT 1'; END $$",
        "SELECT NOT EXISTS (SELECT FROM pg_prepared_statements WHERE from_sql)",
    ),
    "unseen listen": (
        "DO $$ BEGIN EXECUTE 'LIST' || 'EN something'; END $$",
        "SELECT NOT EXISTS (SELECT FROM pg_listening_channels())",
    ),
    "deferrable": (
        "SET default_transaction_deferrable = on",
        "SELECT current_setting('transaction_deferrable') = 'off'",
    ),
    "listen": ("LISTEN something", "SELECT NOT EXISTS (SELECT FROM pg_listening_channels())"),
    "advisory lock": (
        "SELECT pg_advisory_lock(4711)",
        "SELECT NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())",
    ),
    "cursor": (
        "DECLARE c CURSOR WITH HOLD FOR SELECT generate_series(1, 9)",
        "SELECT NOT EXISTS (SELECT FROM pg_cursors WHERE is_holdable)",
    ),
}


Step = Callable[[asyncpg.Connection], Awaitable[Any]]


async def clean_after(
    dsn: str, conn: asyncpg.Connection, steps: Mapping[str, tuple[Step, Step]]
) -> tuple[list[str], set[int]]:
    """Run a leaking and an asking handler after each other, for each pair. Returns what leaked, and the sessions."""
    registry = HandlerRegistry()
    sessions: set[int] = set()
    leaked: list[str] = []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        sessions.add(tx.get_server_pid())
        await steps[event.payload["leak"]][0](tx)

    @registry.handler("order.shipped", name="billing.close")
    async def close(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        sessions.add(tx.get_server_pid())
        if not await steps[event.payload["leak"]][1](tx):
            leaked.append(event.payload["leak"])

    async with running(dsn, registry, connections=1) as worker:
        for leak in steps:
            await settled(conn, await publish(conn, "order.placed", {"leak": leak}))
            await settled(conn, await publish(conn, "order.shipped", {"leak": leak}))
        assert worker.counters.retried == worker.counters.snoozed == 0
    return leaked, sessions


def sending(statement: str) -> Step:
    return lambda tx: tx.execute(statement)


def asking(question: str) -> Step:
    return lambda tx: tx.fetchval(question)


async def test_next_handler_finds_a_clean_session(dsn: str, conn: asyncpg.Connection) -> None:
    """Role, settings, temporary objects, prepared statements, locks: as on a new session (SEC-1, T7)."""
    steps = {leak: (sending(does), asking(question)) for leak, (does, question) in LEAKS.items()}
    leaked, sessions = await clean_after(dsn, conn, steps)
    assert not leaked
    assert len(sessions) == 1


async def test_sequence_of_one_handler_is_forgotten(dsn: str, conn: asyncpg.Connection) -> None:
    """lastval() of the next handler does not answer with the last handler's number (SEC-1, T7)."""
    await conn.execute("CREATE SEQUENCE numbers")

    async def unknown(tx: asyncpg.Connection) -> bool:
        try:
            async with tx.transaction():
                await tx.fetchval("SELECT lastval()")
        except asyncpg.ObjectNotInPrerequisiteStateError:
            return True
        return False

    leaked, sessions = await clean_after(dsn, conn, {"sequence": (sending("SELECT nextval('numbers')"), unknown)})
    assert not leaked
    assert len(sessions) == 1


async def test_seed_of_one_handler_is_forgotten(dsn: str, conn: asyncpg.Connection) -> None:
    """random() of the next handler returns nothing that the last handler can foretell (SEC-1, T7)."""
    await conn.execute("SELECT setseed(0.5)")
    foretold = await conn.fetchval("SELECT random()")

    async def unforetold(tx: asyncpg.Connection) -> bool:
        return bool(await tx.fetchval("SELECT random()") != foretold)

    leaked, sessions = await clean_after(dsn, conn, {"seed": (sending("SELECT setseed(0.5)"), unforetold)})
    assert not leaked and len(sessions) == 1


async def test_session_that_a_handler_changed_in_the_driver_is_thrown_away(dsn: str, conn: asyncpg.Connection) -> None:
    """A type codec is no setting of the server: its session is not used again (SEC-1, T7)."""

    async def change(tx: asyncpg.Connection) -> None:
        await tx.set_type_codec("jsonb", schema="pg_catalog", encoder=str, decoder=lambda _text: "mine")

    async def unchanged(tx: asyncpg.Connection) -> bool:
        return bool(await tx.fetchval("SELECT '{}'::jsonb") == "{}")

    leaked, sessions = await clean_after(dsn, conn, {"codec": (change, unchanged)})
    assert not leaked
    assert len(sessions) == 2


async def test_statement_prepared_by_the_driver_under_a_name_is_dropped(dsn: str, conn: asyncpg.Connection) -> None:
    """The name is free again for the next handler, also while the driver has not closed the statement (SEC-1, T7)."""
    kept: list[object] = []

    async def prepare(tx: asyncpg.Connection) -> None:
        kept.append(await tx.prepare("SELECT 1", name="mine"))

    free = asking("SELECT NOT EXISTS (SELECT FROM pg_prepared_statements WHERE name = 'mine')")
    leaked, sessions = await clean_after(dsn, conn, {"named statement": (prepare, free)})
    assert not leaked
    assert len(sessions) == 1


async def test_row_level_security_holds_for_the_next_handler(dsn: str, conn: asyncpg.Connection) -> None:
    """A handler that works for one tenant leaves no way through to the rows of another (SEC-1, T7)."""
    await conn.execute(
        """
        CREATE TABLE accounts (tenant text);
        INSERT INTO accounts VALUES ('a'), ('b');
        ALTER TABLE accounts ENABLE ROW LEVEL SECURITY;
        CREATE POLICY own ON accounts USING (tenant = nullif(current_setting('app.tenant', true), ''));
        GRANT SELECT ON accounts TO holdfast_worker;
        """
    )

    async def work_for_a(tx: asyncpg.Connection) -> None:
        await tx.execute("SET ROLE holdfast_worker; SET app.tenant = 'a'")
        assert await tx.fetchval("SELECT count(*) FROM accounts") == 1

    async def sees_nothing(tx: asyncpg.Connection) -> bool:
        await tx.execute("SET LOCAL ROLE holdfast_worker")
        return bool(await tx.fetchval("SELECT count(*) FROM accounts") == 0)

    leaked, _ = await clean_after(dsn, conn, {"tenant": (work_for_a, sees_nothing)})
    assert not leaked


async def test_session_is_clean_after_a_pause_too(dsn: str, conn: asyncpg.Connection) -> None:
    """A session that was reset while nothing happened keeps nothing either (SEC-1, T7)."""
    registry = HandlerRegistry()
    prepared: list[int] = []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        prepared.append(await tx.fetchval("SELECT count(*) FROM pg_prepared_statements WHERE from_sql"))
        await tx.execute("PREPARE mine AS SELECT 1; LISTEN something")

    reset = """SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database()
               AND application_name LIKE 'holdfast handler%' AND state = 'idle' AND query NOT LIKE 'COMMIT%'"""
    async with running(dsn, registry, connections=1):
        await settled(conn, await publish(conn, "order.placed"))
        await until(lambda: conn.fetchval(reset), within=5, what="the session is reset without a handler")
        await settled(conn, await publish(conn, "order.placed"))
    assert prepared == [0, 0]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first words of the messages that are sent on the sessions of handlers."""
    sent: list[str] = []

    def counted(name: str) -> None:
        method = getattr(asyncpg.Connection, name)

        async def call(self: asyncpg.Connection, query: str, *args: Any, **options: Any) -> Any:
            if type(self) is Session:
                sent.append(query.split()[0])
            return await method(self, query, *args, **options)

        monkeypatch.setattr(asyncpg.Connection, name, call)

    for name in ("execute", "fetch", "fetchrow", "fetchval"):
        counted(name)
    return sent


async def test_a_delivery_begins_in_one_message(dsn: str, conn: asyncpg.Connection, messages: list[str]) -> None:
    """Reset, settle, inbox and savepoint cost a delivery no round trip beside that of its BEGIN (LSN-3)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="leaks.count")
    async def count(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.fetch("SELECT 1")

    async with running(dsn, registry, connections=1):
        for n in range(3):
            await settled(conn, await publish(conn, "order.placed", {"n": n}))
    begun = [at for at, word in enumerate(messages) if word == "BEGIN"]
    assert [messages[at : at + 3] for at in begun] == [["BEGIN", "SELECT", "COMMIT;"]] * 3, messages


async def test_only_the_begin_of_a_delivery_is_limited_with_it(dsn: str) -> None:
    """A server that does not answer is given up, and a handler's own statements take as long as they take (LSN-5)."""
    session = await asyncpg.connect(dsn, connection_class=Session)
    try:
        transaction = await session.enter_at_once("SELECT 1", patience=0.5)
        assert transaction is not None
        await session.execute("SELECT pg_catalog.pg_sleep(0.7)")
        await transaction.commit()
        with pytest.raises(TimeoutError):
            await session.enter_at_once("SELECT pg_catalog.pg_sleep(2)", patience=0.1)
    finally:
        terminate(session)


async def test_the_end_of_a_begin_that_was_refused_is_limited_too(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses the begin of a delivery, and is silent from then on (LSN-5)."""

    async def silent(_transaction: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr("asyncpg.transaction.Transaction.rollback", silent)
    session = await asyncpg.connect(dsn, connection_class=Session)
    try:
        async with asyncio.timeout(20):
            with pytest.raises(TimeoutError):
                await session.enter_at_once("SELECT 1 / 0", patience=0.2)
    finally:
        terminate(session)


@pytest.mark.parametrize(
    "change",
    ["SELECT 1", "SET standard_conforming_strings = off", "SET client_encoding = 'SJIS'"],
)
async def test_a_failed_attempt_ends_in_one_message(
    dsn: str, conn: asyncpg.Connection, messages: list[str], change: str
) -> None:
    """Rollback, retry and commit are one round trip, and what a handler has set changes no text in it (LSN-5)."""
    registry, failures = HandlerRegistry(), ["it's \\' $1; --", "naïve 表 ☃", ""]

    @registry.handler("order.placed", name="leaks.fail", retry=RetryPolicy(max_attempts=9, base_delay=0.01))
    async def fail(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        errors.append(await tx.fetchval("SELECT last_error FROM core.outbox"))
        await tx.execute(change)
        await tx.execute("CREATE TABLE public.of_a_failed_attempt ()")
        if failures:
            raise ConnectionError(failures.pop(0))
        await tx.execute("DROP TABLE public.of_a_failed_attempt")

    errors: list[str | None] = []
    async with running(dsn, registry, connections=1):
        await settled(conn, await publish(conn, "order.placed"))
    assert errors == [None, "ConnectionError: it's \\' $1; --", "ConnectionError: naïve 表 ☃", "ConnectionError"]
    tail = [messages[at - 1] for at, word in enumerate(messages) if word == "BEGIN" and at]
    assert tail[-3:] == ["ROLLBACK"] * 3, messages
