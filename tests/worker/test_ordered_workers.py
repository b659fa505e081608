"""Workers and events with an ordering key (LSN-9)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import defaultdict
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, RetryPolicy
from holdfast.outcome import Snooze
from holdfast.postgres.keyed import KeyedDeliveries
from tests.worker.support import PUBLISHER, drained, effects, make_tables, process, publish, running, settled, until

QUICK = RetryPolicy(max_attempts=20, base_delay=0.001, max_delay=0.01)


class Model:
    """What must be true of the runs of one handler: within a key, never two at once, and never back.

    A run that fails is repeated before anything behind it runs.
    """

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.done: dict[str, list[int]] = defaultdict(list)
        self.inversions: list[str] = []

    def begins(self, key: str, n: int) -> None:
        if key in self.running:
            self.inversions.append(f"{key}: {n} begins while {self.running[key]} runs")
        if n in self.done[key] or (self.done[key] and n < max(self.done[key])):
            self.inversions.append(f"{key}: {n} begins after {self.done[key][-1]}")
        if len(self.done[key]) != n:
            self.inversions.append(f"{key}: {n} begins and {len(self.done[key])} are done")
        self.running[key] = n

    def ends(self, key: str, n: int, *, done: bool) -> None:
        del self.running[key]
        if done:
            self.done[key].append(n)


def registry_of(model: Model, faults: random.Random | None = None, **options: Any) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.*", name="billing.apply", retry=QUICK, **options)
    async def apply(event: EventEnvelope) -> Snooze | None:
        key, n = event.payload["key"], event.payload["n"]
        model.begins(key, n)
        fault = faults.random() if faults else 1.0
        await asyncio.sleep(0.001 if faults else 0)
        model.ends(key, n, done=fault >= 0.1)
        if fault < 0.05:
            raise RuntimeError("again")
        return Snooze(seconds=0.01) if fault < 0.1 else None

    return registry


async def publish_keys(
    conn: asyncpg.Connection, keys: int, events: int, types: tuple[str, ...] = ("order.placed",)
) -> None:
    """Events 0 to n of each key, interleaved, in one transaction."""
    batch = [
        NewEvent(types[n % len(types)], {"key": f"k{k}", "n": n}, ordering_key=f"k{k}")
        for n in range(events)
        for k in range(keys)
    ]
    async with conn.transaction():
        await PUBLISHER.publish_many(conn, batch)


async def test_several_workers_with_retries_and_snoozes_keep_the_order(dsn: str, conn: asyncpg.Connection) -> None:
    """No inversion within a key, over event types, retries, snoozes, releases and several workers (LSN-9)."""
    model, faults = Model(), random.Random(7)
    registry = registry_of(model, faults)
    settings = {"poll_interval": 1.0, "concurrency": 20}
    async with running(dsn, registry, **settings), running(dsn, registry, **settings):
        await publish_keys(conn, 100, 6, ("order.placed", "order.paid"))
        for _ in range(3):
            async with running(dsn, registry, **settings):  # which stops in the middle, and releases
                await until(lambda: sum(map(len, model.done.values())) > random.randint(100, 500))
        await drained(conn)
    assert model.inversions == []
    assert model.done == {f"k{k}": list(range(6)) for k in range(100)}


async def test_the_next_event_does_not_wait_for_a_poll(dsn: str, conn: asyncpg.Connection) -> None:
    """The worker that has settled a head goes on with its key, and a commit wakes it (LSN-9)."""
    model = Model()
    async with running(dsn, registry_of(model), poll_interval=600.0):
        for n in range(20):
            await publish(conn, "order.placed", {"key": "k", "n": n}, ordering_key="k")
            if n == 5:
                await drained(conn)
        await drained(conn)
    assert model.done == {"k": list(range(20))} and model.inversions == []


async def test_another_worker_takes_over_a_key_soon(dsn: str, conn: asyncpg.Connection) -> None:
    """An idle worker does not miss for long what another one has made claimable and cannot run itself (LSN-9)."""
    model, began, go = Model(), asyncio.Event(), asyncio.Event()
    busy = HandlerRegistry()

    @busy.handler("order.*", name="billing.apply")
    async def slow(event: EventEnvelope) -> None:
        if event.payload["key"] == "other":
            began.set()
            await go.wait()
        else:
            model.begins(event.payload["key"], event.payload["n"])
            model.ends(event.payload["key"], event.payload["n"], done=True)

    async with running(dsn, busy, concurrency=1, poll_interval=600.0):
        await publish_keys(conn, 1, 1)
        await drained(conn)
        await publish(conn, "order.placed", {"key": "other", "n": 0}, ordering_key="other")
        await began.wait()
        await publish(conn, "order.placed", {"key": "k0", "n": 1}, ordering_key="k0")
        async with running(dsn, registry_of(model), poll_interval=600.0):
            await until(lambda: model.done == {"k0": [0, 1]})
        go.set()
        await drained(conn)


@pytest.mark.slow
async def test_transactional_handlers_keep_the_order_when_a_worker_is_killed(
    dsn: str, conn: asyncpg.Connection
) -> None:
    """Kills lose nothing, and invert nothing: the ledger has the numbers of each key in order (LSN-9, LSN-3)."""
    await make_tables(conn)
    settings = {"lease": 2.0, "poll_interval": 1.0, "concurrency": 8, "connections": 8}
    keys, events = 20, 6
    async with process(dsn, "ledger", **settings):
        async with process(dsn, "ledger", **settings) as victim:
            batch = [
                NewEvent("order.placed", {"n": n * 100 + k, "seconds": 0.01}, ordering_key=f"k{k}")
                for n in range(events)
                for k in range(keys)
            ]
            async with conn.transaction():
                await PUBLISHER.publish_many(conn, batch)
            query = "SELECT count(*) >= 10 FROM outside WHERE worker = $1"
            await until(lambda: conn.fetchval(query, victim.pid), what="the victim is at work")
            victim.signal(signal.SIGKILL)
        await drained(conn)
    rows = await conn.fetch("SELECT n FROM ledger ORDER BY at")
    for k in range(keys):
        assert [row["n"] // 100 for row in rows if row["n"] % 100 == k] == list(range(events))
    assert len(await effects(conn)) == keys * events


@pytest.mark.parametrize("policy", ["block", "skip"])
async def test_a_failed_head_blocks_or_is_skipped(dsn: str, conn: asyncpg.Connection, policy: str) -> None:
    """The handler says what a dead letter does to the events behind it (LSN-9)."""
    registry, handled, broken = HandlerRegistry(), [], True

    @registry.handler("order.*", name="billing.apply", on_error="reject", on_failed_head=policy)  # type: ignore[arg-type]
    async def apply(event: EventEnvelope) -> None:
        if broken and event.payload["n"] == 0:
            raise RuntimeError("broken")
        handled.append(event.payload["n"])

    first = await publish(conn, "order.placed", {"n": 0}, ordering_key="k")
    for n in (1, 2):
        await publish(conn, "order.placed", {"n": n}, ordering_key="k")
    async with running(dsn, registry, poll_interval=600.0):
        await settled(conn, first, "failed")
        if policy == "block":
            other = await publish(conn, "order.placed", {"n": 7}, ordering_key="other")
            await settled(conn, other)
            assert handled == [7]
        else:
            await until(lambda: handled == [1, 2])
        broken = False
        await conn.execute("SELECT core.outbox_replay($1, 0, 'ann')", first)
        await drained(conn)
    assert handled == ([7, 0, 1, 2] if policy == "block" else [1, 2, 0])


async def test_events_without_a_key_cost_no_claim_by_key(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is paid when no event has a key; a flood of one kind does not starve the other (LSN-9)."""
    asked = 0
    claim = KeyedDeliveries.claim_ordered

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        return await claim(*arguments, **options)

    monkeypatch.setattr(KeyedDeliveries, "claim_ordered", counted)
    model = Model()
    async with running(dsn, registry_of(model), poll_interval=600.0):
        for k in range(10):
            await publish(conn, "order.placed", {"key": f"p{k}", "n": 0})
        await drained(conn)
        assert asked == 0
        await publish(conn, "order.placed", {"key": "k", "n": 0}, ordering_key="k")
        await drained(conn)
        assert asked > 0


async def test_cancelled_and_expired_heads_do_not_block(dsn: str, conn: asyncpg.Connection) -> None:
    """Neither is a dead letter (LSN-9, LSN-8)."""
    model = Model()
    await publish(conn, "order.placed", {"key": "k", "n": 8}, ordering_key="k", key="later", delay=3600)
    await publish(conn, "order.placed", {"key": "k", "n": 9}, ordering_key="k", expires_in=0.01)
    last = await publish(conn, "order.placed", {"key": "k", "n": 0}, ordering_key="k")
    async with running(dsn, registry_of(model), poll_interval=1.0):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(settled(conn, last), 0.3)
        assert model.done == {}  # the delayed one is the head
        async with conn.transaction():
            assert await PUBLISHER.cancel(conn, "later")
        await settled(conn, last)
    assert model.done == {"k": [0]}
