"""Advisory locks that any login of the database can hold (SEC-1, LSN-2, T11)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.operator import Operator
from holdfast.postgres import migrate
from holdfast.postgres.schema import ddl
from holdfast.postgres.wakeup import mode
from tests.logins import Logins
from tests.outbox import CHANNEL
from tests.worker.support import publish, running, until

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

WAKE_UP = f"core.{CHANNEL}"
SLEEPER = f"{WAKE_UP}/sleeper"
MIGRATION = "holdfast migrate core"


@pytest.fixture
async def stranger(logins: Logins) -> AsyncIterator[asyncpg.Connection]:
    """A session without any right in the schema, which says that it is one of ours."""
    settings = {"application_name": "holdfast sleeper"}
    connection = await asyncpg.connect(logins.dsn_of(logins.names["stranger"]), server_settings=settings)
    yield connection
    await connection.close()


async def hold(session: asyncpg.Connection, *names: str, shared: bool = False) -> None:
    for name in names:
        await session.execute(f"SELECT pg_advisory_lock{'_shared' if shared else ''}(hashtextextended($1, 0))", name)


@pytest.mark.parametrize("locks", ["sleeper", "wake-up", "both", "wake-up, shared"])
async def test_a_foreign_lock_delays_no_wake_up_beyond_a_second(
    dsn: str, conn: asyncpg.Connection, stranger: asyncpg.Connection, locks: str
) -> None:
    """Whichever of the two it is, with a polling interval of a minute; doctor names the holder (T11)."""
    names = {"sleeper": [SLEEPER], "both": [SLEEPER, WAKE_UP]}.get(locks, [WAKE_UP])
    await hold(stranger, *names, shared="shared" in locks)
    registry, handled = HandlerRegistry(), asyncio.Event()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        handled.set()

    async with running(dsn, registry, poll_interval=60.0) as worker:
        await until(lambda: worker.counters.claims >= 2, what="the worker is idle")
        for _ in range(2):
            handled.clear()
            await publish(conn, "order.placed", {})
            started = time.monotonic()
            async with asyncio.timeout(5):
                await handled.wait()
            assert time.monotonic() - started < 1.5, "a second, and what a busy machine adds"
        async with Operator(dsn, actor="ann@example.org") as operator:
            found = [each for each in (await operator.doctor()).findings if each.code == "lock-foreign"]
    if "shared" not in locks:
        assert len(found) == len(names)
        assert all(f"pid {stranger.get_server_pid()}, login login_stranger" in each.evidence for each in found)


async def test_a_foreign_lock_on_schema_changes_is_named(
    dsn: str, stranger: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that need it end within 30 s and say who has it (T11)."""
    assert ddl.FOREIGN_PATIENCE <= 20
    monkeypatch.setattr(ddl, "FOREIGN_PATIENCE", 0.5)
    monkeypatch.setattr(ddl, "_BETWEEN_QUESTIONS", 0.1)
    await stranger.execute("SET application_name = 'holdfast migrate'")
    await hold(stranger, MIGRATION)
    holder = f"pid {stranger.get_server_pid()}, login login_stranger"
    async with asyncio.timeout(20):
        for command in (migrate.apply(dsn), mode.set_mode(dsn, "always"), migrate.uninstall(dsn)):
            with pytest.raises(migrate.MigrationRefused, match=holder):
                await command
    async with Operator(dsn, actor="ann@example.org") as operator:
        [found] = [each for each in (await operator.doctor()).findings if each.code == "lock-foreign"]
    assert found.object == "lock of schema changes"
    assert holder in found.evidence


async def test_another_migration_is_waited_for(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is entitled to the lock may take its time (T11, OBX-3)."""
    monkeypatch.setattr(ddl, "FOREIGN_PATIENCE", 0.2)
    monkeypatch.setattr(ddl, "_BETWEEN_QUESTIONS", 0.05)
    other = await asyncpg.connect(dsn, server_settings={"application_name": "holdfast migrate"})
    await hold(other, MIGRATION)
    applying = asyncio.create_task(migrate.apply(dsn))
    await asyncio.sleep(1)
    assert not applying.done()
    await other.close()
    assert await applying == []
