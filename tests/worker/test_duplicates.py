"""One effect per handler and idempotency key, however often the key is published and whoever is first."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from tests.worker.support import (
    drained,
    effects,
    make_tables,
    publish,
    running,
    settled,
    until,
)


@pytest.mark.parametrize("kind", ["async", "sync", "tx"])
async def test_key_published_again_later(dsn: str, conn: asyncpg.Connection, kind: str) -> None:
    """The second event of a key is delivered, counted as a duplicate, and not run (LSN-6, PUB-5)."""
    await make_tables(conn)
    registry, seen = HandlerRegistry(), []

    if kind == "async":

        @registry.handler("order.placed", name="billing.charge")
        async def charge(event: EventEnvelope) -> None:
            seen.append(event.payload["n"])

    elif kind == "sync":

        @registry.handler("order.placed", name="billing.charge")
        def block(event: EventEnvelope) -> None:
            seen.append(event.payload["n"])

    else:

        @registry.handler("order.placed", name="billing.charge")
        async def write(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            seen.append(event.payload["n"])

    async with running(dsn, registry) as worker:
        await settled(conn, await publish(conn, "order.placed", {"n": 1}, idempotency_key="order-1"))
        again = await publish(conn, "order.placed", {"n": 2}, idempotency_key="order-1")
        await settled(conn, await publish(conn, "order.placed", {"n": 3}, idempotency_key="order-3"))
        await settled(conn, again)
        await drained(conn)
        await until(lambda: worker.counters.duplicates, what="the duplicate is counted")
        assert (worker.counters.delivered, worker.counters.duplicates) == (2, 1)
    assert seen == [1, 3]


@pytest.mark.parametrize("transactional", [False, True])
async def test_key_published_twice_in_one_batch(dsn: str, conn: asyncpg.Connection, transactional: bool) -> None:
    """Both are claimed together, and still one of them runs (LSN-6, PUB-5)."""
    registry, seen = HandlerRegistry(), []

    if transactional:

        @registry.handler("order.placed", name="billing.charge")
        async def write(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            seen.append(event.idempotency_key)
            await asyncio.sleep(0.05)

    else:

        @registry.handler("order.placed", name="billing.charge")
        async def charge(event: EventEnvelope) -> None:
            seen.append(event.idempotency_key)
            await asyncio.sleep(0.05)

    for _ in range(3):
        for n in range(10):
            await publish(conn, "order.placed", {"n": n}, idempotency_key=f"order-{n}")
    async with running(dsn, registry) as worker:
        await drained(conn)
        await until(lambda: worker.counters.delivered + worker.counters.duplicates == 30, what="all are counted")
        assert worker.counters.delivered == 10
    assert sorted(seen) == sorted(f"order-{n}" for n in range(10))


async def test_failure_frees_the_key_for_its_twin(dsn: str, conn: asyncpg.Connection) -> None:
    """Of two events with one key the first fails for good; the second runs (LSN-6, E2)."""
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge", on_error="reject")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.payload["n"])
        await asyncio.sleep(0.05)
        if event.payload["n"] == 1:
            raise ValueError("no")

    first = await publish(conn, "order.placed", {"n": 1}, idempotency_key="order-1")
    second = await publish(conn, "order.placed", {"n": 2}, idempotency_key="order-1")
    async with running(dsn, registry):
        await settled(conn, first, "failed")
        assert (await settled(conn, second))["attempts"] == 1
    assert seen == [1, 2]


async def test_each_handler_has_its_own_inbox(dsn: str, conn: asyncpg.Connection) -> None:
    """The key is taken per handler: two handlers, two events of one key, one effect each (LSN-6)."""
    registry, seen = HandlerRegistry(), []
    for name in ("billing.charge", "mail.thank"):

        async def note(event: EventEnvelope, name: str = name) -> None:
            seen.append(name)

        registry.add(name, ("order.placed",), note)
    async with running(dsn, registry):
        await publish(conn, "order.placed", idempotency_key="order-1")
        await drained(conn)
        await publish(conn, "order.placed", idempotency_key="order-1")
        await drained(conn)
    assert sorted(seen) == ["billing.charge", "mail.thank"]


async def test_duplicates_racing_in_two_workers(dsn: str, conn: asyncpg.Connection) -> None:
    """Transactional effects happen once, whichever worker has which copy (LSN-6, E1, P2)."""
    await make_tables(conn)

    def registry() -> HandlerRegistry:
        made = HandlerRegistry()

        @made.handler("order.placed", name="billing.charge")
        async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])
            await asyncio.sleep(0.005)

        return made

    keys, copies = 60, 4
    async with running(dsn, registry(), concurrency=20) as one, running(dsn, registry(), concurrency=20) as two:
        for _ in range(copies):
            for n in range(keys):
                await publish(conn, "order.placed", {"n": n}, idempotency_key=f"order-{n}")
        await drained(conn)
        assert one.counters.claimed and two.counters.claimed
    assert await effects(conn) == list(range(keys))
