"""What a run cost beside time: CPU, round trips, statements, WAL, index writes, heap-only updates. No dependencies.

Time is noisy; these are not. Everything is counted by the server, for every system alike: statements by
pg_stat_statements, writes by reading the log that the run wrote with pg_walinspect. Both come with Postgres; a server
without them leaves the figures out.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")


def postgres_cpu(database: str) -> float:
    """CPU seconds of the backends that serve a database now. Read it before they disconnect."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cmdline") as file:
                title = file.read()
            if title.startswith("postgres:") and f" {database} " in title:
                with open(f"/proc/{pid}/stat") as file:
                    fields = file.read().rsplit(")", 1)[1].split()
                total += int(fields[11]) + int(fields[12])
    return total / _TICKS


@dataclass
class Snapshot:
    at: float
    python: float
    postgres: float
    wal: int
    sent: int | None  # statements that clients sent; BEGIN and COMMIT are two of them
    executed: int | None  # statements that ran, those inside functions and triggers among them


EXTENSIONS = ("pg_stat_statements", "pg_walinspect")
HAS = "SELECT to_regproc('pg_get_wal_stats') IS NOT NULL, to_regclass('pg_stat_statements') IS NOT NULL"
POSITION = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"
STATEMENTS = """
SELECT coalesce(sum(calls) FILTER (WHERE toplevel), 0)::bigint, coalesce(sum(calls), 0)::bigint
FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
# A split of a page stands in for the insert that caused it.
WRITES = """
SELECT coalesce(sum(count) FILTER (WHERE kind ~ '^Btree/(INSERT|SPLIT)'), 0)::bigint AS index_writes,
       coalesce(sum(count) FILTER (WHERE kind ~ '^Transaction/COMMIT'), 0)::bigint AS commits,
       coalesce(sum(count) FILTER (WHERE kind ~ '^Heap/HOT_UPDATE'), 0)::bigint AS hot,
       coalesce(sum(count) FILTER (WHERE kind ~ '^Heap/(HOT_)?UPDATE'), 0)::bigint AS updates
FROM (SELECT "resource_manager/record_type" AS kind, count
      FROM pg_get_wal_stats('0/0'::pg_lsn + $1::bigint, '0/0'::pg_lsn + $2::bigint, true)) records
"""


async def snapshot(connection: Any, database: str) -> Snapshot:
    """Take it on a connection that stays open, so that its own CPU cancels out."""
    sent = executed = None
    if (await connection.fetchrow(HAS))[1]:
        sent, executed = await connection.fetchrow(STATEMENTS)
    wal = await connection.fetchval(POSITION)
    return Snapshot(time.perf_counter(), time.process_time(), postgres_cpu(database), wal, sent, executed)


async def difference(
    connection: Any, before: Snapshot, after: Snapshot, events: int, *, elsewhere: float = 0.0
) -> dict[str, float]:
    """Costs per event, and events per second. `elsewhere` is the CPU of further Python processes, in seconds."""
    seconds = after.at - before.at
    result: dict[str, float] = {
        "events": events,
        "seconds": round(seconds, 4),
        "per_second": round(events / seconds, 1),
        "python_us": round((after.python - before.python + elsewhere) * 1e6 / events, 1),
        "postgres_us": round((after.postgres - before.postgres) * 1e6 / events, 1),
        "wal_bytes": round((after.wal - before.wal) / events, 1),
    }
    if before.sent is not None and after.sent is not None:
        result["round_trips"] = round((after.sent - before.sent) / events, 4)
    if before.executed is not None and after.executed is not None:
        result["statements"] = round((after.executed - before.executed) / events, 4)
    if (await connection.fetchrow(HAS))[0]:
        index_writes, commits, hot, updates = await connection.fetchrow(WRITES, before.wal, after.wal)
        result["index_writes"] = round(index_writes / events, 3)
        result["commits"] = round(commits / events, 4)
        if updates:
            result["hot_share"] = round(hot / updates, 3)
    return result


def peak_rss_mb() -> float:
    """The most that this process had in memory. What getrusage says begins with the parent's."""
    with open("/proc/self/status") as file:
        (peak,) = (line.split()[1] for line in file if line.startswith("VmHWM:"))
    return round(int(peak) / 1024, 1)
