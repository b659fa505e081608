"""What handlers leave behind does not keep a worker from ending within its grace, and is named (LSN-4, T34)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.worker.support import publish, settled, until

pytestmark = pytest.mark.trust

HANDLERS = """
import asyncio, subprocess, threading, time
from holdfast import HandlerRegistry

registry = HandlerRegistry()
tasks = []

@registry.handler("left.thread", name="shop.thread")
async def thread(event):
    threading.Thread(target=time.sleep, args=(600,), name="left-behind").start()

@registry.handler("left.task", name="shop.task")
async def task(event):
    async def stubborn():
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass
    tasks.append(asyncio.create_task(stubborn(), name="left-behind"))

@registry.handler("left.process", name="shop.process")
def process(event):
    subprocess.Popen(["sleep", "600"], start_new_session=False)

@registry.handler("left.nothing", name="shop.nothing")
async def nothing(event):
    pass
"""


@pytest.mark.parametrize("what", ["thread", "task", "process", "nothing"])
async def test_worker_ends_within_its_grace(dsn: str, conn: asyncpg.Connection, tmp_path: Path, what: str) -> None:
    """After a handler has left a thread, a task that refuses to be cancelled, or a process (LSN-4, T34)."""
    (tmp_path / "hf_left.py").write_text(HANDLERS)
    with open(tmp_path / "log", "wb") as log:
        worker = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("holdfast")), "worker", "hf_left:registry", "--grace", "1"),
            cwd=tmp_path,
            env={**os.environ, "HOLDFAST_DSN": dsn, "PYTHONPATH": str(tmp_path)},
            stderr=log,
            start_new_session=True,
        )

    def logged(event: str) -> list[dict[str, Any]]:
        lines = (tmp_path / "log").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]

    try:
        await until(lambda: logged("worker_started"), what="the worker runs")
        await settled(conn, await publish(conn, f"left.{what}"))
        worker.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert await asyncio.wait_for(worker.wait(), 15) == 0
        assert time.monotonic() - started < 10, "a grace of one second, on a busy machine"
        left = logged("left_behind")
        if what == "thread":
            assert left[0]["threads"] == ["left-behind"]
        elif what == "task":
            assert left[0]["tasks"] == ["left-behind"]
        else:
            assert not left
        assert logged("worker_stopped")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        await worker.wait()
