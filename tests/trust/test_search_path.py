"""No session of ours resolves a name through a schema that others can write to (SEC-1, T1)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import psycopg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher
from holdfast.operator import Operator
from holdfast.postgres import migrate
from holdfast.postgres.wakeup import mode
from tests.logins import OPERATOR, PRODUCER, WORKER, Logins
from tests.operator.support import EVENT, fail
from tests.pooler import pooler
from tests.servers import SessionServer
from tests.worker.support import Facts, drained, running, until

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

SQL = Path(migrate.__file__).parents[1] / "sql"
OPERATORS = ("=", "<>", "<", ">", "<=", ">=", "||", "+", "-", "*", "/", "~", "!~", "~~", "->", "->>")
TYPES = "{uuid,text,name,oid,int2,int4,int8,float8,bool,timestamptz,interval,jsonb,bytea,char}"

# Each trap has the signature of what it shadows, and says so when it is run.
TRAPS = """
DO $do$
DECLARE
    each record;
BEGIN
    CREATE SCHEMA evil;
    GRANT USAGE ON SCHEMA evil TO PUBLIC;
    FOR each IN
        SELECT p.proname AS name, oidvectortypes(p.proargtypes) AS arguments,
               CASE WHEN p.proretset THEN 'SETOF ' ELSE '' END || format_type(p.prorettype, NULL) AS result
        FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f' AND p.proname = ANY (%(names)s)
          AND NOT EXISTS (SELECT FROM unnest(array_append(p.proargtypes::oid[], p.prorettype)) t
                          JOIN pg_type y ON y.oid = t WHERE y.typtype = 'p' AND y.typname NOT IN ('void', 'record'))
    LOOP
        EXECUTE format('CREATE FUNCTION evil.%%I(%%s) RETURNS %%s LANGUAGE plpgsql AS %%L',
            each.name, each.arguments, each.result, format('BEGIN RAISE EXCEPTION ''trap %%s''; END', each.name));
    END LOOP;
    -- Better matches than the real ones, for arguments as they are often written.
    CREATE FUNCTION evil.quote_ident(name) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE 'trap quote_ident'; END$$;
    CREATE FUNCTION evil.hashtextextended(text, int) RETURNS int8 LANGUAGE plpgsql AS $$BEGIN RAISE 'trap hash'; END$$;
    CREATE FUNCTION evil.step(int8) RETURNS int8 LANGUAGE plpgsql AS $$BEGIN RAISE 'trap count'; END$$;
    CREATE FUNCTION evil.step(int8, int8) RETURNS int8 LANGUAGE plpgsql AS $$BEGIN RAISE 'trap max'; END$$;
    CREATE AGGREGATE evil.count(*) (SFUNC = evil.step, STYPE = int8, INITCOND = '0');
    CREATE AGGREGATE evil.max(int8) (SFUNC = evil.step, STYPE = int8, INITCOND = '0');
    CREATE AGGREGATE evil.max(int4) (SFUNC = int4larger, STYPE = int4);
    FOR each IN
        SELECT o.oprname, format_type(o.oprleft, NULL) AS l, format_type(o.oprright, NULL) AS r,
               format_type(o.oprresult, NULL) AS result, row_number() OVER () AS n
        FROM pg_catalog.pg_operator o
        WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprname = ANY (%(operators)s)
          AND o.oprleft = ANY (%(types)s::regtype[]) AND o.oprright = ANY (%(types)s::regtype[])
    LOOP
        EXECUTE format('CREATE FUNCTION evil.operator_%%s(%%s, %%s) RETURNS %%s LANGUAGE plpgsql AS %%L',
            each.n, each.l, each.r, each.result, format('BEGIN RAISE EXCEPTION ''trap %%s''; END', each.oprname));
        EXECUTE format('CREATE OPERATOR evil.%%s (LEFTARG = %%s, RIGHTARG = %%s, FUNCTION = evil.operator_%%s)',
            each.oprname, each.l, each.r, each.n);
    END LOOP;
    -- A type runs code as well: a domain's check.
    CREATE FUNCTION evil.sprung() RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE 'trap type'; END$$;
    FOR each IN SELECT unnest('{text,uuid,jsonb,timestamptz,float8,regclass,name}'::text[]) AS name LOOP
        EXECUTE format('CREATE DOMAIN evil.%%1$I AS pg_catalog.%%1$I CHECK (evil.sprung())', each.name);
    END LOOP;
END
$do$
"""


def names() -> list[str]:
    """Every word before a parenthesis in our SQL."""
    texts = (path.read_text(encoding="utf-8") for path in SQL.rglob("*.sql"))
    return sorted({word.lower() for text in texts for word in re.findall(r"\b([a-z_0-9]+)\(", text, re.IGNORECASE)})


@pytest.fixture
def evil(postgres_server: SessionServer, dsn: str) -> Iterator[Logins]:
    """A database whose every session looks into a schema of traps first."""
    name = urlsplit(dsn).path[1:]
    with psycopg.connect(dsn, autocommit=True) as connection:
        values = {"names": names(), "operators": list(OPERATORS), "types": TYPES}
        psycopg.ClientCursor(connection).execute(TRAPS, values)
    admin = postgres_server.admin()
    admin.execute(f"ALTER DATABASE {name} SET search_path = evil, pg_catalog, public")
    logins = Logins(postgres_server, dsn)
    logins.create()
    yield logins
    admin.execute(f"ALTER DATABASE {name} RESET search_path")
    logins.drop()


@pytest.fixture
async def conn(conn: asyncpg.Connection) -> asyncpg.Connection:
    """The test's own connection, out of the traps' way."""
    await conn.execute("SET search_path = pg_catalog")
    return conn


async def test_the_traps_are_set(evil: Logins, dsn: str) -> None:
    """A session that does nothing about its path runs into them (T1)."""
    connection = await asyncpg.connect(dsn)
    try:
        for statement in (
            "SELECT now()", "SELECT quote_ident(current_user)", "SELECT hashtextextended('a', 0)",
            "SELECT count(*) FROM pg_catalog.pg_class", "SELECT 'a'::text", "SELECT 1 = 1",
        ):  # fmt: skip
            with pytest.raises(asyncpg.RaiseError, match="trap"):
                await connection.execute(statement)
    finally:
        await connection.close()


@pytest.mark.parametrize("role", ["superuser", OPERATOR])
async def test_no_trap_is_run_by_an_operator(evil: Logins, dsn: str, conn: asyncpg.Connection, role: str) -> None:
    """Every look and every action, as a superuser and as an operator (SEC-1, T1)."""
    [dead, other] = await fail(conn, 2)
    address = dsn if role == "superuser" else evil.dsn_of(evil.names[role])
    async with Operator(address, actor="ann@example.org") as operator:
        await operator.status()
        await operator.workers.all()
        assert "holdfast" in await operator.metrics()
        await operator.doctor()
        await operator.migrations()
        await operator.audit.page()
        await operator.failed.page()
        await operator.failed.groups()
        await operator.events.page()
        await operator.events.detail(dead, payload=True)
        await operator.handlers.all()
        await operator.generations.all()
        await operator.schedules.all()
        await operator.archive.page()
        await operator.archive.groups()
        await operator.retention.report()
        await operator.retention.preview_erasure(uuid4())
        await operator.failed.discard([other])
        await operator.failed.restore([other])
        await operator.failed.replay([dead], generation=0)
        await operator.events.cancel(dead)
        await operator.retention.sweep()
        await operator.retention.erase(uuid4())
        plan = (await operator.plans.create(ids=[other], generation=0)).plan.id
        await operator.plans.detail(plan)
        await operator.plans.cancel(plan)


@asynccontextmanager
async def direct(dsn: str) -> AsyncIterator[str]:
    yield dsn


@pytest.mark.parametrize("reached", [direct, pooler])
async def test_no_trap_is_run_by_a_worker(
    evil: Logins, dsn: str, conn: asyncpg.Connection, reached: Callable[[str], AbstractAsyncContextManager[str]]
) -> None:
    """From its start to its end, with a handler on the loop and one in a transaction.

    Behind a transaction pooler as well, where a session has the settings of its login and no others (SEC-1, T1).
    """
    # A worker that is silent, so that the statement which ends its sessions has something to compare.
    await conn.execute(
        """INSERT INTO core.workers
               (id, name, host, pid, version, generation, channels, handlers, lease, lease_expires_at)
           VALUES (gen_random_uuid(), 'dead', 'h', 1, '1', 0, '{x}', '{}', '1 second', now() - interval '1 hour')"""
    )
    facts = Facts()
    registry = HandlerRegistry()

    @registry.handler(EVENT, name="billing.charge")
    async def charge(event: EventEnvelope) -> None: ...

    @registry.handler(EVENT, name="mail.thank")
    async def thank(event: EventEnvelope, tx: asyncpg.Connection) -> None: ...

    async with (
        reached(evil.dsn_of(evil.names[WORKER])) as address,
        running(address, registry, facts, dead_letters="archive", lease=1.0, poll_interval=0.2),
    ):
        async with conn.transaction():
            await Publisher("shop").publish(conn, EVENT, {})
        await drained(conn)
        begun = await conn.fetchval("SELECT now()")
        extended = """SELECT count(*) FROM core.workers
                      WHERE name <> 'dead' AND lease_expires_at > $1::timestamptz + interval '2 seconds'"""
        await until(lambda: conn.fetchval(extended, begun), what="it looks for silent workers, twice")
    assert not [fact for fact in facts if "trap" in str(fact)]
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 2


async def test_no_trap_is_run_by_a_producer(evil: Logins, conn: asyncpg.Connection) -> None:
    """In the application's own session, whose path is as it is (SEC-1, T1)."""
    address, shop = evil.dsn_of(evil.names[PRODUCER]), Publisher("shop")
    connection = await asyncpg.connect(address)
    try:
        async with connection.transaction():
            await shop.publish(connection, EVENT, {})
            await shop.publish(connection, EVENT, {}, key="k", delay=60, expires_in=90, headers={"a": "b"})
            await shop.publish_many(connection, [NewEvent(EVENT, {}), NewEvent(EVENT, {}, delay=1)])
            assert await shop.reschedule(connection, "k", delay=30)
            assert await shop.cancel(connection, "k")
        await migrate.require_compatible(connection)
    finally:
        await connection.close()
    with psycopg.connect(address) as blocking:
        shop.publish(blocking, EVENT, {"n": 1})
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 5


async def test_no_trap_is_run_by_a_migration(evil: Logins, dsn: str, conn: asyncpg.Connection) -> None:
    """Installing, setting the bell and removing, as a superuser (SEC-1, T1)."""
    await migrate.apply(dsn, schema="other")
    await migrate.state(dsn, schema="other")
    await mode.set_mode(dsn, "always", "other")
    assert await mode.mode(dsn, "other") == "always"
    await migrate.holdings(dsn, "other")
    await migrate.uninstall(dsn, "other")
    assert await conn.fetchval("SELECT to_regnamespace('other')") is None
