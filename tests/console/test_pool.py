"""The pool of operators that pages and requests share (OPS-2, OPS-3)."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from holdfast.access.principal import Principal, Role
from holdfast.embedded import EmbeddedPostgres
from holdfast.errors import ConfigurationError
from holdfast.operator import DatabaseAway, Operators, OperatorsBusy, ReadTimeout
from tests.operator.support import driver_of
from tests.worker.support import until


async def test_connections_are_used_again_and_the_audit_has_the_name_of_each(
    dsn: str, conn: asyncpg.Connection
) -> None:
    """One connection serves callers one after the other, each under a name of its own (OPS-2)."""
    async with Operators(dsn) as operators:
        backends = set()
        for actor in ("ann@example.org", "bob@example.org"):
            async with operators.acting(actor) as operator:
                await operator.generations.begin(reason="a deployment")
                backends.add(driver_of(operator).get_server_pid())
    assert len(backends) == 1
    assert [row["actor"] for row in await conn.fetch("SELECT actor FROM core.audit ORDER BY id")] == [
        "ann@example.org",
        "bob@example.org",
    ]


async def test_who_waits_too_long_for_a_connection_is_told(dsn: str) -> None:
    """No caller waits without an end, and the connection that comes back serves the next one (OPS-3)."""
    async with Operators(dsn, size=1, wait=0.2) as operators:
        async with operators.acting("ann"):
            with pytest.raises(OperatorsBusy, match="all 1 connections"):
                async with operators.acting("bob"):
                    pytest.fail("there is no second connection")
        async with operators.acting("bob") as operator:
            assert (await operator.status()).pending == 0


async def test_a_read_has_a_limit_of_its_own_and_a_change_has_not(dsn: str) -> None:
    """A slow read ends with a typed error and a remedy; the connection stays usable (OPS-3)."""
    async with Operators(dsn, size=1, read_timeout=0.2) as operators:
        async with operators.acting("ann") as operator:
            backend = driver_of(operator).get_server_pid()
            with pytest.raises(ReadTimeout, match=r"longer than 0.2 s .*narrow it"):
                async with operator._session.reading() as statements:
                    await statements.connection.fetch("SELECT pg_catalog.pg_sleep(30)")
            async with operator._session.changing("note") as statements:
                await statements.connection.fetch("SELECT pg_catalog.pg_sleep(0.4)")
        async with operators.acting("ann") as operator:
            await operator.status()
            assert driver_of(operator).get_server_pid() == backend


async def test_a_read_ends_also_where_the_server_does_not_end_it(dsn: str) -> None:
    """Many statements, each short enough, or a server that is out of reach (OPS-3)."""
    async with Operators(dsn, size=1, read_timeout=0.1) as operators:
        with pytest.raises(ReadTimeout):
            async with operators.acting("ann") as operator, operator._session.reading() as statements:
                while True:
                    await statements.connection.fetch("SELECT pg_catalog.pg_sleep(0.05)")
        async with operators.acting("ann") as operator:
            await operator.status()


async def test_a_cancelled_caller_leaves_no_transaction_behind(dsn: str, conn: asyncpg.Connection) -> None:
    """Who closes the browser in the middle of a change takes nothing from the next one (OPS-3)."""
    async with Operators(dsn, size=1) as operators:
        entered = asyncio.Event()

        async def change() -> None:
            async with operators.acting("ann") as operator, operator._session.changing("note") as statements:
                entered.set()
                await statements.connection.fetch("SELECT pg_catalog.pg_sleep(30)")

        changing = asyncio.create_task(change())
        await entered.wait()
        changing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await changing
        async with operators.acting("bob") as operator:
            assert not driver_of(operator).is_in_transaction()
            await operator.status()
    ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'holdfast operator%'"
    assert await conn.fetchval(f"{ours} AND state LIKE 'idle in%'") == 0


async def test_a_session_that_was_ended_is_replaced(dsn: str, conn: asyncpg.Connection) -> None:
    """The caller after the fault notices nothing, and who was in the middle gets a typed error (OPS-2)."""
    async with Operators(dsn, size=1) as operators:
        with pytest.raises(DatabaseAway, match="look at the audit"):
            async with operators.acting("ann") as operator:
                await operator.status()
                await conn.execute("SELECT pg_terminate_backend($1)", driver_of(operator).get_server_pid())
                await operator.status()
        async with operators.acting("ann") as operator:
            await operator.status()
            pid = driver_of(operator).get_server_pid()
        await conn.execute("SELECT pg_terminate_backend($1)", pid)
        await until(lambda: not operators._idle[0][0].idle)
        async with operators.acting("ann") as operator:
            await operator.status()


async def test_the_pool_comes_back_by_itself_after_the_database_was_away(
    own_server: EmbeddedPostgres, own_dsn: str
) -> None:
    """While there is no database every caller gets an error soon, and the first after it is served (OPS-2)."""
    async with Operators(own_dsn) as operators:
        async with operators.acting("ann") as operator:
            await operator.status()
        await asyncio.to_thread(own_server.kill)
        for _ in range(2):
            with pytest.raises(DatabaseAway) as away:
                async with operators.acting("ann") as operator:
                    await operator.status()
            assert "127.0.0.1" not in str(away.value) and "postgres" not in str(away.value)
        await asyncio.to_thread(own_server.start)

        async def served() -> bool:
            try:
                async with operators.acting("ann") as operator:
                    await operator.status()
            except DatabaseAway:
                return False
            return True

        async with asyncio.timeout(20):
            while not await served():
                pass


async def test_a_closed_pool_lends_nothing(dsn: str) -> None:
    """A request that comes while the process shuts down opens no connection (OPS-3)."""
    operators = Operators(dsn)
    async with operators.acting("ann"):
        await operators.close()
    assert not operators._idle
    with pytest.raises(DatabaseAway, match="closed"):
        async with operators.acting("ann"):
            pytest.fail("it is closed")


def test_roles_are_in_order_and_unknown_ones_are_refused() -> None:
    """An operator may do what a viewer may, and no name is taken for a role by accident (OPS-2)."""
    ann = Principal("ann", Role.OPERATOR)
    assert ann.may(Role.VIEWER) and ann.may(Role.OPERATOR) and not ann.may(Role.ADMIN)
    assert Role.named("admin") is Role.ADMIN
    for name in ("Admin", "", "root", "3"):
        with pytest.raises(ConfigurationError, match="viewer, operator, admin"):
            Role.named(name)
    with pytest.raises(ConfigurationError):
        Principal("ann\nbob", Role.VIEWER)
