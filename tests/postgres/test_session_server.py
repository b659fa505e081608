"""The checks at the end of every test see what they are there to see (P8)."""

from __future__ import annotations

import asyncpg
import pytest

from tests import servers
from tests.servers import SessionServer

pytestmark = pytest.mark.both_postgres


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "QUIET_SECONDS", 0.2)


async def test_leaked_connection_is_seen(postgres_server: SessionServer) -> None:
    """A connection that stays open, and one in a transaction, are both named (P8)."""
    name = postgres_server.create(schema=False)
    leaked = await asyncpg.connect(postgres_server.dsn(name))
    try:
        await leaked.fetchval("SELECT 41 + 1")
        assert "is idle: 'SELECT 41 + 1'" in postgres_server.faults_left(name)[0]
        await leaked.execute("BEGIN")
        assert "is idle in transaction: 'BEGIN'" in postgres_server.faults_left(name)[0]
        await leaked.close()
        assert postgres_server.faults_left(name) == []
    finally:
        postgres_server.drop(name)


async def test_row_without_a_live_lease_is_seen(postgres_server: SessionServer) -> None:
    """A row in flight whose lease has expired, or that has none, is named (P8)."""
    name = postgres_server.create(schema=False)
    connection = await asyncpg.connect(postgres_server.dsn(name))
    try:
        await connection.execute(
            """
            CREATE SCHEMA core;
            CREATE TABLE core.outbox (id int, status text, claimed_by text, lease_expires_at timestamptz);
            INSERT INTO core.outbox VALUES
              (1, 'in_flight', 'w', now() + interval '1 hour'),
              (2, 'in_flight', 'w', now() - interval '1 second'),
              (3, 'in_flight', 'w', NULL), (4, 'pending', NULL, NULL)
            """
        )
        await connection.close()
        seen = [fault.split(" is ")[0] for fault in postgres_server.faults_left(name)]
        assert seen == ["row 2", "row 3"]
        assert postgres_server.faults_left(name, leases=False) == []
    finally:
        postgres_server.drop(name)


async def test_the_next_test_finds_what_the_first_one_found(postgres_server: SessionServer) -> None:
    """A database is lent again without the rows, the numbers and the tables of the test before."""
    found = []
    for _ in range(2):
        lent = postgres_server.lend()
        connection = await asyncpg.connect(lent.dsn)
        await connection.execute("CREATE TABLE notes (id serial); CREATE VIEW noted AS SELECT * FROM notes")
        await connection.execute("CREATE FUNCTION one() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        await connection.execute("DELETE FROM core.subscriptions_version")
        number = await connection.fetchval(
            "INSERT INTO core.outbox (event_type, source, payload) VALUES ('a.b', 's', '{}') RETURNING seq"
        )
        found.append((lent.name, number, await connection.fetchval("SELECT count(*) FROM core.outbox")))
        await connection.close()
        assert postgres_server.take_back(lent) == []
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "change",
    [
        "CREATE INDEX ON core.outbox (created_at)",
        "ALTER TABLE core.archive DROP COLUMN source CASCADE",
        "ALTER TABLE core.outbox ALTER COLUMN event_type DROP NOT NULL",
        "ALTER TABLE core.outbox DISABLE TRIGGER ALL",
        "CREATE TABLE core.more ()",
        "CREATE TYPE mood AS ENUM ('good')",
        "DROP FUNCTION core.outbox_replay",
        "GRANT USAGE ON SCHEMA core TO PUBLIC",
        "COMMENT ON TABLE core.outbox IS 'changed'",
        "UPDATE pg_index SET indisvalid = false WHERE indrelid = 'core.outbox'::regclass",
        "INSERT INTO core.outbox (event_type, source, payload) VALUES ('a.b', 's', '{}'); ANALYZE core.outbox",
        "INSERT INTO core.event_handled SELECT 'a', n || repeat('x', 99), now(), 's' FROM generate_series(1, 9999) n",
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET jit = off', current_database()); END $$",
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I CONNECTION LIMIT 50', current_database()); END $$",
    ],
)
async def test_a_database_with_more_than_other_rows_is_not_lent_again(
    postgres_server: SessionServer, change: str
) -> None:
    """What a reset of the rows cannot take back, or what makes the tests after it slower."""
    lent = postgres_server.lend()
    connection = await asyncpg.connect(lent.dsn)
    await connection.execute(change)
    await connection.close()
    assert postgres_server.take_back(lent) == []
    again = postgres_server.lend()
    assert again.name != lent.name
    assert postgres_server.take_back(again) == []


async def test_what_is_left_in_a_lent_database_is_seen(postgres_server: SessionServer) -> None:
    """A session and a row without a lease, also after every session was ended; it is not lent again (P8)."""
    lent = postgres_server.lend()
    leaked = await asyncpg.connect(lent.dsn)
    await leaked.execute("SELECT 41 + 1")
    assert "is idle: 'SELECT 41 + 1'" in postgres_server.take_back(lent)[0]
    assert leaked.is_closed() or await ended(leaked)
    again = postgres_server.lend()
    assert again.name != lent.name
    connection = await asyncpg.connect(again.dsn)
    await connection.execute(
        """INSERT INTO core.outbox (event_type, source, payload, status, lease_token, lease_expires_at, claimed_by)
           VALUES ('a.b', 's', '{}', 'in_flight', gen_random_uuid(), now() - interval '1 hour', gen_random_uuid())"""
    )
    await connection.execute(
        """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
           WHERE datname = current_database() AND pid <> pg_backend_pid()"""
    )
    await connection.close()
    assert "without a live lease" in postgres_server.take_back(again)[0]


async def ended(connection: asyncpg.Connection) -> bool:
    try:
        await connection.execute("SELECT 1")
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        return True
    return False


async def test_each_test_has_a_database_with_the_schema_and_no_rows(conn: asyncpg.Connection, dsn: str) -> None:
    """The schema is there, with nothing in it (P8)."""
    assert dsn.endswith(await conn.fetchval("SELECT current_database()"))
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0


async def test_empty_database_has_no_schema(empty_dsn: str) -> None:
    """Migrations can be tested from nothing (P8)."""
    connection = await asyncpg.connect(empty_dsn)
    assert await connection.fetchval("SELECT to_regnamespace('core')") is None
    await connection.close()
