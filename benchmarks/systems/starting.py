"""How long a program takes from its start to its first event, which is waiting. The same for every system."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Any

import asyncpg

# Python compiles what it imports for the first time: that start is not counted.
WARM_UP = 1
LONGEST = 60.0


async def started(
    dsn: str,
    runs: int,
    observer: asyncpg.Connection,
    publish: Callable[[int], Awaitable[None]],
    left: str,
    program: str,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Start a program of benchmarks/programs several times; `command` is what to run instead of its own code."""
    found = []
    for _ in range(WARM_UP + runs):
        await publish(1)
        found.append(await first_event(dsn, observer, left, command or ["-m", f"benchmarks.programs.{program}"]))
    await observer.close()
    milliseconds = [seconds * 1e3 for seconds in found[WARM_UP:]]
    return {"first_event_ms": round(median(milliseconds), 1), "slowest_ms": round(max(milliseconds), 1)}


async def first_event(dsn: str, observer: asyncpg.Connection, left: str, arguments: Sequence[str]) -> float:
    """Seconds from the start of a Python process until its handler was called."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begun = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        env=environment | {"HOLDFAST_DSN": dsn},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LONGEST):
            while line := await process.stdout.readline():
                if line.startswith(b"handled "):
                    break
            else:
                raise SystemExit(f"{arguments} ended before its handler was called")
            # The next one must not find this event again.
            while await observer.fetchval(left):
                await asyncio.sleep(0.01)
    finally:
        process.kill()
        await process.communicate()
    return float(line.split()[1]) - begun
