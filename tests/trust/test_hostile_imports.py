"""An import runs nothing that another login has written."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from holdfast.errors import NotPermitted
from holdfast.importing import import_from
from holdfast.postgres.imports import PeerTable
from tests.logins import PRODUCER, Logins
from tests.servers import SessionServer

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

TABLE = """CREATE SCHEMA his AUTHORIZATION evil;
SET ROLE evil;
CREATE TABLE his.outbox (id int PRIMARY KEY, event_type text, payload jsonb, published_at timestamptz);
INSERT INTO his.outbox VALUES (1, 'a.b', '{}', NULL);
CREATE TABLE his.seen (who text, path text);
GRANT INSERT ON his.seen TO PUBLIC;
CREATE FUNCTION his.t() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM set_config('holdfast_test.ran', current_user, false);
      INSERT INTO seen VALUES (current_user, current_setting('search_path')); RETURN NEW; END $$;
CREATE TRIGGER t BEFORE UPDATE ON his.outbox FOR EACH ROW EXECUTE FUNCTION his.t();
RESET ROLE"""


@pytest.fixture
async def evil(conn: asyncpg.Connection, postgres_server: SessionServer, dsn: str) -> AsyncIterator[str]:
    logins = Logins(postgres_server, dsn)
    logins.create()
    name = logins.names[PRODUCER]
    await conn.execute(TABLE.replace("evil", name))
    yield name
    await conn.execute("DROP SCHEMA his CASCADE; DROP SCHEMA IF EXISTS ours CASCADE")
    logins.drop()


OURS = """CREATE SCHEMA ours;
CREATE TABLE ours.outbox (id int PRIMARY KEY, event_type text, payload jsonb, published_at timestamptz);
INSERT INTO ours.outbox SELECT n, 'a.b', '{}', NULL FROM generate_series(1, 600) AS n;
ALTER FUNCTION his.t() SET search_path = his, pg_catalog"""
JOBS = """CREATE SCHEMA ours;
CREATE TABLE ours.jobs (id bigint PRIMARY KEY, entrypoint text, payload bytea, status text, execute_after timestamptz);
INSERT INTO ours.jobs VALUES (1, 'a.b', '{}', 'queued', NULL);
GRANT USAGE ON SCHEMA ours TO evil; GRANT REFERENCES ON ours.jobs TO evil;
ALTER FUNCTION his.t() SET search_path = his, pg_catalog;
SET ROLE evil;
CREATE TABLE his.bait (job bigint REFERENCES ours.jobs ON DELETE CASCADE);
CREATE TRIGGER t AFTER DELETE ON his.bait FOR EACH ROW EXECUTE FUNCTION his.t();
RESET ROLE;
INSERT INTO his.bait VALUES (1)"""


async def ran(conn: asyncpg.Connection) -> int:
    return int(await conn.fetchval("SELECT count(*) FROM his.seen"))


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_superuser_does_not_run_the_triggers_of_others(
    dsn: str, conn: asyncpg.Connection, evil: str, dry_run: bool
) -> None:
    """The refusal names the table, its owner and the option; with that, triggers find what is theirs (SEC-1)."""
    with pytest.raises(NotPermitted, match=rf"table his\.outbox belongs to {evil}") as refused:
        await import_from(dsn, "core", "table", source="shop", actor="ada", table="his.outbox", dry_run=dry_run)
    assert f"--trusted-role {evil}" in refused.value.remedy
    assert await ran(conn) == 0
    done = await import_from(
        dsn, "core", "table", source="shop", actor="ada", table="his.outbox", trusted_roles=[evil], dry_run=dry_run
    )
    assert done.total == 1
    assert await ran(conn) == (0 if dry_run else 1)


async def test_a_trigger_of_another_login_on_ones_own_table_is_refused(
    dsn: str, conn: asyncpg.Connection, evil: str
) -> None:
    """The privilege TRIGGER is enough to put one there (SEC-1)."""
    await conn.execute(
        "CREATE SCHEMA ours; CREATE TABLE ours.outbox (id int PRIMARY KEY, event_type text, payload jsonb, "
        "published_at timestamptz); INSERT INTO ours.outbox VALUES (1, 'a.b', '{}', NULL);"
        "CREATE TRIGGER t BEFORE UPDATE ON ours.outbox FOR EACH ROW EXECUTE FUNCTION his.t()"
    )
    with pytest.raises(NotPermitted, match=f"trigger t on table ours.outbox calls a function of {evil}"):
        await import_from(dsn, "core", "table", source="shop", actor="ada", table="ours.outbox")
    await conn.execute(f"DROP TRIGGER t ON ours.outbox; GRANT CREATE ON SCHEMA ours TO {evil}")
    with pytest.raises(NotPermitted, match=f"schema ours is open to {evil}"):
        await import_from(dsn, "core", "table", source="shop", actor="ada", table="ours.outbox")
    await conn.execute(f"REVOKE CREATE ON SCHEMA ours FROM {evil}")
    done = await import_from(dsn, "core", "table", source="shop", actor="ada", table="ours.outbox")
    assert done.total == 1


async def test_a_table_that_refers_to_it_runs_nothing_of_another_login(
    dsn: str, conn: asyncpg.Connection, evil: str
) -> None:
    """Up to Postgres 17, triggers of a table that a foreign key reaches have the rights of who deletes (SEC-1)."""
    await conn.execute(JOBS.replace("evil", evil))
    with pytest.raises(NotPermitted, match=rf"table his\.bait belongs to {evil}"):
        await import_from(dsn, "core", "pgqueuer", source="shop", actor="ada", table="ours.jobs")
    assert await ran(conn) == 0
    assert await conn.fetchval("SELECT count(*) FROM ours.jobs") == 1


async def test_a_trigger_that_is_added_meanwhile_does_not_run(dsn: str, conn: asyncpg.Connection, evil: str) -> None:
    """Whose code runs is asked for each batch, when nobody can add any more (SEC-1)."""
    await conn.execute(OURS)
    trigger = "CREATE TRIGGER t BEFORE UPDATE ON ours.outbox FOR EACH ROW EXECUTE FUNCTION his.t()"
    peer = await PeerTable.find(
        conn, "table", "ours.outbox", {"id": "id", "type": "event_type", "payload": "payload", "done": "published_at"}
    )
    other = await asyncpg.connect(dsn, server_settings={"lock_timeout": "200ms"})
    try:
        async with conn.transaction():
            await conn.fetch(peer.hold_sql, 1)
            with pytest.raises(asyncpg.LockNotAvailableError):
                await other.execute(trigger)
        await other.execute(trigger)
        with pytest.raises(NotPermitted, match=r"trigger t on table ours\.outbox calls a function of"):
            async with conn.transaction():
                await peer.take(conn, 500)
    finally:
        await other.close()
    assert await ran(conn) == 0


@pytest.mark.parametrize(
    ("what", "refused"),
    [
        ("ALTER TABLE ours.outbox ADD CHECK (his.f(event_type) IS NOT NULL)", "calls a function of"),
        ("CREATE INDEX i ON ours.outbox (his.f(event_type)) WHERE false", "calls a function of"),
        ("ALTER TABLE ours.outbox ADD mood his.mood DEFAULT 'good'", "type his.mood belongs to"),
        (
            "ALTER TABLE ours.outbox RENAME TO theirs; ALTER TABLE ours.theirs OWNER TO evil; "
            "CREATE VIEW ours.outbox AS SELECT * FROM ours.theirs",
            "table ours.theirs belongs to",
        ),
    ],
)
async def test_what_a_change_of_a_row_would_evaluate_is_refused(
    dsn: str, conn: asyncpg.Connection, evil: str, what: str, refused: str
) -> None:
    """Functions in checks and indexes, casts of a column's type, and what is under a view, run with it (SEC-1)."""
    await conn.execute(OURS)
    await conn.execute(
        "CREATE FUNCTION his.f(text) RETURNS text LANGUAGE sql IMMUTABLE RETURN $1;"
        "CREATE TYPE his.mood AS ENUM ('good');"
        f"ALTER FUNCTION his.f(text) OWNER TO {evil}; ALTER TYPE his.mood OWNER TO {evil};" + what.replace("evil", evil)
    )
    with pytest.raises(NotPermitted, match=f"{refused} {evil}"):
        await import_from(dsn, "core", "table", source="shop", actor="ada", table="ours.outbox")
