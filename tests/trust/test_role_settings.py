"""Settings that an administrator has given to a login change nothing for the sessions of Holdfast."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import psycopg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Worker
from holdfast.operator import Operator
from holdfast.postgres import migrate
from tests.servers import SessionServer
from tests.worker.support import Facts, publish, running, settled

pytestmark = pytest.mark.trust

LIMITS = {
    "statement_timeout": "100ms",
    "lock_timeout": "1ms",
    "idle_in_transaction_session_timeout": "100ms",
    "idle_session_timeout": "100ms",
}
MEANINGS = {
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Pacific/Kiritimati",
    "bytea_output": "escape",
    "array_nulls": "off",
    "standard_conforming_strings": "off",
    "escape_string_warning": "off",
    "search_path": "nowhere",
    "row_security": "off",
    "client_encoding": "LATIN1",
    "quote_all_identifiers": "on",
    "extra_float_digits": "-15",
}


@pytest.fixture
def login(empty_dsn: str, postgres_server: SessionServer) -> Iterator[str]:
    """The address of a login that may install Holdfast; its name is `odd_` and the database's."""
    admin, parts = postgres_server.admin(), urlsplit(empty_dsn)
    database = parts.path.lstrip("/")
    admin.execute(f"CREATE ROLE odd_{database} LOGIN PASSWORD 'secret'")
    admin.execute(f"GRANT CREATE ON DATABASE {database} TO odd_{database}")
    yield urlunsplit(parts._replace(netloc=f"odd_{database}:secret@{parts.hostname}:{parts.port}"))
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(f"DROP OWNED BY odd_{database} CASCADE")
    admin.execute(f"DROP ROLE odd_{database}")


@pytest.mark.parametrize("settings", [LIMITS, MEANINGS], ids=["limits", "meanings"])
async def test_settings_of_the_login_change_nothing(
    empty_dsn: str, login: str, postgres_server: SessionServer, settings: dict[str, str]
) -> None:
    """Migrate, worker, both kinds of handlers and operator, with every setting at once (LSN-5, OPS-6, T21)."""
    if settings is LIMITS and postgres_server.major >= 17:
        settings = {**settings, "transaction_timeout": "100ms"}
    conn = await asyncpg.connect(empty_dsn)
    name = urlsplit(login).username
    for setting, value in settings.items():
        await conn.execute(f"ALTER ROLE {name} SET {setting} = '{value}'")
    await conn.execute(f"CREATE TABLE ledger (n int); GRANT INSERT ON ledger TO {name}")
    await migrate.apply(login, roles="never")
    assert (await migrate.state(login)).up_to_date

    registry, tries, facts = HandlerRegistry(), [], Facts()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        tries.append(event.event_id)
        await asyncio.sleep(0.2)  # longer than any of the limits
        await tx.execute("INSERT INTO public.ledger SELECT 1 FROM pg_sleep(0.2)")
        if len(tries) == 1:
            raise ConnectionError("settled as a retry, in the handler's transaction")

    @registry.handler("order.shipped", name="billing.close")
    async def close(event: EventEnvelope) -> None:
        assert event.payload == {"n": [1, None, "a\\b"]}

    async with running(login, registry, facts) as worker:
        await settled(conn, await publish(conn, "order.placed"))
        await settled(conn, await publish(conn, "order.shipped", {"n": [1, None, "a\\b"]}))
        assert worker.counters.lost_leases == 0
    assert (len(tries), await conn.fetchval("SELECT count(*) FROM ledger")) == (2, 1)
    assert not facts.notices("database_unavailable")
    async with Operator(login, actor="ann") as operator:
        assert (await operator.status()).pending == 0
    await conn.close()


async def test_worker_drains_under_a_short_transaction_timeout(dsn: str, postgres_server: SessionServer) -> None:
    """The limit of the role is armed by BEGIN, and a longer one set later would not replace it (LSN-5, T21)."""
    if postgres_server.major < 17:
        pytest.skip("transaction_timeout exists since Postgres 17")
    conn = await asyncpg.connect(dsn)
    database = await conn.fetchval("SELECT current_database()")
    await conn.execute(f"ALTER DATABASE {database} SET transaction_timeout = '50ms'")
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await asyncio.sleep(0.2)

    identity = await publish(conn, "order.placed")
    async with asyncio.timeout(15):
        worker = Worker(dsn, registry, observers=())
        await worker.drain()
    assert (worker.counters.delivered, worker.counters.retried) == (1, 0)
    await settled(conn, identity)
    await conn.close()
