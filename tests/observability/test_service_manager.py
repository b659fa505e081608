"""systemd (OBS-3): READY, WATCHDOG and STOPPING reach a socket that a test listens on, as the manager would."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import asyncpg
import pytest

from holdfast.observability.health import Health
from holdfast.observability.service_manager import ServiceManager
from tests.observability.support import worker_command
from tests.worker.support import PATIENCE, publish, until
from tests.worker.test_old_primary import free_port

pytestmark = pytest.mark.abandons_leases


class Manager:
    """What a service manager has received, with the times."""

    def __init__(self, path: str) -> None:
        self.variables = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "1000000"}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path.replace("@", "\0") if path.startswith("@") else path)
        self._socket.setblocking(False)
        self._received: list[tuple[float, str]] = []

    @property
    def lines(self) -> list[tuple[float, str]]:
        while True:
            try:
                message = self._socket.recv(65_536).decode()
            except BlockingIOError:
                return self._received
            self._received += [(time.monotonic(), line) for line in message.splitlines()]

    def times(self, line: str) -> list[float]:
        return [when for when, received in self.lines if received == line]

    async def until(self, line: str, count: int = 1, within: float = PATIENCE) -> None:
        await until(lambda: len(self.times(line)) >= count, within=within, what=line)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify") if request.param == "path" else f"@holdfast-test-{os.getpid()}")
    yield made
    made.close()


@pytest.mark.slow
async def test_from_the_start_to_the_end(dsn: str, conn: asyncpg.Connection, manager: Manager, tmp_path: Path) -> None:
    """Ready once, fed while it lives, stopping at SIGTERM; handlers do not inherit the socket (OBS-3)."""
    async with worker_command(dsn, tmp_path, environment=manager.variables) as worker:
        await manager.until("READY=1")
        await manager.until("WATCHDOG=1", 5)
        await until(lambda: any(line.startswith("STATUS=ready (") for _, line in manager.lines), what="its status")
        await publish(conn, "shop.looked")
        looked = tmp_path / "looked"
        await until(lambda: looked.exists() and looked.read_text() != "", what="a handler has looked")
        assert looked.read_text() == "none"
        await publish(conn, "shop.waited", {"s": 1})
        await asyncio.sleep(0.3)
        worker.process.send_signal(signal.SIGTERM)
        await manager.until("STOPPING=1", within=1)
        assert await worker.ended() == 0
    assert len(manager.times("READY=1")) == len(manager.times("STOPPING=1")) == 1
    fed = manager.times("WATCHDOG=1")
    # On a busy machine one may come late.
    assert statistics.median(later - earlier for earlier, later in pairwise(fed)) < 1.0


@pytest.mark.slow
async def test_a_blocked_loop_is_not_fed(dsn: str, conn: asyncpg.Connection, manager: Manager, tmp_path: Path) -> None:
    """It is the loop itself that sends it, so systemd would end this worker after WatchdogSec (OBS-3)."""
    async with worker_command(dsn, tmp_path, environment=manager.variables):
        await manager.until("READY=1")
        await publish(conn, "shop.slept", {"s": 2})
        await until(lambda: manager.times("WATCHDOG=1")[-1] < time.monotonic() - 1.0, what="nothing for a second")
        before = len(manager.times("WATCHDOG=1"))
        await manager.until("WATCHDOG=1", before + 1)


async def test_a_start_that_waits_for_the_database(manager: Manager, tmp_path: Path) -> None:
    """The manager is asked for more time, and told what is waited for; it is not ready (OBS-3)."""
    dsn = f"postgresql://shop:secret@127.0.0.1:{free_port()}/shop"
    async with worker_command(dsn, tmp_path, environment=manager.variables) as worker:
        await manager.until("EXTEND_TIMEOUT_USEC=30000000", 3)
        await manager.until("WATCHDOG=1", 2)
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0
    assert not manager.times("READY=1") and "secret" not in str(manager.lines)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_several_processes(dsn: str, manager: Manager, tmp_path: Path) -> None:
    """The parent speaks for all: ready when each is, and not fed while one hangs (OBS-3)."""
    async with worker_command(dsn, tmp_path, "--processes", "2", environment=manager.variables) as worker:
        await manager.until("READY=1")
        # Each process writes its log from a thread.
        await until(lambda: len(worker.log("worker_started")) == 2, what="two workers have started")
        hanging, _ = worker.children()
        os.kill(hanging, signal.SIGSTOP)
        await until(lambda: manager.times("WATCHDOG=1")[-1] < time.monotonic() - 3.0, what="nothing for three seconds")
        os.kill(hanging, signal.SIGCONT)
        before = len(manager.times("WATCHDOG=1"))
        await manager.until("WATCHDOG=1", before + 2)
        worker.process.send_signal(signal.SIGTERM)
        await manager.until("STOPPING=1", within=3)
        assert await worker.ended() == 0
    assert len(manager.times("READY=1")) == 1


async def test_an_error_s_text_is_no_message(manager: Manager) -> None:
    """Lines in the text of an error stay text; a manager that is gone is no error (OBS-3, SEC-1)."""
    hostile = Health("running", not_ready=("x\nREADY=1\nMAINPID=1",))

    async def follow(to: ServiceManager) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await to.follow(lambda: hostile)

    await follow(ServiceManager(manager.variables["NOTIFY_SOCKET"]))
    assert [line for _, line in manager.lines] == [f"STATUS={' '.join(str(hostile).split())}", "STOPPING=1"]
    await follow(ServiceManager("/nowhere/notify", 0.1))
