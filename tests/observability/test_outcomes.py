"""Every delivery that a worker has claimed is closed by exactly one fact, whatever its handler does."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from holdfast import (
    EventEnvelope,
    HandlerRegistry,
    NewEvent,
    Publisher,
    Reject,
    Retry,
    RetryPolicy,
    Snooze,
    TerminalHandlerError,
    Worker,
    WorkerSettings,
)
from holdfast.postgres.deliveries import Deliveries
from holdfast.telemetry import Claimed, DeliveryFact, Failed, Handled, LostLease, Notice
from tests.worker.support import Observed, drained, until

# What a handler does, and how likely it is.
BEHAVIOURS = {
    "done": 30,
    "raise": 12,
    "terminal": 4,
    "retry": 6,
    "snooze": 6,
    "reject": 4,
    "slow": 6,
    "hang": 4,
    "stubborn": 3,
    "cancel itself": 3,
    "block": 2,
    "wrong type": 3,
    "break the transaction": 3,
}
LEASED = "WHERE id = $1 AND status = 'in_flight'"
POLICY = RetryPolicy(max_attempts=3, base_delay=0.02, max_delay=0.05)


class Behaviour:
    """Handlers that do what the dice say; after `calm` they succeed."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.calm = False

    def _next(self) -> str:
        return "done" if self.calm else self._dice.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))[0]

    async def act(self, tx: asyncpg.Connection | None = None) -> Any:
        match self._next():
            case "raise":
                raise ConnectionError("no line")
            case "terminal":
                raise TerminalHandlerError("no use")
            case "retry":
                return Retry(delay=0.01)
            case "snooze":
                return Snooze(0.05)
            case "reject":
                return Reject("not wanted")
            case "slow":
                await asyncio.sleep(self._dice.uniform(0, 0.2))
            case "hang":
                await asyncio.sleep(60)
            case "stubborn":
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    await asyncio.sleep(0.05)
            case "cancel itself":
                raise asyncio.CancelledError
            case "block":
                time.sleep(0.3)
            case "wrong type":
                return "no outcome"
            case "break the transaction" if tx is not None:
                await tx.execute("SELECT 1 / 0")
        return None

    def act_in_thread(self) -> Any:
        match self._next():
            case "raise" | "break the transaction":
                raise ConnectionError("no line")
            case "terminal":
                raise TerminalHandlerError("no use")
            case "retry":
                return Retry()
            case "snooze":
                return Snooze(0.05)
            case "reject":
                return Reject()
            case "hang" | "stubborn":
                time.sleep(0.6)  # past the time limit: a thread cannot be cancelled
            case "slow":
                time.sleep(self._dice.uniform(0, 0.1))
        return None


def registry_of(behaviour: Behaviour) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.plain", retry=POLICY, timeout=0.3)
    async def plain(event: EventEnvelope) -> Any:
        return await behaviour.act()

    @registry.handler("order.placed", name="shop.with_tx", retry=POLICY, timeout=0.3)
    async def with_tx(event: EventEnvelope, tx: asyncpg.Connection) -> Any:
        return await behaviour.act(tx)

    @registry.handler("order.other", name="shop.threaded", retry=POLICY, timeout=0.3)
    def threaded(event: EventEnvelope) -> Any:
        return behaviour.act_in_thread()

    return registry


class Claims(Counter[UUID]):
    """How often each row was claimed, as the worker's statement returned it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        claim = Deliveries.claim

        async def noting(*arguments: Any) -> Any:
            claimed, keyed = await claim(*arguments)
            self.update(each.id for each in claimed)
            return claimed, keyed

        monkeypatch.setattr(Deliveries, "claim", noting)


def outcomes(observed: Observed) -> list[DeliveryFact]:
    return [fact for fact in observed if isinstance(fact, DeliveryFact)]


def describe(closed: Sequence[DeliveryFact], wrong: set[UUID]) -> list[str]:
    """What was told of some deliveries."""
    return [
        f"{fact.delivery_id}: {fact.handler_name}, attempt {fact.attempts}: {fact.result} after {fact.took}"
        for fact in closed
        if fact.delivery_id in wrong
    ]


def counts_of(worker: Worker) -> Counter[str]:
    """What its tally says, of all handlers together."""
    return sum((Counter[str](tally.counts) for tally in worker.tally().values()), Counter())


@asynccontextmanager
async def trouble(dsn: str, dice: random.Random) -> AsyncIterator[None]:
    """Leases are taken away, events cancelled and rows locked by others while the block runs."""

    async def cause() -> None:
        while True:
            await asyncio.sleep(dice.uniform(0.02, 0.08))
            row = await conn.fetchval("SELECT id FROM core.outbox WHERE status = 'in_flight' ORDER BY random() LIMIT 1")
            match dice.randrange(4):
                case 0 if row is not None:
                    await conn.execute("SELECT core.outbox_cancel_event($1, 'the test')", row)
                case 1 if row is not None:
                    await conn.execute(f"UPDATE core.outbox SET lease_token = gen_random_uuid() {LEASED}", row)
                case 2 if row is not None:
                    await conn.execute(f"UPDATE core.outbox SET lease_expires_at = now() {LEASED}", row)
                case 3 if row is not None:
                    async with conn.transaction():
                        await conn.execute("SELECT FROM core.outbox WHERE id = $1 FOR UPDATE", row)
                        await asyncio.sleep(0.05)

    conn = await asyncpg.connect(dsn)
    causing = asyncio.create_task(cause())
    try:
        yield
        assert not causing.done(), causing
    finally:
        causing.cancel()
        await asyncio.gather(causing, return_exceptions=True)
        await conn.close()


def events(dice: random.Random) -> Sequence[NewEvent]:
    """Some with the same key, some that expire at once, some for one handler and some for several."""
    return [
        NewEvent(
            dice.choice(("order.placed", "order.other")),
            {"n": number},
            idempotency_key=f"k-{dice.randrange(20)}" if dice.random() < 0.2 else None,
            expires_in=0.001 if dice.random() < 0.05 else None,
            target="shop" if dice.random() < 0.2 else None,
        )
        for number in range(60)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_each_claimed_delivery_is_closed_once(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever handlers do, under lost leases, cancelled events, locks, and workers that stop (OBS-1, OBS-2)."""
    dice, claims, observed = random.Random(seed), Claims(monkeypatch), Observed()
    behaviour = Behaviour(dice)
    registry = registry_of(behaviour)
    settings = WorkerSettings(
        lease=1.0, poll_interval=0.1, grace=0.1, batch=20, concurrency=10, threads=3, connections=3
    )
    counted: Counter[str] = Counter()
    async with trouble(dsn, dice):
        for _ in range(3):
            worker = Worker(dsn, registry, settings, observers=(observed,))
            async with worker:
                async with conn.transaction():
                    await Publisher("shop").publish_many(conn, events(dice))
                await asyncio.sleep(dice.uniform(0.3, 0.8))
            counted += counts_of(worker)
    behaviour.calm = True
    worker = Worker(dsn, registry, settings, observers=(observed,))
    async with worker:
        await drained(conn)
        await until(lambda: worker.in_flight == 0, what="nothing is held")
    counted += counts_of(worker)

    closed = outcomes(observed)
    told = Counter(fact.delivery_id for fact in closed)
    assert not describe(closed, {each for each in told | claims if told[each] != claims[each]}), f"seed {seed}"
    assert sum(fact.count for fact in observed if isinstance(fact, Claimed)) == claims.total()
    assert Counter(fact.result for fact in closed) == counted, "the tally says the same"
    assert not [fact for fact in observed.of(Notice) if fact.name in ("loop_failed", "runner_failed", "settle_refused")]
    # What ends a delivery is told once of each that has ended, and the same as the database says. A commit that was
    # cancelled, of a lease that was lost, may be told as delivered beside what the next lease's worker tells.
    ends = Counter(fact.delivery_id for fact in closed if isinstance(fact, Handled | Failed))
    in_tx = {fact.delivery_id for fact in closed if fact.handler_name == "shop.with_tx"}
    assert not describe(closed, {each for each in ends if ends[each] > 1} - in_tx), f"seed {seed}"
    ended = {fact.delivery_id: fact.result for fact in closed if isinstance(fact, Handled | Failed)}
    unknown = await conn.fetch(
        "SELECT id FROM core.outbox WHERE handler_name <> '*' AND failure_reason IS DISTINCT FROM 'cancelled' "
        "AND NOT (id = ANY($1))",
        list(ended),
    )
    lost = {fact.delivery_id for fact in closed if isinstance(fact, LostLease)}
    assert {row["id"] for row in unknown} <= lost, "settled by others only where the lease was lost"
    for row in await conn.fetch("SELECT id, status, failure_reason FROM core.outbox WHERE id = ANY($1)", list(ended)):
        known = "delivered" if ended[row["id"]] in ("delivered", "duplicate") else "failed"
        assert row["status"] == known, (seed, dict(row))
    assert all(fact.took is None or 0 <= fact.took < 60 for fact in closed)
