"""Batches that meet faults: connections cut at every message, killed workers. Effects stay exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter, deque
from collections.abc import AsyncIterator
from functools import partial
from uuid import UUID

import asyncpg
import pytest

from chaos.wire import Cut, Watch, Wire, wired
from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, Retry, RetryPolicy
from tests.handling.kinds import ASYNC_SESSION, ASYNCPG, NAME, PSYCOPG, TABLE, Kind, Work
from tests.handling.test_cut_points import cuts
from tests.worker.batches import batch_handler, written
from tests.worker.support import WorkerProcess, drained, effects, make_tables, process, running, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EVENTS = 6
SIDE_BY_SIDE = 12  # nearly all the time they wait before they connect again
SETTINGS = {"lease": 1.5, "poll_interval": 1.0, "connections": 1, "grace": 5.0}
QUICK = RetryPolicy(max_attempts=20, base_delay=0.02, max_delay=0.05)
_USES = 7  # psycopg prepares a statement when it is used for the sixth time


class Victim:
    """A worker on a channel of its own, whose batches' connections go through a wire of their own."""

    def __init__(self, wire: Wire, name: str, conn: asyncpg.Connection, turn: asyncio.Lock, channel: str) -> None:
        self._wire = wire
        self._name = name
        self._conn = conn
        self._turn = turn
        self._publisher = Publisher("shop", channel=channel)

    async def meet(self, cut: Cut | None) -> Watch:
        """Let the worker meet the cut while it handles a batch, and then handle another."""
        watch = self._wire.watch(self._name, cut)
        await self.handle()
        if cut is None:
            self._wire.watch()
            return watch
        for _ in range(_USES):  # on a new connection there are other messages, until its statements are prepared
            if watch.made.is_set():
                break
            await self.handle()
            watch = self._wire.watch(self._name, cut) if not watch.made.is_set() else watch
        assert watch.made.is_set(), f"{cut} was not reached"
        await self.handle()
        self._wire.heal()
        return watch

    async def handle(self) -> None:
        async with self._turn, self._conn.transaction():
            events = [NewEvent("order.placed", {"n": number}) for number in range(EVENTS)]
            ids = await self._publisher.publish_many(self._conn, events)
        await until(lambda: self._settled(ids), within=40.0, what="the batch is delivered")

    async def _settled(self, ids: list[UUID]) -> bool:
        query = "SELECT count(*) FROM core.outbox WHERE id = ANY ($1) AND status = 'delivered'"
        async with self._turn:
            delivered = await self._conn.fetchval(query, ids)
        await asyncio.sleep(0.03)
        return bool(delivered == EVENTS)


@contextlib.asynccontextmanager
async def victim(
    dsn: str, conn: asyncpg.Connection, turn: asyncio.Lock, kind: Kind, number: int
) -> AsyncIterator[Victim]:
    tried: Counter[UUID] = Counter()

    async def body(events: list[EventEnvelope], work: Work) -> list[Retry | None]:
        """Book all of them; of each batch one is put off once, in the transaction of the others."""
        results: list[Retry | None] = []
        for event in events:
            tried[event.event_id] += 1
            late = event.payload["n"] == 3 and tried[event.event_id] == 1
            if not late:
                await work.book(event, event.payload["n"])
            results.append(Retry(0.01) if late else None)
        await work.flush()
        return results

    registry = HandlerRegistry()
    registry.add(
        "ledger.book_many",
        ("order.placed",),
        batch_handler(kind, body),
        retry=QUICK,
        timeout=3.0,
        batch=EVENTS,
        within=0.05,
    )
    channel = f"victim_{number}"
    async with wired(dsn) as (wire, through):
        own = kind is ASYNCPG
        async with (
            kind.source(through) as transactions,
            running(through if own else dsn, registry, transactions=transactions, channels=(channel,), **SETTINGS),
        ):
            yield Victim(wire, "holdfast handler" if own else NAME, conn, turn, channel)


@pytest.mark.nightly("cut points of a batch")
@pytest.mark.parametrize("kind", (ASYNCPG, ASYNC_SESSION, PSYCOPG), ids=str)
async def test_the_connection_is_cut_at_every_message(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Cut before each message of a batch's transaction, and in the COMMIT: each effect once (LSN-12, LSN-5, P1)."""
    await conn.execute(TABLE.replace("CONSTRAINT at_commit UNIQUE (n) DEFERRABLE INITIALLY DEFERRED", "CHECK (n >= 0)"))
    turn = asyncio.Lock()
    async with victim(dsn, conn, turn, kind, 0) as first:
        for _ in range(_USES):
            await first.handle()
        jobs = deque(cuts(await first.meet(None)))
    count, met = len(jobs), 0

    async def work(number: int) -> None:
        nonlocal met
        async with victim(dsn, conn, turn, kind, number) as one:
            for _ in range(_USES):
                await one.handle()
            while jobs:
                await one.meet(jobs.popleft())
                met += 1

    async with asyncio.TaskGroup() as group:
        for number in range(1, SIDE_BY_SIDE + 1):
            group.create_task(work(number))
    assert met == count > 15
    events = [row["id"] for row in await conn.fetch("SELECT id FROM core.outbox")]
    assert await written(conn) == Counter(events)
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == len(events)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status <> 'delivered'") == 0


async def test_workers_are_killed_in_the_middle_of_batches(dsn: str, conn: asyncpg.Connection) -> None:
    """Kill -9 among batches: nothing is lost, and each effect is there once (LSN-3, LSN-12, P1, P2)."""
    await make_tables(conn)
    settings = {"lease": 1.5, "poll_interval": 0.5}
    count = 0

    async def written_or_taken(victim: WorkerProcess) -> bool:
        done = "SELECT count(*) FILTER (WHERE status = 'delivered') = $1 FROM core.outbox"
        return bool(victim.told("batch_written")) or bool(await conn.fetchval(done, count))

    async with process(dsn, "batches", **settings):
        for _ in range(4):
            async with process(dsn, "batches", **settings) as victim:
                while not victim.told("batch_written"):  # the other worker may have taken all of them
                    async with conn.transaction():
                        numbers = range(count, count + 150)
                        await Publisher("shop").publish_many(
                            conn, [NewEvent("order.placed", {"n": n}) for n in numbers]
                        )
                    count += 150
                    await until(partial(written_or_taken, victim), what="the worker has a batch, or the other has all")
                victim.signal(signal.SIGKILL)
                assert await victim.end() == -signal.SIGKILL
        await drained(conn, within=30)
    assert sorted(await effects(conn, "ledger")) == list(range(count))
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == count
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == count
