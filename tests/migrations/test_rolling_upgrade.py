"""Rolling deploys of Holdfast itself (OPS-6, OBX-3): two releases beside each other, under load, forward and back.

The next release is a copy of this one with a contract of its own, a migration that adds a column, and functions with
one more argument. Its workers run from the copy.
"""

from __future__ import annotations

import asyncio
import signal
import tomllib
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import holdfast
from chaos.releases import NextRelease, make_next
from holdfast import NewEvent, Publisher
from holdfast.errors import SchemaMismatch
from holdfast.installing import package_version
from holdfast.postgres import migrate
from holdfast.postgres.schema.release import load
from tests.worker.support import WorkerProcess, drained, effects, make_tables, process, until

pytestmark = pytest.mark.trust

SQL = Path(holdfast.__file__).parent / "postgres" / "sql"
CONTRACT = load().terms.schema.provides
QUICK: dict[str, Any] = {"lease": 1.0, "poll_interval": 0.5, "concurrency": 10, "connections": 5}


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> NextRelease:
    return make_next(tmp_path_factory.mktemp("next"))


def worker_of(release: NextRelease, dsn: str, **settings: object) -> AbstractAsyncContextManager[WorkerProcess]:
    return process(dsn, "ledger", environment=release.environment, **(QUICK | settings))


# --- load ---


class Load:
    """Events that are numbered from 0."""

    def __init__(self, schema: str = "core") -> None:
        self.published = 0
        self._publisher = Publisher("shop", schema=schema)
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def publish(self, conn: asyncpg.Connection, count: int = 10) -> None:
        events = [NewEvent("order.placed", {"n": n}) for n in range(self.published, self.published + count)]
        async with conn.transaction():
            await self._publisher.publish_many(conn, events)
        self.published += count

    def start(self, dsn: str) -> None:
        """Publish without a pause, until `stop`."""
        self._task = asyncio.create_task(self._run(dsn))

    async def _run(self, dsn: str) -> None:
        conn = await asyncpg.connect(dsn)
        try:
            while not self._ended.is_set():
                await self.publish(conn)
                await asyncio.sleep(0.05)
        finally:
            await conn.close()

    async def stop(self) -> None:
        """Raise what ended it early."""
        self._ended.set()
        if self._task is not None:
            await self._task


async def at_work(conn: asyncpg.Connection, *workers: WorkerProcess) -> None:
    """Wait until each of the workers has handled events from now on."""
    start = await conn.fetchval("SELECT clock_timestamp()")
    query = "SELECT count(DISTINCT worker) FROM outside WHERE at > $1 AND worker = ANY ($2)"
    pids = [worker.pid for worker in workers]

    async def all_of_them() -> bool:
        assert all(worker.process.returncode is None for worker in workers), [worker.errors for worker in workers]
        return int(await conn.fetchval(query, start, pids)) == len(pids)

    await until(all_of_them, what="every worker has handled something")


def faults(worker: WorkerProcess) -> list[object]:
    """What a worker said that it should not have to say because of another release."""
    return [line for line in worker.lines if line.get("level") == "error" or line["told"] in ("loop_failed",)]


async def kill(worker: WorkerProcess) -> None:
    worker.signal(signal.SIGKILL)
    await worker.end()


# --- the tests ---


@pytest.mark.slow
async def test_two_releases_under_load(dsn: str, conn: asyncpg.Connection, next_release: NextRelease) -> None:
    """Migrate, kill and restart both kinds, roll back: nothing lost, nothing failed for good (OPS-6, OBX-3, T13)."""
    await make_tables(conn)
    load = Load()
    async with AsyncExitStack() as stack:
        load.start(dsn)
        stack.push_async_callback(load.stop)

        async def old() -> WorkerProcess:
            return await stack.enter_async_context(process(dsn, "ledger", **QUICK))

        async def new() -> WorkerProcess:
            return await stack.enter_async_context(worker_of(next_release, dsn))

        first, second = await asyncio.gather(old(), old())
        await at_work(conn, first, second)
        done = await migrate.apply(dsn, source=next_release.sql)
        assert [migration.name for migration in done] == ["next"]
        assert await conn.fetchval("SELECT count(*) FROM pg_proc WHERE proname = 'outbox_claim'") == 1
        await at_work(conn, first, second)
        await kill(first)
        restarted, third = await asyncio.gather(old(), new())
        await at_work(conn, second, restarted, third)
        await asyncio.gather(kill(second), kill(third))

        # Back: the old release is deployed again, and its own `migrate apply` finds nothing to do.
        last, fourth = await asyncio.gather(old(), new())
        assert await migrate.apply(dsn) == []
        assert (await migrate.state(dsn)).newer
        fourth.signal(signal.SIGTERM)
        assert await fourth.end() == 0
        await at_work(conn, restarted, last)
        await load.stop()
        await drained(conn)
    assert await effects(conn) == list(range(load.published))
    assert await conn.fetchval("SELECT count(*) FROM core.failed") == 0
    workers = (first, second, restarted, third, last, fourth)
    assert [fault for worker in workers for fault in faults(worker)] == []


@pytest.mark.slow
async def test_beyond_the_window(dsn: str, conn: asyncpg.Connection, next_release: NextRelease) -> None:
    """Code that is too new for the schema names the command, code that is too old names the release (OPS-6, T13)."""
    async with process(dsn, "ledger", started=False, environment=next_release.environment) as early:
        assert await early.end() != 0
    assert f"schema core of contract {CONTRACT} " in early.errors
    assert f"needs contract {CONTRACT + 1} (holdfast 0.{CONTRACT + 1}.0); run holdfast migrate apply" in early.errors

    await migrate.apply(dsn, source=next_release.sql)
    await conn.execute("UPDATE core.contract SET oldest_code = provides, oldest_release = release")
    async with process(dsn, "ledger", started=False) as late:
        assert await late.end() != 0
    assert f"contract {CONTRACT + 1} (holdfast 0.{CONTRACT + 1}.0)" in late.errors
    assert f"needs contract {CONTRACT} " in late.errors
    assert f"install holdfast-outbox 0.{CONTRACT + 1}.0 or later" in late.errors
    with pytest.raises(SchemaMismatch, match=r"install holdfast-outbox .* or later"):
        await migrate.apply(dsn)
    async with worker_of(next_release, dsn):
        pass


async def test_two_applications_and_two_releases_in_one_database(
    dsn: str, conn: asyncpg.Connection, next_release: NextRelease
) -> None:
    """A schema each, one of them of the next release: neither sees the other's events (OPS-6, LSN-17, T30)."""
    await make_tables(conn)
    before = await conn.fetchrow("SELECT * FROM core.contract")
    await migrate.apply(dsn, schema="shop", source=next_release.sql)
    assert await conn.fetchrow("SELECT * FROM core.contract") == before
    assert await conn.fetchval("SELECT provides FROM shop.contract") == CONTRACT + 1
    mine, theirs = Load(), Load("shop")
    await mine.publish(conn, 40)
    await theirs.publish(conn, 60)
    waiting = "SELECT count(*) FROM {}.outbox WHERE settled_at IS NULL"
    async with process(dsn, "ledger", **QUICK) as old:
        await until(lambda: conn.fetchval(f"SELECT ({waiting.format('core')}) = 0"), what="core is settled")
    assert await conn.fetchval(waiting.format("shop")) == 60
    async with worker_of(next_release, dsn, schema="shop") as new:
        await until(lambda: conn.fetchval(f"SELECT ({waiting.format('shop')}) = 0"), what="shop is settled")
    handled = dict(await conn.fetch("SELECT worker, count(*) FROM outside GROUP BY 1"))
    assert handled == {old.pid: 40, new.pid: 60}
    for schema in ("core", "shop"):
        assert await conn.fetchval(f"SELECT count(*) FROM {schema}.failed") == 0
        assert await conn.fetchval(f"SELECT count(*) FROM {schema}.workers") == 1
    await migrate.uninstall(dsn, "shop")
    assert (await migrate.state(dsn)).up_to_date


# --- the terms ---


def test_the_terms_of_this_release_are_a_window() -> None:
    """The schema serves the contract before it, if there is one; each contract it serves has a release (OPS-6)."""
    terms = load().terms
    releases = tomllib.loads((SQL / "contract.toml").read_text())["releases"]
    assert terms.schema.oldest_code == max(1, CONTRACT - 1)
    assert terms.oldest_schema <= CONTRACT
    assert {str(number) for number in range(terms.schema.oldest_code, CONTRACT + 1)} == set(releases)
    assert terms.schema.release == package_version().rpartition(".")[0] + ".0"
