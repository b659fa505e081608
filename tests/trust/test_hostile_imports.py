"""An import runs nothing that another login has written."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from holdfast.errors import NotPermitted
from holdfast.importing import import_from
from tests.logins import PRODUCER, Logins
from tests.servers import SessionServer

pytestmark = [pytest.mark.trust, pytest.mark.newest_postgres]

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


async def ran(conn: asyncpg.Connection) -> int:
    return int(await conn.fetchval("SELECT count(*) FROM his.seen"))


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_superuser_does_not_run_the_triggers_of_others(
    dsn: str, conn: asyncpg.Connection, evil: str, dry_run: bool
) -> None:
    """SEC-1: the refusal names the table, its owner and the option; with that, triggers find what is theirs."""
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
    """SEC-1: the privilege TRIGGER is enough to put one there."""
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
