"""What the tests of whole workers share: a worker beside the test, a worker in a process of its own, waiting for a
condition, and the tables in which handlers leave their traces.

ledger   written in the handler's transaction: what the database promises to happen once
outside  written at once on another connection: every run of a handler, whatever becomes of it
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import asyncpg

from holdfast import HandlerRegistry, NewEvent, Publisher, Worker, WorkerSettings
from holdfast.observing import FACTS, FactKind
from holdfast.telemetry import Fact, Notice

ROOT = Path(__file__).parents[2]
PATIENCE = 40.0  # for what has no promised time: a busy machine must not fail a test
T = TypeVar("T")
F = TypeVar("F", bound=Fact)


# --- waiting --------------------------------------------------------------------------------------------


async def until(
    condition: Callable[[], T | Awaitable[T]], *, within: float = PATIENCE, what: str = "the condition"
) -> T:
    """Wait until the condition is true and return its value; fail, naming it, when the time is over."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value  # type: ignore[return-value]
        assert time.monotonic() < deadline, f"not within {within:g} s: {what} (last seen: {value!r})"
        await asyncio.sleep(0.005)


async def drained(conn: asyncpg.Connection, *, within: float = PATIENCE) -> None:
    """Wait until no event is open."""
    query = "SELECT count(*) = 0 FROM core.outbox WHERE settled_at IS NULL"
    await until(lambda: conn.fetchval(query), within=within, what="every event settled")


# --- the worker beside the test -------------------------------------------------------------------------


class Facts(list[Fact]):
    """An observer that remembers."""

    def of(self, kind: type[F]) -> list[F]:
        return [fact for fact in self if isinstance(fact, kind)]

    def notices(self, name: str) -> list[Notice]:
        return [notice for notice in self.of(Notice) if notice.name == name]


class Observed(Facts):
    """An observer that remembers all facts, or those that it wants."""

    def __init__(self, facts: Iterable[FactKind] = FACTS, sample: float = 1.0) -> None:
        super().__init__()
        self.facts, self.sample = frozenset(facts), sample

    def __call__(self, fact: Fact) -> None:
        self.append(fact)


@contextlib.asynccontextmanager
async def running(
    dsn: str,
    registry: HandlerRegistry,
    facts: Facts | None = None,
    *,
    redact: Any = None,
    transactions: Any = None,
    **settings: Any,
) -> AsyncIterator[Worker]:
    """A worker on the test's own event loop. No defect of one of its loops goes unseen."""
    facts = Facts() if facts is None else facts
    observer = facts if isinstance(facts, Observed) else facts.append
    worker = Worker(
        dsn, registry, WorkerSettings(**settings), observers=(observer,), redact=redact, transactions=transactions
    )
    async with worker:
        yield worker
    assert not [notice for notice in facts.of(Notice) if notice.name in ("loop_failed", "settle_refused")]


# --- the worker in a process of its own -----------------------------------------------------------------


class WorkerProcess:
    """`tests/worker/apps/run.py` with one of the registries of `apps/registries.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self.errors = ""
        self._readers = [asyncio.create_task(self._read()), asyncio.create_task(self._read_errors())]

    @property
    def pid(self) -> int:
        return self.process.pid

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(json.loads(line))

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = (await self.process.stderr.read()).decode(errors="replace")

    def told(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["told"] == name]

    async def wait_told(self, name: str, *, times: int = 1, within: float = PATIENCE) -> list[dict[str, Any]]:
        def enough() -> list[dict[str, Any]] | None:
            told = self.told(name)
            assert len(told) >= times or self.process.returncode is None, f"ended without {name}: {self.errors}"
            return told if len(told) >= times else None

        return await until(enough, within=within, what=f"{times} times {name} from the worker") or []

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def take_signal(self, number: signal.Signals) -> None:
        """Send a signal and wait until the process has it: two that are pending together would become one."""
        self.process.send_signal(number)

        def taken() -> bool:
            status = Path(f"/proc/{self.pid}/status").read_text()
            pending = [
                int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
            ]
            return not any(mask >> (number - 1) & 1 for mask in pending)

        await until(taken, what=f"the worker has {number.name}")

    async def end(self, within: float = PATIENCE) -> int:
        """The exit status, negative for a signal."""
        async with asyncio.timeout(within):
            code = await self.process.wait()
            await asyncio.gather(*self._readers)
        return code


@contextlib.asynccontextmanager
async def process(
    dsn: str, registry: str, *, started: bool = True, environment: Mapping[str, str] | None = None, **settings: Any
) -> AsyncIterator[WorkerProcess]:
    """A worker process, killed at the end of the block if it still runs."""
    order = json.dumps({"registry": registry, "settings": settings})
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.worker.apps.run",
        order,
        cwd=ROOT,
        env={**os.environ, "HOLDFAST_TEST_DSN": dsn, "PYTHONUNBUFFERED": "1", **(environment or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    worker = WorkerProcess(child)
    try:
        if started:
            await worker.wait_told("worker_started")
        yield worker
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await worker.end()


# --- events and their rows ------------------------------------------------------------------------------

PUBLISHER = Publisher("shop")


async def publish(
    conn: asyncpg.Connection, event_type: str, payload: dict[str, Any] | None = None, **options: Any
) -> UUID:
    async with conn.transaction():
        return (await PUBLISHER.publish(conn, event_type, payload or {}, **options)).event_id


async def publish_many(conn: asyncpg.Connection, event_type: str, count: int, **options: Any) -> list[UUID]:
    """Events with payloads {"n": 0}, {"n": 1}, ... in one transaction, due in that order."""
    events = [NewEvent(event_type, {"n": n}, **options) for n in range(count)]
    async with conn.transaction():
        return await PUBLISHER.publish_many(conn, events)


async def insert(conn: asyncpg.Connection, event_type: str, payload: str = "{}") -> UUID:
    """What a program in another language would do."""
    identity: UUID = await conn.fetchval(
        "INSERT INTO core.outbox (event_type, source, payload) VALUES ($1, 'shop', $2::text::jsonb) RETURNING id",
        event_type,
        payload,
    )
    return identity


async def row(conn: asyncpg.Connection, identity: UUID) -> asyncpg.Record:
    return await conn.fetchrow("SELECT * FROM core.outbox WHERE id = $1", identity)


async def siblings(conn: asyncpg.Connection, origin: UUID) -> dict[str, asyncpg.Record]:
    """The deliveries of a split event by handler."""
    found = await conn.fetch("SELECT * FROM core.outbox WHERE origin_id = $1", origin)
    return {each["handler_name"]: each for each in found}


async def settled(
    conn: asyncpg.Connection, identity: UUID, status: str = "delivered", *, within: float = PATIENCE
) -> asyncpg.Record:
    """The row, once it has the status."""

    async def reached() -> asyncpg.Record | None:
        found = await row(conn, identity)
        return found if found["status"] == status else None

    return await until(reached, within=within, what=f"event {identity} {status}")


async def backends(conn: asyncpg.Connection, purpose: str) -> list[int]:
    """The server processes of workers' connections of one purpose, such as "listen"."""
    query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE $1"
    return [each["pid"] for each in await conn.fetch(query, f"holdfast {purpose}%")]


async def terminate(conn: asyncpg.Connection, purposes: str = "%") -> int:
    """End workers' connections as an administrator would; returns how many."""
    query = """
        SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()
          AND application_name LIKE 'holdfast ' || $1 || '%'
    """
    return int(await conn.fetchval(query, purposes))


# --- traces of handlers ---------------------------------------------------------------------------------


async def make_tables(conn: asyncpg.Connection) -> None:
    await conn.execute(
        """
        CREATE TABLE IF NOT EXISTS ledger (handler text, event_id uuid, n int,
                                           at timestamptz DEFAULT clock_timestamp());
        CREATE TABLE IF NOT EXISTS outside (handler text, event_id uuid, n int, attempt int, worker int,
                                            at timestamptz DEFAULT clock_timestamp());
        """
    )


async def effects(conn: asyncpg.Connection, table: str = "ledger") -> list[int]:
    return [each["n"] for each in await conn.fetch(f"SELECT n FROM {table} ORDER BY n")]


# --- figures --------------------------------------------------------------------------------------------


class Latencies(list[float]):
    """Seconds; prints as a distribution in milliseconds."""

    def percentile(self, share: float) -> float:
        return sorted(self)[min(len(self) - 1, int(len(self) * share))]

    def __str__(self) -> str:
        if not self:
            return "none"
        shown = {"p50": statistics.median(self), "p90": self.percentile(0.9), "p99": self.percentile(0.99)}
        shown["max"] = max(self)
        return f"{len(self)}: " + ", ".join(f"{name} {value * 1000:.1f} ms" for name, value in shown.items())


def missing(expected: Iterable[int], found: Sequence[int]) -> list[int]:
    return sorted(set(expected) - set(found))
