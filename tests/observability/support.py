"""`holdfast worker` as a process, asked over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.worker.support import PATIENCE, until

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))

HANDLERS = """
import asyncio, os, time
from holdfast import HandlerRegistry

registry = HandlerRegistry()

@registry.handler("shop.waited", name="shop.wait")
async def wait(event):
    await asyncio.sleep(event.payload["s"])

@registry.handler("shop.slept", name="shop.sleep")
async def sleep(event):
    time.sleep(event.payload["s"])

@registry.handler("shop.looked", name="shop.look")
async def look(event):
    with open("looked", "w") as file:
        file.write(os.environ.get("NOTIFY_SOCKET", "none"))
"""


class Command:
    """A running `holdfast worker`, what it says, and what it answers."""

    def __init__(self, process: Process, directory: Path) -> None:
        self.process = process
        self.directory = directory

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        entries = [json.loads(line) for line in (self.directory / "log").read_text().splitlines() if line[:1] == "{"]
        return [entry for entry in entries if event in (None, entry["event"])]

    async def url(self) -> str:
        await until(lambda: self.log("pages_served"), what="it serves")
        found: str = self.log("pages_served")[0]["url"]
        return found

    async def asked(self, page: str, **headers: str) -> tuple[int, dict[str, Any]]:
        async with httpx.AsyncClient(timeout=10) as http:
            answer = await http.get(f"{await self.url()}/health/{page}", headers=headers)
        return answer.status_code, answer.json() if answer.headers["content-type"] == "application/json" else {}

    async def until_asked(self, page: str, status: int, within: float = PATIENCE) -> dict[str, Any]:
        async def reached() -> dict[str, Any] | None:
            found, body = await self.asked(page)
            return body if found == status else None

        return await until(reached, within=within, what=f"{page} is {status}") or {}

    async def status(self, *options: str, **environment: str) -> tuple[int, str, str]:
        """The exit code and what `holdfast worker status` says."""
        return await asyncio.to_thread(worker_status, self.directory, *options, **environment)

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def ended(self, within: float = 20) -> int:
        return await asyncio.wait_for(self.process.wait(), within)


def worker_status(directory: Path, *options: str, **environment: str) -> tuple[int, str, str]:
    variables = {"PATH": "/usr/bin", "HOLDFAST_RUNTIME_DIR": str(directory / "run"), **environment}
    done = subprocess.run(
        [HOLDFAST, "worker", "status", *options], env=variables, capture_output=True, text=True, timeout=30
    )
    return done.returncode, done.stdout, done.stderr


@contextlib.asynccontextmanager
async def worker_command(
    dsn: str, directory: Path, *options: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Command]:
    """A worker of HANDLERS with its sockets in a directory of the test; killed at the end of the block."""
    (directory / "hf_handlers.py").write_text(HANDLERS)
    defaults = {"HOLDFAST_DSN": dsn, "HOLDFAST_RUNTIME_DIR": str(directory / "run")}
    variables = {**os.environ, **defaults, **(environment or {})}
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            HOLDFAST,
            "worker",
            "hf_handlers:registry",
            *options,
            cwd=directory,
            stderr=log,
            env={name: value for name, value in variables.items() if value},
        )
    command = Command(process, directory)
    try:
        yield command
    finally:
        if process.returncode is None:
            for pid in [*command.children(), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await process.wait()
