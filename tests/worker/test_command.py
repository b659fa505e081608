"""`holdfast worker` as a process: handlers run, signals end it in order, a supervisor keeps several (LSN-4, OPS-1)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.worker.support import until

HANDLERS = """
import os, time
from holdfast import HandlerRegistry

registry = HandlerRegistry()

@registry.handler("order.placed", name="shop.note")
async def note(event):
    with open(os.environ["SEEN"], "a") as file:
        file.write(f"{os.getpid()}\\n")

@registry.handler("order.slow", name="shop.sleep")
def sleep(event):
    with open(os.environ["SEEN"], "a") as file:
        file.write("asleep\\n")
    time.sleep(600)
"""


class Command:
    """A running `holdfast worker`, and what it said."""

    def __init__(self, process: Process, directory: Path) -> None:
        self.process = process
        self.seen = directory / "seen"
        self._log = directory / "log"

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        entries = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [entry for entry in entries if event in (None, entry["event"])]

    def lines(self) -> list[str]:
        return self.seen.read_text().splitlines() if self.seen.exists() else []

    async def started(self, count: int = 1) -> None:
        await until(lambda: len(self.log("worker_started")) >= count, what=f"{count} worker(s) started")

    async def ended(self, within: float = 20) -> int:
        return await asyncio.wait_for(self.process.wait(), within)

    def children(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]


@pytest.fixture
def worker(dsn: str, tmp_path: Path) -> Callable[..., Any]:
    """async with worker("--grace", "1") as command: ..."""
    (tmp_path / "hf_handlers.py").write_text(HANDLERS)

    @asynccontextmanager
    async def start(*options: str, environment: dict[str, str] | None = None) -> AsyncIterator[Command]:
        with open(tmp_path / "log", "wb") as log:
            process = await asyncio.create_subprocess_exec(
                str(Path(sys.executable).with_name("holdfast")),
                "worker",
                "hf_handlers:registry",
                *options,
                cwd=tmp_path,
                stderr=log,
                env={**os.environ, "HOLDFAST_DSN": dsn, "SEEN": str(tmp_path / "seen"), **(environment or {})},
            )
        command = Command(process, tmp_path)
        children: list[int] = []
        try:
            yield command
            if process.returncode is None:
                children = command.children()
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            if process.returncode is None:
                process.kill()
            await process.wait()

    return start


async def publish(conn: asyncpg.Connection, event_type: str, count: int = 1) -> None:
    statement = (
        "INSERT INTO core.outbox (event_type, source, payload) SELECT $1, 'shop', '{}' FROM generate_series(1, $2)"
    )
    await conn.execute(statement, event_type, count)


async def test_handlers_run_and_sigterm_exits_0(worker: Any, conn: asyncpg.Connection) -> None:
    """Stopped by the first signal, with nothing left behind (LSN-4)."""
    async with worker("--name", "web") as command:
        await command.started()
        await publish(conn, "order.placed")
        await until(lambda: command.lines() == [str(command.process.pid)], what="the handler ran")
        known = "SELECT count(*) = 1 FROM core.workers WHERE name = 'web'"
        await until(lambda: conn.fetchval(known), what="it has said that it is there")
        command.process.send_signal(signal.SIGTERM)
        assert await command.ended() == 0
        assert command.log("worker_stopped")
    assert await conn.fetchval("SELECT stopped_at IS NOT NULL FROM core.workers WHERE name = 'web'")


async def test_a_thread_that_does_not_end_cannot_hold_the_exit(worker: Any, conn: asyncpg.Connection) -> None:
    """After the grace the event is given back, with no attempt burned, and the process ends (LSN-4)."""
    async with worker("--grace", "0.5") as command:
        await command.started()
        await publish(conn, "order.slow")
        await until(lambda: command.lines() == ["asleep"], what="the handler sleeps")
        command.process.send_signal(signal.SIGTERM)
        assert await command.ended() == 0
    assert [tuple(row) for row in await conn.fetch("SELECT status, attempts FROM core.outbox")] == [("pending", 0)]


async def test_a_schema_of_another_version_is_one_line_with_the_command(worker: Any, empty_dsn: str) -> None:
    """Exit 1, for one process and for several (OBX-3)."""
    for options in ([], ["--processes", "2"]):
        async with worker(*options, environment={"HOLDFAST_DSN": empty_dsn}) as command:
            assert await command.ended() == 1
            problem, remedy = command._log.read_text().splitlines()
        assert "not installed" in problem
        assert remedy.startswith("try: check the database in HOLDFAST_DSN ")
        assert remedy.endswith(": holdfast migrate apply")


@pytest.mark.slow
async def test_several_processes_share_the_work_and_end_together(worker: Any, conn: asyncpg.Connection) -> None:
    """A child that was killed is replaced, and one signal ends them all (OPS-1, LSN-3)."""
    async with worker("--processes", "2", "--lease", "1", "--poll-interval", "0.5") as command:
        await command.started(2)
        first = command.children()
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        await command.started(3)
        (died,) = command.log("worker_died")
        assert (died["signal"], died["restart_in_s"]) == ("SIGKILL", 1.0)
        await publish(conn, "order.placed", 20)
        await until(lambda: len(command.lines()) == 20, what="every event handled")
        command.process.send_signal(signal.SIGTERM)
        assert await command.ended() == 0
        assert len(command.log("worker_stopped")) == 2


@pytest.mark.slow
async def test_children_end_with_a_supervisor_that_was_killed(worker: Any) -> None:
    """Nobody is left to stop them, so they stop themselves (OPS-1)."""
    async with worker("--processes", "2", "--grace", "1") as command:
        await command.started(2)
        children = command.children()
        command.process.kill()
        await until(lambda: len(command.log("worker_stopped")) == 2, what="both workers stopped")
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), what="both processes gone")


async def test_a_supervised_child_takes_a_second_signal_calmly(worker: Any, conn: asyncpg.Connection) -> None:
    """A service manager signals parent and children alike; handlers still get their grace (LSN-4)."""
    async with worker("--processes", "2", "--grace", "1") as command:
        await command.started(2)
        children = command.children()
        await publish(conn, "order.slow")
        await until(lambda: command.lines() == ["asleep"], what="the handler sleeps")
        for pid in children:
            os.kill(pid, signal.SIGTERM)
        command.process.send_signal(signal.SIGTERM)
        assert await command.ended() == 0
        assert len(command.log("worker_stopped")) == 2
        assert not command.log("worker_died")
    assert [tuple(row) for row in await conn.fetch("SELECT status, attempts FROM core.outbox")] == [("pending", 0)]
