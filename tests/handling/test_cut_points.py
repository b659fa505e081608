"""The connection of a handler's transaction may break at every message: its event has its one effect all the same.

The worker's own connections stay whole; those of the application go through a wire that is cut at a chosen message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from typing import get_args
from uuid import UUID

import asyncpg
import pytest

from chaos.wire import Cut, Direction, Watch, Wire, wired
from holdfast import EventEnvelope, HandlerRegistry, Publisher, RetryPolicy
from tests.handling.kinds import KINDS, NAME, TABLE, Kind, Work
from tests.worker.support import running, until

pytestmark = [pytest.mark.nightly("cut points of a library"), pytest.mark.slow, pytest.mark.timeout(400)]

SIDE_BY_SIDE = 12  # nearly all the time they wait before they connect again
SETTINGS = {"lease": 1.5, "poll_interval": 1.0, "connections": 1, "grace": 5.0}
QUICK = RetryPolicy(max_attempts=20, base_delay=0.02, max_delay=0.05)
RECOVERY = 40.0
_USES = 7  # psycopg prepares a statement when it is used for the sixth time
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


def cuts(learned: Watch) -> Iterator[Cut]:
    """Before each message, and at the COMMIT and its answer also without a word to either side."""
    for direction in DIRECTIONS:
        letters = "".join(learned.seen[direction])
        for number, letter in enumerate(letters, start=1):
            told = direction == "to_client" and letters[:number].endswith("SS")
            if not told and letter != "X":
                yield Cut(direction, number)
    said, heard = ("".join(learned.seen[direction]) for direction in DIRECTIONS)
    yield Cut("to_server", 1 + max(said.rfind("Q"), said.rfind("S")), "before", "half_open")
    yield Cut("to_client", heard.rfind("Z"), "before", "half_open")


class Victim:
    """A worker on a channel of its own, whose handlers' connections go through a wire of their own."""

    def __init__(self, wire: Wire, conn: asyncpg.Connection, turn: asyncio.Lock, channel: str) -> None:
        self._wire = wire
        self._conn = conn
        self._turn = turn
        self._publisher = Publisher("shop", channel=channel)

    async def meet(self, event_type: str, cut: Cut | None) -> Watch:
        """Let the worker meet the cut while it handles an event, and then handle another."""
        watch = self._wire.watch(NAME, cut)
        await self.handle(event_type)
        if cut is None:
            self._wire.watch()
            return watch
        for _ in range(_USES):  # on a new connection there are other messages, until its statements are prepared
            if watch.made.is_set():
                break
            await self.handle(event_type)
            watch = self._wire.watch(NAME, cut) if not watch.made.is_set() else watch
        assert watch.made.is_set(), f"{cut} was not reached"
        await self.handle(event_type)
        self._wire.heal()
        return watch

    async def handle(self, event_type: str) -> None:
        async with self._turn, self._conn.transaction():
            identity = (await self._publisher.publish(self._conn, event_type, {})).event_id
        await until(lambda: self._settled(identity), within=RECOVERY, what=f"{event_type} is delivered")

    async def _settled(self, identity: UUID) -> bool:
        async with self._turn:
            status = await self._conn.fetchval("SELECT status FROM core.outbox WHERE id = $1", identity)
        await asyncio.sleep(0.03)
        return bool(status == "delivered")


@contextlib.asynccontextmanager
async def victim(
    dsn: str, conn: asyncpg.Connection, turn: asyncio.Lock, kind: Kind, runs: Counter[UUID], number: int
) -> AsyncIterator[Victim]:
    async def book(event: EventEnvelope, work: Work) -> None:
        runs[event.event_id] += 1
        await work.book(event, sum(runs.values()))
        await work.flush()

    async def stumble(event: EventEnvelope, work: Work) -> None:
        await book(event, work)
        if runs[event.event_id] == 1:
            raise ConnectionError("the other side is not there")

    registry = HandlerRegistry()
    registry.add("ledger.book", ("order.booked",), kind.handler(book), retry=QUICK, timeout=3.0)
    registry.add("ledger.stumble", ("order.stumbled",), kind.handler(stumble), retry=QUICK, timeout=3.0)
    channel = f"victim_{number}"
    async with (
        wired(dsn) as (wire, through),
        kind.source(through) as transactions,
        running(dsn, registry, transactions=transactions, channels=(channel,), **SETTINGS),
    ):
        yield Victim(wire, conn, turn, channel)


# Django's settings are the process's, so that there can be one wire at a time.
@pytest.mark.parametrize("kind", [each for each in KINDS if each.source.__name__ != "none"], ids=str)
async def test_the_connection_is_cut_at_every_message(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Cut before each message of a transaction that succeeds, and of one that fails: one effect (LSN-13, LSN-5, P1)."""
    await conn.execute(TABLE.replace("CONSTRAINT at_commit UNIQUE (n) DEFERRABLE INITIALLY DEFERRED", "CHECK (n > 0)"))
    runs: Counter[UUID] = Counter()
    turn = asyncio.Lock()
    jobs: deque[tuple[str, Cut]] = deque()
    async with victim(dsn, conn, turn, kind, runs, 0) as first:
        for event_type in ("order.booked", "order.stumbled"):
            for _ in range(_USES):
                await first.handle(event_type)
            learned = await first.meet(event_type, None)
            jobs.extend((event_type, cut) for cut in cuts(learned))
    met: list[str] = []

    async def work(number: int) -> None:
        async with victim(dsn, conn, turn, kind, runs, number) as one:
            for event_type in ("order.booked", "order.stumbled"):
                for _ in range(_USES):
                    await one.handle(event_type)
            while jobs:
                event_type, cut = jobs.popleft()
                try:
                    await one.meet(event_type, cut)
                except AssertionError as error:
                    error.add_note(f"after {event_type}: {cut}")
                    raise
                met.append(f"{event_type}: {cut}")

    count = len(jobs)
    async with asyncio.TaskGroup() as group:
        for number in range(1, 2 if kind.package == "django" else SIDE_BY_SIDE + 1):
            group.create_task(work(number))
    assert len(met) == count > 20
    rows = await conn.fetch("SELECT event_id, count(*) AS effects FROM entries GROUP BY 1")
    effects = {row["event_id"]: row["effects"] for row in rows}
    events = [row["id"] for row in await conn.fetch("SELECT id FROM core.outbox")]
    assert effects == dict.fromkeys(events, 1)
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == len(events)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status <> 'delivered'") == 0
