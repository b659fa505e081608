"""A primary that comes back after another server has taken over is not written to (LSN-3, T25)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.embedded import EmbeddedPostgres, usable_data_dir
from holdfast.postgres import migrate
from holdfast.postgres.connection import Address
from holdfast.postgres.faults import OldPrimary
from tests.worker.support import publish, running, terminate, until

pytestmark = pytest.mark.trust

QUICK = {"fsync": "off"}


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[tuple[EmbeddedPostgres, EmbeddedPostgres]]:
    """A server with an event, stopped, and its copy, which has taken over from it and runs."""
    old_folder, new_folder = (usable_data_dir(tmp_path / name) for name in ("old", "new"))
    old = EmbeddedPostgres(old_folder, settings=QUICK, port=free_port())
    try:
        with old:
            await _prepare(old.dsn)
        shutil.rmtree(new_folder, ignore_errors=True)
        subprocess.run(["cp", "-a", old_folder, new_folder], check=True)
        version = next(path for path in new_folder.rglob("PG_VERSION") if (path.parent / "global").is_dir())
        subprocess.run(["cp", "-a", version, version.with_name("standby.signal")], check=True)  # with its owner
        with EmbeddedPostgres(new_folder, settings=QUICK, port=free_port()) as new:
            await _promote(new.dsn)
            yield old, new
    finally:
        for folder in (old_folder, new_folder):
            shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port that stays free while nothing listens there: none that the system hands out for connections."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


async def _prepare(dsn: str) -> None:
    await migrate.apply(dsn)
    connection = await asyncpg.connect(dsn)
    await publish(connection, "order.placed", {"where": "both"})
    await connection.close()


async def _promote(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    assert await connection.fetchval("SELECT pg_promote()")
    await connection.close()


def _both(old: EmbeddedPostgres, new: EmbeddedPostgres) -> str:
    """The address of both servers, the old one first."""
    host = new.dsn.rpartition("@")[2].partition("/")[0]
    return new.dsn.replace(f"@{host}", f"@127.0.0.1:{old.port},{host}")


async def test_worker_stays_with_the_new_primary(servers: tuple[EmbeddedPostgres, EmbeddedPostgres]) -> None:
    """It has connected to the new one; when its connections end, the old one is first in its address (T25)."""
    old, new = servers
    registry, seen = HandlerRegistry(), list[str]()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        seen.append(event.payload["where"])

    conn = await asyncpg.connect(new.dsn)
    async with running(_both(old, new), registry, poll_interval=0.2):
        await until(lambda: seen == ["both"], what="the event on the new primary")
        with old:
            other = await asyncpg.connect(old.dsn)
            await terminate(conn)
            await publish(conn, "order.placed", {"where": "new"})
            await until(lambda: seen == ["both", "new"], what="the event after the connections were lost")
            untouched = await other.fetchrow("SELECT status, attempts FROM core.outbox")
            assert tuple(untouched) == ("pending", 0)
            await other.close()
    await conn.close()


class Server:
    """As much of a connection as the question for the timeline needs."""

    def __init__(self, timeline: str | None) -> None:
        self._timeline = timeline  # None: it does not answer

    async def fetchval(self, _query: str, *, timeout: float) -> str:
        if self._timeline is None:
            async with asyncio.timeout(timeout):
                await asyncio.Event().wait()
        return str(self._timeline)


async def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question has a limit of its own; connections without a statement timeout would wait for ever (T25)."""
    monkeypatch.setattr("holdfast.postgres.connection.CONNECT_TIMEOUT", 0.05)
    address = Address("postgresql://one,two/shop")
    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError):
            await address.require_latest(Server(None), address.dsn)  # type: ignore[arg-type]


async def test_loops_that_find_out_together_turn_the_address_once() -> None:
    """The next connection of each goes to the second host, and not back to the first (T25)."""
    address = Address("postgresql://one:1,two:2/shop")
    dsn = address.dsn
    await address.require_latest(Server("00000002"), dsn)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(OldPrimary):
            await address.require_latest(Server("00000001"), dsn)  # type: ignore[arg-type]
    assert address.dsn == "postgresql://two:2,one:1/shop"
