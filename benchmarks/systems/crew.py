"""Processes of a system that begin together: each says that it is ready, waits for the word, and reports.

A process that takes a second to start would otherwise be part of the measurement, or begin after the others.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from benchmarks.systems.process import DSN_VARIABLE, arguments

_READY = b"ready\n"


# --- the parent's side ---


class Crew:
    """`count` processes of a verb, from their start to their end."""

    def __init__(self, system: str, verb: str, dsn: str, options: Mapping[str, Any], count: int = 1) -> None:
        self._command = [sys.executable, "-m", f"benchmarks.systems.{system}", verb, *arguments(options)]
        self._environment = os.environ | {DSN_VARIABLE: dsn}
        self._count = count
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        """Start them. There may be other things to do until they are ready."""
        pipe = asyncio.subprocess.PIPE
        for _ in range(self._count):
            process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environment, stdin=pipe, stdout=pipe
            )
            self._processes.append(process)
        return self

    async def ready(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if await process.stdout.readline() != _READY:
                raise SystemExit(f"{self._command[3]} ended before it was ready")

    def go(self) -> None:
        self._say(b"go\n")

    def require_alive(self) -> None:
        """Nobody should wait for the work of a process that is gone."""
        for process in self._processes:
            if process.returncode is not None:
                raise SystemExit(f"{self._command[3]} ended with {process.returncode} at its work")

    def _say(self, word: bytes) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(word)

    async def reports(self) -> list[dict[str, Any]]:
        """What each of them has to say; they stay connected, so that their backends can be counted."""
        self._say(b"report\n")
        found = []
        for process in self._processes:
            assert process.stdout is not None
            line = await process.stdout.readline()
            if not line:
                raise SystemExit(f"{self._command[3]} ended without a report")
            found.append(json.loads(line))
        return found

    async def __aexit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Tell them to end, and wait until they have."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            if kind is not None and process.returncode is None:
                process.kill()
            await process.communicate()
            if kind is None and process.returncode:
                raise SystemExit(f"{self._command[3]} ended with {process.returncode}")


# --- their side ---


async def begin() -> float:
    """Say that everything is ready, and wait for the word; returns the CPU time until then."""
    print(_READY.decode(), end="", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    return time.process_time()


async def asked() -> None:
    """Wait until the parent wants a report. A process that is done may report without being asked."""
    await asyncio.to_thread(sys.stdin.readline)


def report(result: Mapping[str, Any]) -> None:
    print(json.dumps(result), flush=True)


async def told_to_end() -> None:
    await asyncio.to_thread(sys.stdin.read)
