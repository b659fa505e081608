"""Handlers of one worker are isolated: what one does costs the others nothing that they would notice."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy, WorkerSettings
from tests.worker.support import Facts, publish, publish_many, running, until

pytestmark = pytest.mark.trust

STORM = RetryPolicy(max_attempts=1000, base_delay=0.01, max_delay=0.05)


class Neighbours:
    """A handler `fast.note` that counts, and a handler `slow.call` that does not come back before `release`."""

    def __init__(self, fast: str, slow: str) -> None:
        self.registry, self.done = HandlerRegistry(), Counter[str]()
        self._released, self._threads_released = asyncio.Event(), threading.Event()
        self._add("fast.note", "fast.happened", fast)
        self._add("slow.call", "slow.happened", slow)

    def _add(self, name: str, event_type: str, kind: str) -> None:
        slow = name == "slow.call"

        async def coroutine(event: EventEnvelope) -> None:
            self.done[name] += 1
            if slow:
                await self._released.wait()

        async def transactional(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            await coroutine(event)

        async def failing(event: EventEnvelope) -> None:
            self.done[name] += 1
            raise ConnectionError("down")

        def thread(event: EventEnvelope) -> None:
            self.done[name] += 1
            if slow:
                self._threads_released.wait(60)

        functions = {"coroutine": coroutine, "thread": thread, "transactional": transactional, "failing": failing}
        self.registry.add(name, (event_type,), functions[kind], retry=STORM)

    def release(self) -> None:
        self._released.set()
        self._threads_released.set()


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        ("coroutine", "coroutine"),
        ("coroutine", "thread"),
        ("coroutine", "transactional"),
        ("coroutine", "failing"),
        ("thread", "thread"),
        ("transactional", "transactional"),
    ],
)
async def test_fast_beside_one_that_hangs(dsn: str, conn: asyncpg.Connection, fast: str, slow: str) -> None:
    """With a backlog before it of a handler that never ends, or always fails, the other one does all its work.

    The one that hangs has what the other leaves idle (LSN-17).
    """
    both = Neighbours(fast, slow)
    await publish_many(conn, "slow.happened", 300)
    await publish_many(conn, "fast.happened", 100)
    try:
        async with running(dsn, both.registry, Facts(), concurrency=20, threads=4, connections=4, grace=0.1):
            await until(lambda: both.done["fast.note"] == 100, what="the fast one has done its work")
            held = {"coroutine": 20, "thread": 4, "transactional": 3, "failing": 300}[slow]
            await until(lambda: both.done["slow.call"] >= held, what="the slow one has what is left")
            both.release()
    finally:
        both.release()
    await conn.execute("DELETE FROM core.outbox")


@pytest.mark.parametrize("hanging", [1, 4])
async def test_sessions_beside_those_that_hang(dsn: str, conn: asyncpg.Connection, hanging: int) -> None:
    """Handlers that never end use all sessions that they may, and a quick one has nearly as many as alone (LSN-17)."""
    registry, released, at_work, most = HandlerRegistry(), asyncio.Event(), Counter[str](), Counter[str]()

    def add(name: str, event_type: str, wait: Callable[[], Awaitable[object]]) -> None:
        async def handle(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            at_work[name] += 1
            most[name] = max(most[name], at_work[name])
            await wait()
            at_work[name] -= 1

        registry.add(name, (event_type,), handle, timeout=60)

    for number in range(hanging):
        add(f"slow.call{number}", f"slow.number{number}", released.wait)
        await publish_many(conn, f"slow.number{number}", 30)
    add("fast.note", "fast.happened", partial(asyncio.sleep, 0.02))
    size = WorkerSettings().connections
    try:
        async with running(dsn, registry, grace=0.1):
            await until(lambda: sum(most.values()) >= size - 1, what="those that hang have their sessions")
            await publish_many(conn, "fast.happened", 3000)
            await until(lambda: most["fast.note"] >= 0.8 * size, what="the quick one has its sessions")
            assert sum(most.values()) - most["fast.note"] < size + hanging
            released.set()
    finally:
        released.set()
    await conn.execute("DELETE FROM core.outbox")


@pytest.mark.parametrize("slow", ["coroutine", "thread"])
async def test_lone_event_beside_one_that_hangs(dsn: str, conn: asyncpg.Connection, slow: str) -> None:
    """Events that come one at a time are found while another handler has a backlog and no room (LSN-17)."""
    both = Neighbours("coroutine", slow)
    await publish_many(conn, "slow.happened", 300)
    try:
        async with running(dsn, both.registry, Facts(), concurrency=20, threads=4, grace=0.1, poll_interval=60):
            await until(lambda: both.done["slow.call"] >= 4, what="the slow one is at work")
            for number in range(1, 6):
                await publish(conn, "fast.happened")
                await until(lambda number=number: both.done["fast.note"] == number, what=f"lone event {number}")
            both.release()
    finally:
        both.release()
    await conn.execute("DELETE FROM core.outbox")


async def test_lone_event_beside_a_fast_backlog(dsn: str, conn: asyncpg.Connection) -> None:
    """A lone event is overtaken by about as many events as one claim has, not by all that were claimed (LSN-17)."""
    registry, done, overtaken = HandlerRegistry(), Counter[str](), []

    @registry.handler("bulk.happened", name="bulk.note")
    async def bulk(event: EventEnvelope) -> None:
        done["bulk"] += 1

    @registry.handler("lone.happened", name="lone.note")
    async def lone(event: EventEnvelope) -> None:
        overtaken.append(done["bulk"] - event.payload["bulk"])

    for _ in range(4):
        await publish_many(conn, "bulk.happened", 5000)
    async with running(dsn, registry):
        await until(lambda: done["bulk"] > 500, what="the backlog is being worked on")
        while done["bulk"] < 15_000:
            waiting = len(overtaken) + 1
            await publish(conn, "lone.happened", {"bulk": done["bulk"]})
            await until(lambda waiting=waiting: len(overtaken) == waiting, what="the lone event")
    # Publishing itself takes a few turns of the loop, in which the backlog goes on.
    assert statistics.median(overtaken) < 1500
