"""Limits and breakers while workers are killed: real processes, real signals."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

import asyncpg
import pytest

from tests.worker.support import WorkerProcess, drained, make_tables, process, publish_many, until

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"lease": 2.0, "poll_interval": 1.0, "concurrency": 10}


async def kill(worker: WorkerProcess) -> None:
    worker.signal(signal.SIGKILL)
    assert await worker.end() == -signal.SIGKILL


async def test_seven_at_once_over_five_workers_with_kills(dsn: str, conn: asyncpg.Connection) -> None:
    """Never more than seven run, all seven places are used, and those of the killed come back (LSN-10, A1)."""
    await conn.execute("""CREATE TABLE runs (event_id uuid, attempt int, worker int,
                          began_at timestamptz DEFAULT clock_timestamp(), ended_at timestamptz)""")
    killed: list[int] = []
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(process(dsn, "limited", **SETTINGS)) for _ in range(5)]
        await publish_many(conn, "order.placed", 400)
        by_pid = {worker.pid: worker for worker in workers}
        at_work = "SELECT worker FROM runs WHERE ended_at IS NULL ORDER BY began_at DESC LIMIT 1"
        for _ in range(2):  # whoever is at work: one worker may have all seven places
            victim = by_pid.pop(await until(lambda: conn.fetchval(at_work), what="somebody is at work"))
            await kill(victim)
            # What it had begun has ended with it, whatever the table says.
            await conn.execute(
                "UPDATE runs SET ended_at = clock_timestamp() WHERE worker = $1 AND ended_at IS NULL", victim.pid
            )
            killed.append(victim.pid)
        await drained(conn, within=60)
    # At each beginning: how many had begun and not ended.
    at_once = await conn.fetch(
        """SELECT (SELECT count(*) FROM runs r WHERE r.began_at <= t.began_at AND r.ended_at > t.began_at) AS n
           FROM runs t"""
    )
    assert max(row["n"] for row in at_once) == 7
    assert len(killed) == 2
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 400


async def test_an_outage_with_a_kill(dsn: str, conn: asyncpg.Connection) -> None:
    """500 events are due while the partner is away; none is lost or a dead letter, with few calls (LSN-17)."""
    await make_tables(conn)
    await conn.execute("CREATE TABLE partner ()")
    await publish_many(conn, "order.placed", 500)
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(process(dsn, "partner", **SETTINGS)) for _ in range(3)]
        await until(lambda: conn.fetchval("SELECT failed_probes >= 2 FROM core.handler_flow"))
        await kill(workers[0])
        probes = await conn.fetchval("SELECT failed_probes FROM core.handler_flow")
        await until(lambda: conn.fetchval("SELECT failed_probes > $1 FROM core.handler_flow", probes))
        calls = await conn.fetchval("SELECT count(*) FROM outside")
        # Three workers with ten at once, five more of each before it stops, and the probes.
        assert calls <= 3 * 15 + 20
        await conn.execute("INSERT INTO partner DEFAULT VALUES")
        await drained(conn, within=60)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 500
    assert await conn.fetchval("SELECT count(*) FROM core.archive") == 0
    calls = await conn.fetchval("SELECT count(*) FROM outside")
    assert calls <= 500 + 3 * 15 + 40
    actions = await conn.fetch("SELECT action, actor FROM core.audit ORDER BY id")
    assert actions[0]["action"] == "breaker.open"
    assert actions[-1]["action"] == "breaker.close"
    assert {row["actor"] for row in actions} == {"system"}
