"""This release and a made-up next one: the schema is upgraded with its rows; this code runs on the next schema."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import asyncpg
import pytest

from chaos.releases import NextRelease, make_next
from holdfast import EventEnvelope, HandlerRegistry, Operator, Worker
from holdfast.errors import SchemaMismatch
from holdfast.postgres import migrate
from tests.logins import RUNTIME, Logins
from tests.migrations.conftest import FIRST, MakeSource

pytestmark = pytest.mark.both_postgres

# An application: it leaves rows in every state.
PROGRAM = """
import asyncio, datetime, sys
import asyncpg
from holdfast import HandlerRegistry, Operator, Publisher, Reject, Worker, WorkerSettings

registry, publisher = HandlerRegistry(), Publisher("shop")

@registry.handler("order.placed", name="billing.charge_card")
async def charge_card(event): ...

@registry.handler("order.placed", name="ledger.book")
async def book(event, tx):
    await tx.execute("INSERT INTO booked VALUES ($1)", event.payload["n"])

@registry.handler("order.refused", name="billing.refuse")
async def refuse(event):
    return Reject("no card")

registry.schedule("order.placed", name="shop.nightly", every=datetime.timedelta(days=1), payload={"n": -1})

async def main(producer, worker, operator):
    connection = await asyncpg.connect(producer)
    async with connection.transaction():
        for n in range(10):
            await publisher.publish(connection, "order.placed", {"n": n})
        for n in range(3):
            await publisher.publish(connection, "order.refused", {"n": n})
    await Worker(worker, registry, WorkerSettings()).drain()
    async with Operator(operator, actor="ada") as operator:
        print("pending:", (await operator.status()).pending)
    async with connection.transaction():
        for n in range(10, 14):
            await publisher.publish(connection, "order.placed", {"n": n})
        later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
        await publisher.publish(connection, "order.placed", {"n": 99}, available_at=later)
    await connection.close()

asyncio.run(main(*sys.argv[1:]))
"""
# An operator's decisions, and a worker that died with an event.
MORE = """
SELECT core.retention_set('ada', NULL, 'outbox_row', 'brief', 3, 0, 'HARD_DELETE');
SELECT core.outbox_cancel_event(id, 'ada', 'a test') FROM core.outbox WHERE payload @> '{"n": 13}';
SELECT core.outbox_replay(id, 0, 'ada') FROM core.failed WHERE payload @> '{"n": 1}';
UPDATE core.outbox SET status = 'in_flight', claimed_by = gen_random_uuid(), lease_token = gen_random_uuid(),
    lease_expires_at = now() WHERE payload @> '{"n": 12}';
"""


# The same application after its deployment: what its handlers get.
LATER = """
import asyncio, sys
import holdfast
from holdfast import HandlerRegistry, Worker

assert holdfast.__file__.startswith(sys.argv[2])
registry = HandlerRegistry()

@registry.handler("order.*", name="billing.charge_card")
async def charge_card(event): ...

@registry.handler("order.placed", name="ledger.book")
async def book(event):
    print("handled", event.event_type, event.payload["n"])

@registry.handler("order.refused", name="billing.refuse")
async def refuse(event):
    print("handled", event.event_type, event.payload["n"])

asyncio.run(Worker(sys.argv[1], registry).drain())
"""


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> NextRelease:
    return make_next(tmp_path_factory.mktemp("next"))


async def run(program: str, *arguments: str, release: NextRelease | None = None) -> str:
    """Run a program with this release, or with another one."""
    command = [sys.executable, "-c", program, *arguments]
    environment = os.environ | ({} if release is None else release.environment)
    run = await asyncio.to_thread(
        subprocess.run, command, env=environment, cwd="/", capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return str(run.stdout)


async def every_row(connection: asyncpg.Connection) -> dict[str, list[str]]:
    """The rows of all tables as JSON, but for what the migrations keep of themselves."""
    names = await connection.fetch(
        "SELECT relname::text FROM pg_class WHERE relnamespace = 'core'::regnamespace AND relkind = 'r'"
    )
    return {
        name: [row[0] for row in await connection.fetch(f'SELECT to_jsonb(t)::text FROM core."{name}" t')]
        for (name,) in names
        if name not in ("contract", "migrations")
    }


async def kept(connection: asyncpg.Connection, table: str, row: str) -> bool:
    found: Any = await connection.fetchval(
        f'SELECT EXISTS (SELECT FROM core."{table}" t WHERE to_jsonb(t) @> $1::jsonb)', row
    )
    return bool(found)


@pytest.mark.slow
async def test_the_schema_is_upgraded_with_its_rows(empty_dsn: str, next_release: NextRelease) -> None:
    """Every row stays, and what waited is handled by the next release. (OBX-3, OPS-6)"""
    await migrate.apply(empty_dsn)
    connection = await asyncpg.connect(empty_dsn)
    try:
        await connection.execute("CREATE TABLE booked (n int PRIMARY KEY)")
        await run(PROGRAM, empty_dsn, empty_dsn, empty_dsn)
        await connection.execute(MORE)
        before = await every_row(connection)
        states = dict(await connection.fetch("SELECT status, count(*) FROM core.outbox GROUP BY 1"))
        assert states == {"pending": 4, "delivered": 30, "failed": 3, "in_flight": 1}
        assert {name for name, rows in before.items() if rows} >= {
            "audit", "event_handled", "outbox", "retention_policies", "schedules", "subscriptions",
        }  # fmt: skip

        assert [migration.name for migration in await migrate.apply(empty_dsn, source=next_release.sql)] == ["next"]

        lost = [
            (table, row) for table, rows in before.items() for row in rows if not await kept(connection, table, row)
        ]
        assert lost == []
        said = await run(LATER, empty_dsn, str(next_release.root), release=next_release)
        assert sorted(line for line in said.splitlines() if line.startswith("handled")) == [
            "handled order.placed 10",
            "handled order.placed 11",
            "handled order.placed 12",
            "handled order.refused 1",
        ]
    finally:
        await connection.close()


@pytest.mark.parametrize("as_owner", [True, False], ids=["owner", "roles"])
async def test_this_code_starts_with_the_next_schema(
    dsn: str, conn: asyncpg.Connection, logins: Logins, next_release: NextRelease, as_owner: bool
) -> None:
    """While this code is replaced it may crash and start again, and whoever goes back finds it working.

    So do logins that have a role and nothing else: what they were granted is granted still. (OPS-6)
    """
    await migrate.apply(dsn, source=next_release.sql)
    await conn.execute("CREATE TABLE booked (n int PRIMARY KEY); GRANT INSERT ON booked TO PUBLIC")
    own = [dsn] * 3 if as_owner else [logins.dsn_of(logins.names[role]) for role in RUNTIME]
    assert "pending: 0" in await run(PROGRAM, *own)
    assert await conn.fetchval("SELECT count(*) FROM booked") == 10
    assert await conn.fetchval("SELECT count(*) FROM core.failed") == 3
    async with Operator(dsn, actor="ada") as operator:
        assert (await operator.status()).pending > 0


async def test_nobody_works_with_another_baseline(empty_dsn: str, make_source: MakeSource) -> None:
    """A worker does not start and an operator's verb does nothing, and both say what to do. (OPS-6)"""
    await migrate.apply(empty_dsn, source=make_source(FIRST))
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge_card")
    async def charge_card(event: EventEnvelope) -> None: ...

    with pytest.raises(SchemaMismatch, match=r"another migration 0001.*holdfast uninstall and holdfast migrate apply"):
        await Worker(empty_dsn, registry).drain()
    async with Operator(empty_dsn, actor="ada") as operator:
        with pytest.raises(SchemaMismatch, match="another migration 0001"):
            await operator.status()
