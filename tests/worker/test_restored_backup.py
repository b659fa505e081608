"""A backup of an earlier time takes the place of the database while workers run (LSN-3, OPS-6, T24)."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy
from holdfast.embedded import EmbeddedPostgres, usable_data_dir
from holdfast.postgres import migrate
from tests.worker.support import drained, make_tables, publish, running, until
from tests.worker.test_old_primary import free_port

pytestmark = pytest.mark.trust

QUICK = {"fsync": "off"}


@pytest.mark.slow
async def test_schedules_that_are_younger_than_the_backup_go_on(tmp_path: Path) -> None:
    """A worker that runs declares them again, and fires them under the backup (T24, IDM-4)."""
    folder, backup = (usable_data_dir(tmp_path / name) for name in ("live", "backup"))
    registry, runs, port = HandlerRegistry(), Counter[str](), free_port()
    registry.schedule("clock.ticked", name="clock.tick", every=timedelta(seconds=1))

    @registry.handler("clock.ticked", name="clock.note")
    async def note(event: EventEnvelope) -> None:
        runs["ticks"] += 1

    try:
        server = EmbeddedPostgres(folder, settings=QUICK, port=port)
        with server:
            await migrate.apply(server.dsn)
            async with running(server.dsn, handlers_of(registry)):
                pass
        subprocess.run(["cp", "-a", folder, backup], check=True)
        server.start()
        async with running(server.dsn, registry, poll_interval=0.2, lease=2.0):
            await until(lambda: runs["ticks"] > 0, what="a tick")
            server.stop("immediate")
            shutil.rmtree(folder)
            subprocess.run(["cp", "-a", backup, folder], check=True)
            server.start()
            conn = await asyncpg.connect(server.dsn)
            assert await conn.fetchval("SELECT count(*) FROM core.subscriptions") == 1
            ticks = runs["ticks"]
            await until(lambda: runs["ticks"] > ticks, within=20, what="a tick under the backup")
            assert await conn.fetchval("SELECT fired FROM core.schedules WHERE name = 'clock.tick'") > 0
            await conn.close()
        server.stop()
    finally:
        for each in (folder, backup):
            shutil.rmtree(each, ignore_errors=True)


def handlers_of(registry: HandlerRegistry) -> HandlerRegistry:
    """The registry before it had schedules."""
    earlier = HandlerRegistry()
    for handler in registry:
        earlier.add(handler.name, handler.event_types, handler.function)
    return earlier


@pytest.mark.slow
async def test_every_event_of_the_backup_is_delivered(tmp_path: Path) -> None:
    """What was open in the backup is handled under it, and counts once there; workers need no restart (T24)."""
    folder, backup = (usable_data_dir(tmp_path / name) for name in ("live", "backup"))
    registry, runs, port = HandlerRegistry(), Counter[int](), free_port()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(max_attempts=100))
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        runs[event.payload["n"]] += 1
        await tx.execute("INSERT INTO ledger (handler, n) VALUES ('billing.charge', $1)", event.payload["n"])

    @registry.handler("order.noted", name="billing.note")
    async def note(event: EventEnvelope) -> None:
        runs[event.payload["n"]] += 1

    try:
        server = EmbeddedPostgres(folder, settings=QUICK, port=port)
        with server:
            await migrate.apply(server.dsn)
            conn = await asyncpg.connect(server.dsn)
            await make_tables(conn)
            for n in range(20):
                await publish(conn, ("order.placed", "order.noted")[n % 2], {"n": n})
            await conn.close()
        subprocess.run(["cp", "-a", folder, backup], check=True)
        server.start()
        async with running(server.dsn, registry, poll_interval=0.2, lease=2.0):
            conn = await asyncpg.connect(server.dsn)
            await drained(conn)
            for n in range(20, 30):  # these are gone with the database
                await publish(conn, "order.placed", {"n": n})
            conn.terminate()
            server.stop("immediate")
            shutil.rmtree(folder)
            subprocess.run(["cp", "-a", backup, folder], check=True)
            server.start()
            conn = await asyncpg.connect(server.dsn)
            await drained(conn, within=30)
            booked = Counter(row["n"] for row in await conn.fetch("SELECT n FROM ledger"))
            assert booked == Counter(range(0, 20, 2))
            assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 20
            await publish(conn, "order.placed", {"n": 100})
            await until(lambda: runs[100] == 1, what="an event of the time after it")
            await conn.close()
        server.stop()
    finally:
        for each in (folder, backup):
            shutil.rmtree(each, ignore_errors=True)
    assert all(runs[n] >= 2 for n in range(20)), "each ran before the backup was restored, and after it"
