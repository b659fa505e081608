"""The checks at the end of every test see what they are there to see (P8)."""

from __future__ import annotations

import asyncpg
import pytest

from tests import servers
from tests.servers import SessionServer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "QUIET_SECONDS", 0.2)


async def test_leaked_connection_is_seen(postgres_server: SessionServer) -> None:
    """P8: a connection that stays open, and one in a transaction, are both named."""
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
    """P8: a row in flight whose lease has expired, or that has none, is named."""
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


async def test_each_test_has_its_own_database(conn: asyncpg.Connection, dsn: str) -> None:
    """P8: the schema is there, with nothing in it."""
    assert dsn.endswith(await conn.fetchval("SELECT current_database()"))
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0


async def test_empty_database_has_no_schema(empty_dsn: str) -> None:
    """P8: migrations can be tested from nothing."""
    connection = await asyncpg.connect(empty_dsn)
    assert await connection.fetchval("SELECT to_regnamespace('core')") is None
    await connection.close()
