"""A database that is brought back, by pg_dump or to a point in time (OPS-4, OPS-6, IDM-1): what the runbook promises.

The shop has what a backup has to bring back: events that are handled, open, and in flight; keys; a schedule.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.embedded import EmbeddedPostgres, find_binaries, usable_data_dir
from holdfast.embedded.account import server_account
from holdfast.idempotency import Commands
from holdfast.postgres import migrate
from tests.docs.support import ROOT, blocks
from tests.worker.support import make_tables, publish, running, until
from tests.worker.test_old_primary import free_port

pytestmark = pytest.mark.timeout(180)

HELD = 50  # its handler runs at the target, and ends after it
THROUGH = 51  # its handler runs through the recovery
OPEN = "SELECT count(*) FROM core.outbox WHERE settled_at IS NULL AND event_type LIKE 'order.%'"


class Shop:
    """An application, and what it has done outside of the database."""

    def __init__(self) -> None:
        self.mails: Counter[int] = Counter()
        self.ticks: Counter[str] = Counter()
        self.releases = {HELD: asyncio.Event(), THROUGH: asyncio.Event()}
        self.registry = registry = HandlerRegistry()
        self.commands = Commands({1: "a secret of sixteen bytes or more"})
        registry.schedule("clock.ticked", name="clock.tick", every=timedelta(seconds=1))

        @registry.handler("order.placed", name="billing.charge")
        async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            await tx.execute("INSERT INTO ledger (handler, n) VALUES ('billing.charge', $1)", event.payload["n"])

        @registry.handler("order.mailed", name="mail.send")
        async def send(event: EventEnvelope) -> None:
            self.mails[event.payload["n"]] += 1
            if (release := self.releases.get(event.payload["n"])) is not None:
                await release.wait()

        @registry.handler("clock.ticked", name="clock.note")
        async def note(event: EventEnvelope) -> None:
            self.ticks[event.occurred_at.isoformat()] += 1

    async def publish(self, conn: asyncpg.Connection, numbers: range) -> None:
        for n in numbers:
            await publish(conn, "order.placed", {"n": n})
            await publish(conn, "order.mailed", {"n": n})

    async def command(self, conn: asyncpg.Connection, key: str, result: str) -> str:
        """Carry a command out once for each key; a repetition has the first result."""
        async with conn.transaction():
            found: str = await self.commands.run(conn, key, {"for": key}, lambda: _later(result))
            return found

    async def until_handled(self, conn: asyncpg.Connection, left: int = 0) -> None:
        async def handled() -> bool:
            return bool(await conn.fetchval(OPEN) == left)

        await until(handled, what=f"{left} orders are open")

    async def is_whole(self, conn: asyncpg.Connection, worker: Any, through: int = 0) -> None:
        """What was committed before the backup or the target is there, counts once, and everything goes on."""
        await self.until_handled(conn, left=through)
        booked = Counter(row["n"] for row in await conn.fetch("SELECT n FROM ledger"))
        assert booked == Counter(range(10)), "each once; what was committed later is gone"
        assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE event_type = 'order.mailed'") == 11 + through
        assert {n: self.mails[n] for n in (*range(10), HELD)} == {**dict.fromkeys(range(10), 1), HELD: 2}, (
            "what was handled before is not handled again; what was in flight is, when its lease has expired"
        )
        assert await self.command(conn, "before", "again") == "first"
        assert await self.command(conn, "after", "again") == "again", "a key of the time after it is free"
        await until(lambda: worker.health().ready and worker.health().listener == "listening", what="it listens")
        began = asyncio.get_running_loop().time()
        await publish(conn, "order.mailed", {"n": 100})
        await until(lambda: self.mails[100] == 1, within=10, what="an event of the time after it")
        assert asyncio.get_running_loop().time() - began < 8, "a wake-up, and not a poll of thirty seconds"
        fired = await conn.fetchval("SELECT fired FROM core.schedules")
        await until(lambda: conn.fetchval("SELECT fired > $1 FROM core.schedules", fired), what="a tick")


async def _later(result: str) -> str:
    return result


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path, Path]]:
    """Of the server, of the one that is restored, and of the archive, which the server's user may write to."""
    live, restored, archive = (usable_data_dir(tmp_path / name) for name in ("live", "restored", "archive"))
    archive.mkdir(parents=True)
    own(archive)
    yield live, restored, archive
    for folder in (live, restored, archive):
        shutil.rmtree(folder, ignore_errors=True)


def own(path: Path) -> None:
    """Give a path, with all that is in it, to the user that the server runs as."""
    account = server_account()
    if account.uid is not None:
        for each in (path, *path.rglob("*")):
            os.chown(each, account.uid, account.gid if account.gid is not None else -1)


def recovery(archive: Path, **more: str) -> dict[str, str]:
    """The settings of the runbook, with its directory replaced."""
    page = blocks("text", pages=[ROOT / "docs" / "runbooks" / "backup-and-restore.md"])
    lines = [line for block in page for line in block.text.splitlines() if " = " in line]
    settings = {name: value.strip("'") for name, value in (line.split(" = ", 1) for line in lines)}
    return {name: more.get(name, value).replace("/srv/archive", str(archive)) for name, value in settings.items()}


def programs(server: EmbeddedPostgres) -> dict[str, Any]:
    parts = urlsplit(server.dsn)
    connection = {"PGHOST": parts.hostname, "PGPORT": parts.port, "PGUSER": parts.username, "PGDATABASE": "postgres"}
    password = {"PGPASSWORD": unquote(parts.password or "")}
    return {"env": {**os.environ, **{name: str(value) for name, value in (connection | password).items()}}}


@pytest.mark.slow
async def test_to_a_point_in_time(folders: tuple[Path, Path, Path]) -> None:
    """A base backup and the archive of WAL; the workers run through it and need no restart (OPS-6)."""
    live, restored, archive = folders
    settings, shop, port = recovery(archive), Shop(), free_port()
    archiving = {name: settings[name] for name in ("wal_level", "archive_mode", "archive_command")}
    server = EmbeddedPostgres(live, settings={"fsync": "off", **archiving}, port=port)
    with server:
        await migrate.apply(server.dsn)
        conn = await asyncpg.connect(server.dsn)
        await make_tables(conn)
        async with running(server.dsn, shop.registry, lease=2.0, poll_interval=30.0) as worker:
            await shop.publish(conn, range(5))
            await shop.until_handled(conn)
            await asyncio.to_thread(base_backup, server, live, restored)
            await shop.publish(conn, range(5, 10))
            await shop.until_handled(conn)
            await publish(conn, "order.mailed", {"n": HELD})
            await publish(conn, "order.mailed", {"n": THROUGH})
            await until(lambda: shop.mails[HELD] == shop.mails[THROUGH] == 1, what="two are in flight")
            assert await shop.command(conn, "before", "first") == "first"
            target = str(await conn.fetchval("SELECT clock_timestamp()"))
            shop.releases[HELD].set()
            await shop.publish(conn, range(20, 25))
            await shop.until_handled(conn, left=1)
            assert await shop.command(conn, "after", "first") == "first"
            wal = await conn.fetchval("SELECT pg_walfile_name(pg_switch_wal())")
            archived = "SELECT last_archived_wal >= $1 FROM pg_stat_archiver"
            await until(lambda: conn.fetchval(archived, wal), what="the archive has it")
            conn.terminate()
            await asyncio.to_thread(server.stop, "immediate")
            restoring = recovery(archive, recovery_target_time=target)
            with EmbeddedPostgres(restored, settings={"fsync": "off", **restoring}, port=port) as again:
                conn = await asyncpg.connect(again.dsn)
                await until(lambda: conn.fetchval("SELECT NOT pg_is_in_recovery()"), what="it has recovered")
                await shop.is_whole(conn, worker, through=1)
                shop.releases[THROUGH].set()
                await shop.until_handled(conn)
                assert shop.mails[THROUGH] == 1, "its lease was renewed when the worker was back, and it ran once"
                assert all(shop.mails[n] == 1 for n in range(20, 25)), "of these only the effects outside are left"
                worker.stop()
                await until(lambda: worker.health().state == "stopped", what="it has stopped")
                await conn.close()


def base_backup(server: EmbeddedPostgres, live: Path, restored: Path) -> None:
    """The directory of a server again, with a base backup as its data."""
    shutil.copytree(live, restored, symlinks=True, ignore=shutil.ignore_patterns("cluster", "socket"))
    command = [find_binaries().program("pg_basebackup"), "--pgdata", str(restored / "cluster"), "--checkpoint=fast"]
    subprocess.run(command, check=True, capture_output=True, **programs(server))
    (restored / "cluster" / "recovery.signal").touch()
    own(restored / "cluster")


@pytest.mark.slow
async def test_from_a_dump(dsn: str, empty_dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """Taken while workers run; a worker of the restored database does the rest (OPS-4)."""
    shop, tools = Shop(), find_binaries()
    await make_tables(conn)
    async with running(dsn, shop.registry, lease=2.0, poll_interval=30.0):
        await shop.publish(conn, range(10))
        await shop.until_handled(conn)
        await publish(conn, "order.mailed", {"n": HELD})
        await until(lambda: shop.mails[HELD] == 1, what="one is in flight")
        assert await shop.command(conn, "before", "first") == "first"
        dump = [tools.program("pg_dump"), "--format=custom", f"--file={tmp_path / 'shop.dump'}", dsn]
        await asyncio.to_thread(subprocess.run, dump, check=True, capture_output=True)
        shop.releases[HELD].set()
        await shop.publish(conn, range(20, 25))
        await shop.until_handled(conn)
        assert await shop.command(conn, "after", "first") == "first"
    restore = [tools.program("pg_restore"), "--exit-on-error", f"--dbname={empty_dsn}", str(tmp_path / "shop.dump")]
    await asyncio.to_thread(subprocess.run, restore, check=True, capture_output=True)
    restored = await asyncpg.connect(empty_dsn)
    async with running(empty_dsn, shop.registry, lease=2.0, poll_interval=30.0) as worker:
        await shop.is_whole(restored, worker)
    assert all(shop.mails[n] == 1 for n in range(20, 25)), "of these only the effects outside are left"
    await restored.close()
