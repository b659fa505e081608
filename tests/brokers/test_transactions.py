"""Handlers in the application's own transactions get their events from a broker with the same guarantees."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Publisher, Reject, RetryPolicy
from tests.brokers.double import Broker
from tests.handling.kinds import KINDS, TABLE, Kind, Work
from tests.worker.support import Facts, drained, publish_many, running, until

OPTIONS: dict[str, Any] = {"substrate": "nats://double", "lease": 5.0, "poll_interval": 0.2}
QUICK = RetryPolicy(max_attempts=3, base_delay=0.02, max_delay=0.05)
PUBLISHER = Publisher("ledger")


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_effects_happen_once_in_every_library(
    dsn: str, conn: asyncpg.Connection, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes, what is published, and the inbox row are one commit; a failure is a row of the handler (SCL-2,
    LSN-13).
    """
    broker = Broker(doubles=2)
    monkeypatch.setattr("holdfast.worker.substrate.engine_of", lambda _address: broker)
    await conn.execute(TABLE)
    tries: Counter[int] = Counter()

    async def body(event: EventEnvelope, work: Work) -> Reject | None:
        number = event.payload["n"]
        tries[number] += 1
        await work.book(event, number)
        await work.flush()
        await work.publish(PUBLISHER, "entry.booked", {"n": number})
        if number == 3 and tries[number] == 1:
            raise ConnectionError("the partner is away")
        return Reject("not ours") if number == 5 else None

    registry, facts = HandlerRegistry(), Facts()
    registry.add("ledger.book", ("order.booked",), kind.handler(body), retry=QUICK)
    async with (
        kind.source(dsn) as transactions,
        running(dsn, registry, facts, transactions=transactions, **OPTIONS),
    ):
        moved = "SELECT bool_and(via = 'nats') FROM core.subscriptions WHERE retired_at IS NULL"
        await until(lambda: conn.fetchval(moved), what="moved")
        await publish_many(conn, "order.booked", 20)
        await until(lambda: conn.fetchval("SELECT count(*) = 19 FROM core.event_handled"), what="handled")
        await until(lambda: not any(broker.consumers.values()), what="the broker is empty")
        await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM core.failed"), what="the dead letter")
    numbers = [row["n"] for row in await conn.fetch("SELECT n FROM entries ORDER BY n")]
    assert numbers == [number for number in range(20) if number != 5]
    published = "SELECT count(*) FROM core.outbox WHERE event_type = 'entry.booked'"
    assert await conn.fetchval(published) == 19
    assert await conn.fetchval("SELECT failure_reason FROM core.failed") == "rejected"
    assert tries[3] == 2


async def test_answer_to_a_commit_that_is_lost_is_found_out(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is cut at its commit leaves one effect, and no message behind (LSN-5)."""
    broker = Broker()
    monkeypatch.setattr("holdfast.worker.substrate.engine_of", lambda _address: broker)
    await conn.execute(TABLE)
    registry, cut = HandlerRegistry(), Counter[int]()

    @registry.handler("order.booked", name="ledger.book", retry=QUICK)
    async def book(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        number = event.payload["n"]
        await tx.execute("INSERT INTO entries (event_id, n) VALUES ($1, $2)", event.event_id, number)
        cut[number] += 1
        if number % 5 == 0 and cut[number] == 1:
            pid = await tx.fetchval("SELECT pg_backend_pid()")
            async with turn:
                await ending.execute("SELECT pg_terminate_backend($1)", pid)

    ending, turn = await asyncpg.connect(dsn), asyncio.Lock()
    async with running(dsn, registry, **OPTIONS):
        moved = "SELECT bool_and(via = 'nats') FROM core.subscriptions WHERE retired_at IS NULL"
        await until(lambda: conn.fetchval(moved), what="moved")
        await publish_many(conn, "order.booked", 10)
        await until(lambda: conn.fetchval("SELECT count(*) = 10 FROM core.event_handled"), what="handled")
        await until(lambda: not any(broker.consumers.values()), what="the broker is empty")
        await drained(conn)
    await ending.close()
    assert [row["n"] for row in await conn.fetch("SELECT n FROM entries ORDER BY n")] == list(range(10))
