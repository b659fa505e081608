"""Frozen workers: their transactions end within two leases, their unread notifications do not pile up."""

from __future__ import annotations

import asyncio
import signal
import time
from datetime import timedelta
from uuid import uuid4

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.postgres.doctor import Limits, examine
from tests.worker.support import Facts, make_tables, process, publish, running, settled, until

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

LEASE = 2.0


def charging(runs: list[str], seconds: float = 0.0) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        runs.append("began")
        await tx.execute("INSERT INTO ledger (handler, n) VALUES ('other', $1)", event.payload["n"])
        await asyncio.sleep(seconds)

    return registry


@pytest.mark.slow
async def test_the_row_lock_of_a_frozen_worker_ends(dsn: str, conn: asyncpg.Connection) -> None:
    """SIGSTOP in a handler's transaction; another worker has the row within 2 x lease (LSN-3, T20)."""
    await make_tables(conn)
    runs: list[str] = []
    facts = Facts()
    settings = {"lease": LEASE, "poll_interval": 0.3}
    async with process(dsn, "ledger", **settings) as frozen:
        identity = await publish(conn, "order.placed", {"n": 1, "seconds": 30})
        await until(lambda: conn.fetchval("SELECT count(*) FROM outside"), what="its handler runs")
        async with running(dsn, charging(runs), facts, **settings):
            frozen.signal(signal.SIGSTOP)
            stopped = time.monotonic()
            await settled(conn, identity, within=2 * LEASE + 5)
            took = time.monotonic() - stopped
            frozen.signal(signal.SIGCONT)
        frozen.signal(signal.SIGTERM)
        assert await frozen.end() == 0
    assert took < 2 * LEASE + 1, "a busy machine is granted a second"
    assert [row["handler"] for row in await conn.fetch("SELECT handler FROM ledger")] == ["other"]
    assert facts.notices("session_ended")


@pytest.mark.slow
async def test_a_slow_handler_of_a_living_worker_is_left_alone(dsn: str, conn: asyncpg.Connection) -> None:
    """Its row's lease ends while its transaction has the lock, and its worker's lease does not (LSN-3)."""
    await make_tables(conn)
    runs: list[str] = []
    facts = Facts()
    settings = {"lease": 1.0, "poll_interval": 0.1}
    async with (
        running(dsn, charging(runs, seconds=3.0), facts, **settings),
        running(dsn, charging(runs, seconds=3.0), facts, **settings),
    ):
        identity = await publish(conn, "order.placed", {"n": 1})
        await settled(conn, identity)
    assert runs == ["began"]
    assert not facts.notices("session_ended")


async def test_a_frozen_listener_is_named_and_evicted(dsn: str, conn: asyncpg.Connection) -> None:
    """doctor names the session in ClientWrite, a living worker ends it, and vacuum goes on (LSN-2, T19)."""
    worker = uuid4()
    name = f"holdfast listen {worker}"
    frozen = await asyncpg.connect(dsn, server_settings={"application_name": name})
    await frozen.add_listener("outbox_default", lambda *_: None)
    beat = "SELECT core.worker_beat($1, 'frozen:1', 'frozen', 1, '1', 0, '{outbox_default}', '{}')"
    await conn.execute(beat, worker)
    await conn.execute("SELECT core.worker_alive($1, interval '1 minute')", worker)
    frozen._transport.pause_reading()
    state = "SELECT wait_event FROM pg_stat_activity WHERE application_name = $1"
    for _ in range(20):  # until the buffers of both sides are full
        await conn.execute("SELECT pg_notify('outbox_default', repeat('x', 7000) || n) FROM generate_series(1, 1000) n")
        if await conn.fetchval(state, name) == "ClientWrite":
            break
    await until(lambda: _is(conn, state, name, "ClientWrite"), what="it is blocked")
    report = await examine(conn, only="health", limits=Limits(frozen=timedelta(0)))
    found = [finding for finding in report.findings if finding.code == "listener-frozen"]
    assert [name in finding.evidence for finding in found] == [True]
    async with running(dsn, charging([]), lease=1.0):
        await conn.execute("UPDATE core.workers SET lease_expires_at = now() - interval '1 hour' WHERE id = $1", worker)
        gone = "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = $1"
        await until(lambda: conn.fetchval(gone, name), within=5, what="it is ended")
    holding = "SELECT count(*) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()"
    await until(lambda: _is(conn, holding, None, 0), what="nothing keeps vacuum from its work")
    frozen.terminate()


async def _is(conn: asyncpg.Connection, query: str, value: str | None, wanted: object) -> bool:
    return bool(await (conn.fetchval(query, value) if value else conn.fetchval(query)) == wanted)
