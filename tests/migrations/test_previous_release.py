"""The release before this one, from its wheel: its schema is upgraded with its rows, its code runs on this schema."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Operator, Worker
from holdfast.postgres import migrate
from tests.logins import RUNTIME, Logins
from tests.migrations.test_golden import GOLDEN, describe
from tests.servers import SessionServer

pytestmark = [pytest.mark.adoption]

WHEEL = Path(__file__).parent / "releases" / "holdfast-0.1.0-py3-none-any.whl"
SQL = zipfile.Path(WHEEL, "holdfast/postgres/sql/")

# An application of 0.1.0: it leaves rows in every state.
PROGRAM = """
import asyncio, datetime, sys
import asyncpg
from holdfast import HandlerRegistry, Operator, Publisher, Reject, Worker, WorkerSettings

assert ".whl" in sys.modules["holdfast"].__file__
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


async def run_the_old_release(producer: str, worker: str, operator: str) -> str:
    """Run the application, each of its parts with a database address of its own."""
    command = [sys.executable, "-c", PROGRAM, producer, worker, operator]
    environment = {**os.environ, "PYTHONPATH": str(WHEEL)}
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


async def test_the_schema_of_0_1_0_is_upgraded_with_its_rows(empty_dsn: str) -> None:
    """OBX-3, OPS-6: it becomes the golden one, every row stays, and what waited there is handled by this release."""
    await migrate.apply(empty_dsn, source=SQL)
    connection = await asyncpg.connect(empty_dsn)
    try:
        await connection.execute("CREATE TABLE booked (n int PRIMARY KEY)")
        await run_the_old_release(empty_dsn, empty_dsn, empty_dsn)
        await connection.execute(MORE)
        before = await every_row(connection)
        states = dict(await connection.fetch("SELECT status, count(*) FROM core.outbox GROUP BY 1"))
        assert states == {"pending": 4, "delivered": 30, "failed": 3, "in_flight": 1}
        assert {name for name, rows in before.items() if rows} >= {
            "audit", "event_handled", "outbox", "retention_policies", "schedules", "subscriptions",
        }  # fmt: skip

        await migrate.apply(empty_dsn)

        lost = [
            (table, row) for table, rows in before.items() for row in rows if not await kept(connection, table, row)
        ]
        assert lost == []
        assert (await describe(connection)).splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()
        await connection.execute("RESET search_path")
        handled = await drained(empty_dsn)
        assert sorted(handled) == [
            ("order.placed", 10),
            ("order.placed", 11),
            ("order.placed", 12),
            ("order.refused", 1),
        ]
    finally:
        await connection.close()


async def drained(dsn: str) -> list[tuple[str, int]]:
    """What the handlers of the same names get from this release."""
    handled: list[tuple[str, int]] = []
    registry = HandlerRegistry()

    @registry.handler("order.*", name="billing.charge_card")
    async def charge_card(event: EventEnvelope) -> None: ...

    @registry.handler("order.placed", name="ledger.book")
    async def book(event: EventEnvelope) -> None:
        handled.append((event.event_type, event.payload["n"]))

    @registry.handler("order.refused", name="billing.refuse")
    async def refuse(event: EventEnvelope) -> None:
        handled.append((event.event_type, event.payload["n"]))

    await Worker(dsn, registry).drain()
    return handled


@pytest.fixture
def logins(postgres_server: SessionServer, dsn: str) -> Iterator[Logins]:
    logins = Logins(postgres_server, dsn)
    logins.create()
    yield logins
    logins.drop()


@pytest.mark.parametrize("as_owner", [True, False], ids=["owner", "roles"])
async def test_the_code_of_0_1_0_starts_with_this_schema(
    dsn: str, conn: asyncpg.Connection, logins: Logins, as_owner: bool
) -> None:
    """OPS-6: while it is replaced it may crash and start again, and whoever goes back finds it working.

    So do logins that have a role and nothing else: what 0.1.0 was granted is granted still.
    """
    await conn.execute("CREATE TABLE booked (n int PRIMARY KEY); GRANT INSERT ON booked TO PUBLIC")
    own = [dsn] * 3 if as_owner else [logins.dsn_of(logins.names[role]) for role in RUNTIME]
    assert "pending: 0" in await run_the_old_release(*own)
    assert await conn.fetchval("SELECT count(*) FROM booked") == 10
    assert await conn.fetchval("SELECT count(*) FROM core.failed") == 3
    async with Operator(dsn, actor="ada") as operator:
        assert (await operator.status()).pending > 0
