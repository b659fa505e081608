"""Whoever installs Holdfast can follow the README to the end, with what the errors say where that is not enough."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Publisher, Worker
from holdfast.embedded import EmbeddedPostgres
from holdfast.operator import Operator
from holdfast.postgres import migrate
from holdfast.postgres.schema.migrate import MigrationRefused
from holdfast.postgres.schema.ownership import ROLES, RolesMode

pytestmark = pytest.mark.trust

# Attributes of the login, what it is given, how it installs, and who owns the schema in the end.
LOGINS: dict[str, tuple[str, str, RolesMode, str]] = {
    "createrole": ("CREATEROLE", "GRANT CREATE ON DATABASE shop TO app", "auto", "holdfast_owner"),
    "createrole that insists": ("CREATEROLE", "", "always", "holdfast_owner"),
    "owner of the database": ("", "ALTER DATABASE shop OWNER TO app", "auto", "app"),
    "owner that insists": ("", "ALTER DATABASE shop OWNER TO app", "always", "holdfast_owner"),
    "no rights": ("", "", "auto", "app"),
}


async def follow_readme(dsn: str, roles: RolesMode) -> None:
    """Install, publish in both ways, deliver to both kinds of handlers, look, all with one login."""
    await migrate.apply(dsn, roles=roles)
    seen: list[str] = []
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append("plain")

    @registry.handler("order.placed", name="billing.record")
    async def record(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        seen.append("transactional")

    tx = await asyncpg.connect(dsn)
    async with tx.transaction():
        await Publisher("shop").publish(tx, "order.placed", {"order_id": 17})
    await tx.execute("INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}')")
    async with asyncio.timeout(10):
        await Worker(dsn, registry, observers=()).drain()
    assert sorted(seen) == ["plain", "plain", "transactional", "transactional"]
    await tx.fetch("SELECT core.outbox_replay(id, 0, 'ada@example.com') FROM core.failed")
    await tx.close()
    async with Operator(dsn, actor="ann") as operator:
        assert (await operator.status()).pending == 0


@pytest.mark.slow
async def test_every_login_gets_to_the_end(own_server: EmbeddedPostgres) -> None:
    """With CREATEROLE, as a database's owner, with nothing: as it is, or by the remedies as printed (SEC-1, T22)."""
    admin = await asyncpg.connect(own_server.dsn)
    for kind, (attributes, grant, mode, owner) in LOGINS.items():
        await admin.execute("CREATE DATABASE shop")
        await admin.execute(f"CREATE ROLE app LOGIN PASSWORD 'secret' {attributes}")
        if grant:
            await admin.execute(grant)
        superuser = await asyncpg.connect(own_server.database_dsn("shop"))
        parts = urlsplit(own_server.database_dsn("shop"))
        login = urlunsplit(parts._replace(netloc=f"app:secret@{parts.hostname}:{parts.port}"))
        remedies: list[str] = []
        while True:
            try:
                await follow_readme(login, mode)
                break
            except MigrationRefused as refusal:
                told, _, remedy = refusal.remedy.partition("as an administrator: ")
                assert not told and remedy not in remedies, f"{kind}: {refusal}"
                remedies.append(remedy)
                await superuser.execute(remedy.partition(", or ")[0])
        assert bool(remedies) is (not grant or "insists" in kind), kind
        found = "SELECT pg_get_userbyid(nspowner)::text FROM pg_namespace WHERE nspname = 'core'"
        assert await superuser.fetchval(found) == owner, kind
        await superuser.close()
        await admin.execute("DROP DATABASE shop WITH (FORCE)")
        for role in ("app", *ROLES):
            await admin.execute(f"DROP ROLE IF EXISTS {role}")
    await admin.close()


async def test_worker_of_another_login_is_told_the_grant(dsn: str, conn: asyncpg.Connection) -> None:
    """The refusal of a login without roles is a statement that helps (SEC-1, T22)."""
    parts = urlsplit(dsn)
    name = f"worker_{parts.path.lstrip('/')}"
    login = urlunsplit(parts._replace(netloc=f"{name}:secret@{parts.hostname}:{parts.port}"))
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None: ...

    await conn.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'secret'")
    try:
        with pytest.raises(MigrationRefused) as refused:
            await Worker(login, registry, observers=()).drain()
        statement = refused.value.remedy.partition("as an administrator: ")[2].partition(" (")[0]
        assert statement == f"GRANT holdfast_worker TO {name}"
        await conn.execute(statement)
        async with asyncio.timeout(10):
            await Worker(login, registry, observers=()).drain()
    finally:
        await conn.execute(f"DROP ROLE {name}")
