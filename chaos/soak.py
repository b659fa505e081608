"""`./dev soak [--events N] [--rate R] [--json]`: many events for a long time, and nothing that grows by it.

Two workers handle what a producer writes at a steady rate: plain, threaded, transactional, failing once, and fanned
out. Delivered rows are swept as soon as they may be. Memory, connections, open files, tables and latency are read all
the time; those of the last quarter are compared with those of the second one, after what a start costs is paid.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import asyncpg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from holdfast import (
    EventEnvelope,
    HandlerContext,
    HandlerRegistry,
    NewEvent,
    Publisher,
    RetryPolicy,
    TransientHandlerError,
)
from holdfast.embedded import EmbeddedPostgres

errors = Console(stderr=True, highlight=False)
registry = HandlerRegistry()
publisher = Publisher("soak")
WORKERS = 2
BATCH = 500
QUICK = RetryPolicy(max_attempts=20, base_delay=0.05, max_delay=0.5)

# --- the application ------------------------------------------------------------------------------------


@registry.handler("soak.plain", name="soak.plain")
@registry.handler("soak.fanned", name="soak.first")
@registry.handler("soak.fanned", name="soak.second")
async def nothing(event: EventEnvelope) -> None:
    """Most of the events, so that the number of them is reached."""


@registry.handler("soak.thread", name="soak.thread")
def in_a_thread(event: EventEnvelope) -> None:
    """Takes a thread."""


@registry.handler("soak.transactional", name="soak.transactional", retry=QUICK)
async def transactional(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    await tx.execute("UPDATE soak.counts SET n = n + 1 WHERE slot = $1", int(event.payload["n"]) % 1000)


@registry.handler("soak.failing", name="soak.failing", retry=QUICK)
async def failing(event: EventEnvelope, context: HandlerContext) -> None:
    if context.attempt == 1:
        raise TransientHandlerError(f"event {event.event_id} has to wait")


@registry.handler("soak.probe", name="soak.probe", retry=QUICK)
async def probe(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    late = time.time() - float(event.payload["at"])
    await tx.execute("INSERT INTO soak.probes (seconds) VALUES ($1)", late)


# How many of the events of a batch are of each kind; the others are plain.
KINDS = {"soak.transactional": 25, "soak.thread": 10, "soak.failing": 5, "soak.fanned": 5}


def batch(start: int) -> list[NewEvent]:
    """The events from this number on, with the same mix in every batch."""
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    kinds += ["soak.plain"] * (BATCH - len(kinds))
    return [NewEvent(kind, {"n": start + place, "note": "x" * 150}) for place, kind in enumerate(kinds)]


# --- what is read ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of everything at one moment; sizes are in MB, of the larger worker where there are two."""

    events: int
    memory: float
    files: int
    connections: int
    outbox: float
    inbox: float
    backlog: int
    probe_p50_ms: float
    probe_p99_ms: float


# What may grow between the second quarter and the last: a factor, and an amount that is noise.
LIMITS = {
    "memory": (1.1, 5.0),
    "files": (1.0, 2.0),
    "connections": (1.0, 2.0),
    "outbox": (1.25, 20.0),
    "inbox_bytes": (1.15, 20.0),
    "probe_p50_ms": (1.5, 10.0),
}
OPEN = "SELECT count(*) FROM core.outbox WHERE settled_at IS NULL"
STATE = """
SELECT (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'holdfast%')
         AS connections,
       pg_total_relation_size('core.outbox') / 1e6::float8 AS outbox,
       pg_total_relation_size('core.event_handled') / 1e6::float8 AS inbox,
       (SELECT count(*) FROM core.outbox WHERE settled_at IS NULL) AS backlog,
       coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds), 0) * 1000 AS p50,
       coalesce(percentile_cont(0.99) WITHIN GROUP (ORDER BY seconds), 0) * 1000 AS p99
  FROM soak.probes WHERE at > clock_timestamp() - make_interval(secs => $1)
"""


def resident(pid: int) -> float:
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1000


async def sample(connection: asyncpg.Connection, pids: Sequence[int], events: int, window: float) -> Sample:
    row = await connection.fetchrow(STATE, window)
    assert row is not None
    return Sample(
        events=events,
        memory=round(max(resident(pid) for pid in pids), 1),
        files=max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        connections=row["connections"],
        outbox=round(row["outbox"], 1),
        inbox=round(row["inbox"], 1),
        backlog=row["backlog"],
        probe_p50_ms=round(row["p50"], 1),
        probe_p99_ms=round(row["p99"], 1),
    )


def quarters(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Of each figure its median in the second quarter and in the last one."""
    size = len(samples) // 4
    early, late = samples[size : 2 * size], samples[-size:]

    def medians(value: Any) -> tuple[float, float]:
        return statistics.median(map(value, early)), statistics.median(map(value, late))

    names = [name for name in LIMITS if name != "inbox_bytes"]
    found = {name: medians(lambda each, name=name: getattr(each, name)) for name in names}
    found["inbox_bytes"] = medians(lambda each: 1e6 * each.inbox / each.events)
    return found


def growing(found: dict[str, tuple[float, float]]) -> list[str]:
    return [
        f"{name} grew from {early:g} to {late:g}"
        for name, (early, late) in found.items()
        if late > early * LIMITS[name][0] + LIMITS[name][1]
    ]


# --- the run --------------------------------------------------------------------------------------------


SILENT: dict[str, Any] = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}


def environment(dsn: str) -> dict[str, str]:
    """Of the commands: those of this Python, and the address."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, "HOLDFAST_DSN": dsn}


async def stopped(process: asyncio.subprocess.Process) -> int:
    """Its exit status; it is asked to end, if it has not yet."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    return await process.wait()


async def prepare(dsn: str) -> None:
    done = await asyncio.create_subprocess_exec("holdfast", "migrate", "apply", env=environment(dsn), **SILENT)
    if await done.wait():
        raise SystemExit("soak: the schema could not be installed")
    connection = await asyncpg.connect(dsn)
    await connection.execute("""
        CREATE SCHEMA soak;
        CREATE TABLE soak.counts (slot int PRIMARY KEY, n bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50);
        INSERT INTO soak.counts SELECT generate_series(0, 999);
        CREATE TABLE soak.probes (at timestamptz NOT NULL DEFAULT clock_timestamp(), seconds float8 NOT NULL);
        UPDATE core.retention_policies SET active_ttl_days = 0, tombstoned_grace_days = 0 WHERE entity = 'outbox_row';
    """)
    await connection.close()


async def produce(dsn: str, total: int, rate: float, done: list[int]) -> None:
    """Write batches at the rate; when the workers fall behind by ten seconds, wait for them."""
    connection = await asyncpg.connect(dsn)
    began = time.monotonic()
    while done[0] < total:
        async with connection.transaction():
            await publisher.publish_many(connection, batch(done[0]))
        done[0] += BATCH
        await asyncio.sleep(max(0.0, began + done[0] / rate - time.monotonic()))
        if done[0] % (20 * BATCH) == 0:
            while await connection.fetchval(OPEN) > 10 * rate:
                await asyncio.sleep(0.5)
                began += 0.5
    await connection.close()


async def ask(dsn: str) -> None:
    """A lone event, ten times a second."""
    connection = await asyncpg.connect(dsn)
    try:
        while True:
            async with connection.transaction():
                await publisher.publish(connection, "soak.probe", {"at": time.time()})
            await asyncio.sleep(0.1)
    finally:
        connection.terminate()


async def sweep(dsn: str) -> None:
    """Retention, as often as a pass ends: workers rest for ten minutes between two, which is short for days only."""
    while True:
        sweeping = await asyncio.create_subprocess_exec(
            "holdfast", "retention", "sweep", "--yes", env=environment(dsn), **SILENT
        )
        try:
            await sweeping.wait()
        finally:
            await stopped(sweeping)
        await asyncio.sleep(5)


async def settled(connection: asyncpg.Connection) -> int:
    """How many deliveries are open after two minutes at most."""
    deadline = time.monotonic() + 120
    while left := int(await connection.fetchval(OPEN)):
        if time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.5)
    return 0


async def soak(total: int, rate: float, every: float) -> dict[str, Any]:
    samples: list[Sample] = []
    done = [0]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        EmbeddedPostgres(settings={"shared_buffers": "256MB", "max_wal_size": "4GB"}) as server,
        Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=errors, transient=True) as bar,
    ):
        await prepare(server.dsn)
        task = bar.add_task("events", total=total)
        command, where = ("holdfast", "worker", "chaos.soak:registry"), environment(server.dsn)
        workers = [await asyncio.create_subprocess_exec(*command, env=where, **SILENT) for _ in range(WORKERS)]
        connection = await asyncpg.connect(server.dsn)
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(ask(server.dsn)), tasks.create_task(sweep(server.dsn))]
                producing = tasks.create_task(produce(server.dsn, total, rate, done))
                while not producing.done():
                    await asyncio.sleep(every)
                    samples.append(await sample(connection, [worker.pid for worker in workers], done[0], every))
                    bar.update(task, completed=done[0])
                for each in beside:
                    each.cancel()
            left = await settled(connection)
            counted = await connection.fetchval("SELECT sum(n)::bigint FROM soak.counts")
            failed = await connection.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'failed'")
        finally:
            codes = [await stopped(worker) for worker in workers]
            connection.terminate()
    found = quarters(samples)
    problems = growing(found)
    expected = done[0] // BATCH * KINDS["soak.transactional"]
    if (left, failed, counted, codes) != (0, 0, expected, [0] * WORKERS):
        problems.append(f"left {left}, failed {failed}, effects {counted} of {expected}, exit codes {codes}")
    return {
        "events": done[0],
        "effects": counted,
        "figures": {name: {"second_quarter": early, "last_quarter": late} for name, (early, late) in found.items()},
        "problems": problems,
        "samples": [asdict(each) for each in samples],
    }


def show(result: dict[str, Any]) -> None:
    table = Table("figure", "second quarter", "last quarter", "may be")
    for name, each in result["figures"].items():
        factor, amount = LIMITS[name]
        limit = each["second_quarter"] * factor + amount
        table.add_row(name, f"{each['second_quarter']:.1f}", f"{each['last_quarter']:.1f}", f"{limit:.1f}")
    errors.print(table)
    errors.print(f"{result['events']:,} events, {result['effects']:,} effects in transactions, each once")
    for problem in result["problems"]:
        errors.print(f"[red]{problem}[/red]")


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev soak", description=__doc__)
    parser.add_argument("--events", type=int, default=5_000_000, help="to be handled (default: 5,000,000)")
    parser.add_argument("--rate", type=float, default=5000, help="events a second, if the workers keep up")
    parser.add_argument("--every", type=float, default=10, metavar="SECONDS", help="between two samples")
    parser.add_argument("--json", action="store_true", help="one JSON line with all samples")
    options = parser.parse_args()
    result = asyncio.run(soak(options.events, options.rate, options.every))
    show(result)
    if options.json:
        print(json.dumps(result))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
