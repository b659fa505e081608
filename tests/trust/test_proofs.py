"""What the functions of the schema rely on is nothing that a caller can forge or hold up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from tests.logins import PRODUCER, Logins
from tests.postgres.partitioned import partition

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

INSERT = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('a.b', 'shop', '{}')"
# Not as plain as most: such rows are looked at by functions.
SLOW_INSERT = """INSERT INTO core.outbox (event_type, source, payload, expires_at)
                 VALUES ('a.b', 'shop', '{}', now() + interval '1 hour')"""
DATED_INSERT = (
    "INSERT INTO core.outbox (id, event_type, source, payload) VALUES (gen_random_uuid(), 'a.b', 'shop', '{}')"
)


@asynccontextmanager
async def session(logins: Logins, role: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(logins.dsn_of(logins.names[role]))
    try:
        yield connection
    finally:
        await connection.close()


@pytest.mark.parametrize("partitioned", [False, True])
async def test_no_overload_is_a_better_match(
    dsn: str, conn: asyncpg.Connection, logins: Logins, partitioned: bool
) -> None:
    """A function of the same name, for whatever row, is not what the triggers of the outbox call (SEC-1)."""
    rows = ["core.outbox"]
    if partitioned:
        await partition(dsn)
        rows += [f"core.{row[0]}" for row in await conn.fetch("SELECT name FROM core.partitions_list()")]
    for name in ("require_event", "require_row"):
        for argument in ("record", "anyelement", *rows):
            try:
                await conn.execute(
                    f"CREATE FUNCTION core.{name}(p_row {argument}) RETURNS void LANGUAGE plpgsql AS $$ "
                    f"BEGIN RAISE EXCEPTION 'hijacked by {name}({argument})'; END $$"
                )
            except asyncpg.DuplicateFunctionError:
                continue
    async with session(logins, PRODUCER) as shop:
        await shop.execute(SLOW_INSERT)
    await conn.execute("UPDATE core.outbox SET available_at = now()")
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 1


async def test_a_search_path_is_no_proof(dsn: str, conn: asyncpg.Connection, logins: Logins) -> None:
    """Neither for an id without a date in a partitioned outbox, nor for an UPDATE that no function makes (SEC-1)."""
    await partition(dsn)
    bank = logins.names["bank"]
    await conn.execute(INSERT)
    async with session(logins, PRODUCER) as shop, session(logins, "bank") as other:
        for path in ("public", "pg_catalog, pg_temp"):
            await shop.execute(f"SET search_path = {path}")
            with pytest.raises(asyncpg.CheckViolationError, match="version 7"):
                await shop.execute(DATED_INSERT)
        await conn.execute(f"GRANT SELECT, UPDATE ON core.outbox TO {bank}")
        try:
            await other.execute("SET search_path = pg_catalog, pg_temp")
            with pytest.raises(asyncpg.CheckViolationError, match="outbox_status"):
                await other.execute("UPDATE core.outbox SET status = 'lost'")
        finally:
            await conn.execute(f"REVOKE ALL ON core.outbox FROM {bank}")


@pytest.mark.slow
async def test_an_open_transaction_stalls_nobody_while_a_source_gets_an_owner(
    dsn: str, conn: asyncpg.Connection, logins: Logins
) -> None:
    """The error names who is in the way, and other producers go on; once that has ended, the line is written
    (SEC-1).
    """
    own = "INSERT INTO core.sources VALUES ('shop', $1)"
    stalls: list[float] = []
    async with session(logins, PRODUCER) as shop, session(logins, "bank") as bank:
        pid = await bank.fetchval("SELECT pg_backend_pid()")
        holding = bank.transaction()
        await holding.start()
        await bank.execute(INSERT)
        assigning = asyncio.create_task(conn.execute(own, logins.names[PRODUCER]))
        while not assigning.done():
            began = time.monotonic()
            await shop.execute(INSERT)
            stalls.append(time.monotonic() - began)
            await asyncio.sleep(0.02)
        with pytest.raises(asyncpg.LockNotAvailableError, match=rf"pid {pid}, login {logins.names['bank']}"):
            await assigning
        assert max(stalls) < 2, "a producer waited behind the lock"
        assigning = asyncio.create_task(conn.execute(own, logins.names[PRODUCER]))
        await asyncio.sleep(0.3)
        await holding.rollback()
        await assigning
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="source shop belongs to another role"):
            await bank.execute(INSERT)
