"""What workers cost while nothing happens: queries, connections and CPU. The same for every system."""

import argparse
import asyncio
import os
import sys
import time
from typing import Any

import asyncpg

from benchmarks.counters import postgres_cpu
from benchmarks.systems.process import database_of

SENT = """
SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements
WHERE toplevel AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
SESSIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
# Until the last of them has connected, and the first looks around are over.
LONGEST_START = 120.0
SETTLING = 6.0
TICKS = os.sysconf("SC_CLK_TCK")


async def idled(options: argparse.Namespace, observer: asyncpg.Connection, program: str) -> dict[str, Any]:
    """Start `--processes` programs of benchmarks/programs, and count for `--seconds` what they do."""
    database, environment = database_of(options.dsn), os.environ | {"HOLDFAST_DSN": options.dsn}
    nowhere = asyncio.subprocess.DEVNULL
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"benchmarks.programs.{program}", env=environment, stdout=nowhere, stderr=nowhere
        )
        for _ in range(options.processes)
    ]
    try:
        async with asyncio.timeout(LONGEST_START):
            while await observer.fetchval(SESSIONS) < options.processes:
                await asyncio.sleep(0.2)
        await asyncio.sleep(SETTLING)
        sent, begun = await observer.fetchval(SENT), time.perf_counter()
        python, postgres = cpu_of(processes), postgres_cpu(database)
        sessions = []
        while time.perf_counter() - begun < options.seconds:
            await asyncio.sleep(0.5)
            sessions.append(await observer.fetchval(SESSIONS))
        seconds = time.perf_counter() - begun
        # Those of the observer are no queries of workers.
        queries = await observer.fetchval(SENT) - sent - len(sessions) - 1
        python, postgres = cpu_of(processes) - python, postgres_cpu(database) - postgres
        if any(process.returncode is not None for process in processes):
            raise SystemExit(f"a worker of {program} ended while it should have idled")
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in processes))
        await observer.close()
    return {
        "queries": round(queries / seconds, 2),
        "connections": max(sessions),
        "per_worker": round(sum(sessions) / len(sessions) / options.processes, 2),
        "python_cpu": round(python / seconds, 4),
        "postgres_cpu": round(postgres / seconds, 4),
    }


def cpu_of(processes: list[asyncio.subprocess.Process]) -> float:
    """CPU seconds of processes so far."""
    total = 0
    for process in processes:
        with open(f"/proc/{process.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS
