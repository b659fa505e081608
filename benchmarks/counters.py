"""What a run cost beside time: CPU of Postgres and Python, WAL, commits, heap-only updates. Standard library only."""

import contextlib
import os
import resource
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
    commits: int
    updates: int
    hot_updates: int


SNAPSHOT = """
SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint AS wal,
       (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()) AS commits,
       (SELECT coalesce(sum(n_tup_upd), 0)::bigint FROM pg_stat_user_tables) AS updates,
       (SELECT coalesce(sum(n_tup_hot_upd), 0)::bigint FROM pg_stat_user_tables) AS hot_updates
"""


async def snapshot(connection: Any, database: str) -> Snapshot:
    """Take it on a connection that stays open, so that its own CPU cancels out."""
    row = await connection.fetchrow(SNAPSHOT)
    return Snapshot(time.perf_counter(), time.process_time(), postgres_cpu(database), *row)


def difference(before: Snapshot, after: Snapshot, events: int) -> dict[str, float]:
    """Costs per event, and events per second."""
    seconds = after.at - before.at
    updates = after.updates - before.updates
    return {
        "events": events,
        "seconds": round(seconds, 4),
        "per_second": round(events / seconds, 1),
        "python_us": round((after.python - before.python) * 1e6 / events, 1),
        "postgres_us": round((after.postgres - before.postgres) * 1e6 / events, 1),
        "wal_bytes": round((after.wal - before.wal) / events, 1),
        "commits": round((after.commits - before.commits) / events, 4),
        "hot_share": round((after.hot_updates - before.hot_updates) / updates, 3) if updates > 0 else 0.0,
    }


def peak_rss_mb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
