"""A worker that drains, is blocked or has stopped (OBS-3, LSN-4, OPS-1): its row and its health say what it is."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import asyncpg
import pytest

from holdfast import HandlerRegistry
from holdfast.operator import Operator, Refused
from holdfast.worker import connections, heartbeat, listener
from tests.observability.support import Command, worker_command
from tests.observability.test_health import registry, seen_by_a_thread
from tests.operator.support import ACTOR
from tests.worker.support import Facts, publish, running, until

__all__ = ["registry"]

pytestmark = pytest.mark.abandons_leases

AGE = "UPDATE core.workers SET heartbeat_at = now() - interval '61 s'"
IS_LIVING = "SELECT bool_and(core.is_living(heartbeat_at)) FROM core.workers WHERE stopped_at IS NULL"
LISTED = "SELECT count(*) FROM core.workers WHERE stopped_at IS NULL"


@pytest.mark.slow
async def test_a_frozen_process_does_not_keep_its_parent(dsn: str, tmp_path: Path) -> None:
    """What has not ended some time after the grace is killed, and the exit status tells (LSN-4, OPS-1)."""
    source = "from holdfast.cli import main, worker; worker._LIMIT_PAST_GRACE = 1.0; main()"
    (tmp_path / "hf_handlers.py").write_text(
        "from holdfast import HandlerRegistry\nregistry = HandlerRegistry()\n"
        "@registry.handler('shop.waited', name='shop.wait')\nasync def wait(event): pass\n"
    )
    arguments = ("worker", "hf_handlers:registry", "--processes", "2", "--grace", "1")
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", source, *arguments),
            cwd=tmp_path,
            stderr=log,
            env={**os.environ, "HOLDFAST_DSN": dsn, "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")},
        )
    command = Command(process, tmp_path)
    frozen = 0
    try:
        await until(lambda: len(command.log("worker_started")) == 2, within=60, what="both have started")
        frozen = command.children()[0]
        os.kill(frozen, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert await command.ended(within=10) == 1
        (killed,) = command.log("worker_killed")
        assert (killed["pid"], killed["level"]) == (frozen, "error") and "leases expire" in killed["remedy"]
        assert len(command.log("worker_stopped")) == 1 and command.log("supervisor_stopped")
        assert not Path(f"/proc/{frozen}").exists()
    finally:
        if process.returncode is None:
            for pid in [*command.children(), process.pid]:
                os.kill(pid, signal.SIGKILL)
        await process.wait()


@pytest.mark.slow
async def test_a_draining_worker_lives(dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry) -> None:
    """Heartbeats go on until the last handler has ended, so its events are not released meanwhile (LSN-4, OPS-1)."""
    async with Operator(dsn, actor=ACTOR) as operator, running(dsn, registry, lease=1.5, grace=30) as worker:
        await publish(conn, "shop.waited", {"s": 4})
        await until(lambda: worker.in_flight, what="a handler runs")
        await until(lambda: conn.fetchval(LISTED), what="it is listed")
        worker.stop()
        await until(lambda: worker._parts.connections.listen._connection is None, what="its loops have ended")
        await conn.execute(AGE)
        await until(lambda: conn.fetchval(IS_LIVING), within=2, what="a heartbeat")
        assert worker.health().state == "draining"
        with pytest.raises(Refused, match=r"was heard of \d+ s ago"):
            await operator.workers.release(worker.id)
    assert worker.counters.delivered == 1 and await conn.fetchval(LISTED) == 0


async def test_heartbeats_do_not_wait_for_long_leases(
    dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat counts for a minute, and a lease may be an hour (OBS-3)."""
    monkeypatch.setattr(heartbeat, "_INTERVAL", 0.2)
    async with running(dsn, registry, lease=3600):
        await until(lambda: conn.fetchval(LISTED), what="it is listed")
        await conn.execute(AGE)
        await until(lambda: conn.fetchval(IS_LIVING), within=5, what="a heartbeat")


@pytest.mark.slow
async def test_a_blocked_worker_lives(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """While a handler blocks the event loop, its leases are extended, and its heartbeats go on (OBS-3, OPS-1)."""
    async with worker_command(dsn, tmp_path, "--health", "0", "--lease", "1.5") as worker:
        await until(lambda: conn.fetchval(LISTED), what="it is listed")
        await publish(conn, "shop.slept", {"s": 8})
        await until(lambda: worker.log("loop_blocked"), what="the loop is blocked")
        await conn.execute(AGE)
        await until(lambda: conn.fetchval(IS_LIVING), within=2, what="a heartbeat")
        assert (await worker.asked("live"))[1]["loop_silent_s"] > 2


@pytest.mark.slow
async def test_a_drain_that_lasts_longer_than_sessions_may_be_idle(
    dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker still leaves the list at its end, and the times of its last handlers are written (LSN-4, OBS-2)."""
    monkeypatch.setattr(connections, "IDLE_LIMIT", 1.0)
    facts = Facts()
    async with running(dsn, registry, facts, poll_interval=0.2, grace=30) as worker:
        await until(lambda: worker.listening, what="it listens")
        await until(lambda: conn.fetchval(LISTED), what="it is listed")
        await publish(conn, "shop.waited", {"s": 0})  # with it, the other sessions are connected
        await until(lambda: worker.counters.delivered == 1, what="it delivers")
        await publish(conn, "shop.waited", {"s": 3})
        await until(lambda: worker.in_flight, what="a handler runs")
    assert worker.counters.delivered == 2 and await conn.fetchval(LISTED) == 0
    assert await conn.fetchval("SELECT sum(handler_seconds) FROM core.rollup") >= 3
    assert not facts.notices("database_unavailable") and not facts.notices("stop_incomplete")


@pytest.mark.slow
async def test_a_session_that_was_idle_because_the_loop_was_blocked(
    dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no outage: it listens again at once, and is connecting meanwhile (LSN-2, OBS-3)."""
    for module in (connections, listener):
        monkeypatch.setattr(module, "IDLE_LIMIT", 1.0)
    monkeypatch.setattr("holdfast.worker.health.IDLE_LIMIT", 1.0)
    facts = Facts()
    async with running(dsn, registry, facts, poll_interval=0.2) as worker:
        await until(lambda: worker.listening, what="it listens")
        with seen_by_a_thread(worker) as seen:
            await publish(conn, "shop.slept", {"s": 2.5})
            await until(lambda: worker.counters.listen_reconnects == 1, what="it listens again")
        assert "connecting" in {health.listener for health in seen if (health.loop_silent_s or 0) > 1}
        assert worker.listening and worker.health().listener == "listening"
    assert not facts.notices("database_unavailable")


async def test_a_stopped_worker_does_not_listen(dsn: str, registry: HandlerRegistry) -> None:
    """Nor does it say so (LSN-2, OBS-3)."""
    async with running(dsn, registry) as worker:
        await until(lambda: worker.listening, what="it listens")
    assert (worker.health().listener, worker.listening) == ("off", False)
