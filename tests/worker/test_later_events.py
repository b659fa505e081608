"""Events for later, events that expire, and producers who change their mind."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.telemetry import Failed
from tests.worker.support import (
    PUBLISHER,
    Facts,
    Latencies,
    drained,
    publish,
    row,
    running,
    settled,
    until,
)


class Punctual:
    """A registry whose handlers note how late an event is, on the database's clock."""

    def __init__(self, connection: asyncpg.Connection, *names: str) -> None:
        self.registry = HandlerRegistry()
        self.late = Latencies()
        self.seen: list[int] = []
        self._lock = asyncio.Lock()

        async def note(event: EventEnvelope) -> None:
            async with self._lock:
                query = (
                    "SELECT extract(epoch FROM clock_timestamp() - available_at)::float8 FROM core.outbox WHERE id = $1"
                )
                self.late.append(await connection.fetchval(query, event.event_id))
            self.seen.append(event.payload.get("n", 0))

        for name in names or ("billing.charge",):
            self.registry.add(name, ("order.placed",), note)


@pytest.fixture
async def other(dsn: str) -> asyncpg.Connection:
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


@pytest.mark.parametrize("names", [("billing.charge",), ("billing.charge", "mail.thank")], ids=["one", "two"])
async def test_delayed_events_are_punctual(
    dsn: str, conn: asyncpg.Connection, other: asyncpg.Connection, names: tuple[str, ...]
) -> None:
    """Due within 50 ms of their time with hourly polling, for one handler and for several; never early (PUB-2)."""
    punctual = Punctual(other, *names)
    async with running(dsn, punctual.registry, poll_interval=3600):
        now = await conn.fetchval("SELECT clock_timestamp()")
        for n in range(8):
            at = now + timedelta(seconds=0.5 + 0.15 * n)
            when = {"available_at": at} if n % 2 else {"delay": (at - now).total_seconds()}
            await publish(conn, "order.placed", {"n": n}, **when)
        await until(lambda: len(punctual.seen) == 8 * len(names), what="all of them")
        await drained(conn)
    print(f"delayed events, late by: {punctual.late}")
    assert min(punctual.late) >= 0
    assert sorted(punctual.late)[len(punctual.late) // 2] <= 0.05
    assert max(punctual.late) <= 0.5
    assert sorted(set(punctual.seen)) == list(range(8))


async def test_delay_beside_other_work(dsn: str, conn: asyncpg.Connection, other: asyncpg.Connection) -> None:
    """A delayed event is not forgotten because others came and went in between (PUB-2)."""
    punctual = Punctual(other)
    async with running(dsn, punctual.registry, poll_interval=3600):
        await publish(conn, "order.placed", {"n": 99}, delay=1.0)
        for n in range(20):
            await publish(conn, "order.placed", {"n": n})
            await asyncio.sleep(0.02)
        await until(lambda: 99 in punctual.seen, within=3, what="the delayed event")
        await drained(conn)
    assert punctual.late[punctual.seen.index(99)] <= 0.5


@pytest.mark.parametrize("kind", ["async", "tx", "split"])
async def test_expired_events_are_not_run(dsn: str, conn: asyncpg.Connection, kind: str) -> None:
    """Past expires_at an event is a tombstone with reason expired, and not in the dead-letter queue (PUB-2)."""
    registry, facts, seen = HandlerRegistry(), Facts(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.payload["n"])

    if kind == "tx":
        registry = HandlerRegistry()

        @registry.handler("order.placed", name="billing.charge")
        async def write(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            seen.append(event.payload["n"])

    if kind == "split":

        @registry.handler("order.placed", name="mail.thank")
        async def thank(event: EventEnvelope) -> None:
            seen.append(event.payload["n"])

    soon = await publish(conn, "order.placed", {"n": 1}, expires_in=0.2)
    later = await publish(conn, "order.placed", {"n": 2}, expires_at=datetime.now(UTC) + timedelta(hours=1))
    gone = "SELECT expires_at < clock_timestamp() FROM core.outbox WHERE id = $1"
    await until(lambda: conn.fetchval(gone, soon), what="the first has expired")
    handlers = 2 if kind == "split" else 1
    async with running(dsn, registry, facts) as worker:
        await drained(conn)
        await until(lambda: worker.counters.delivered == handlers, what="the other is delivered")
        assert worker.counters.expired == handlers
        assert worker.counters.failed == 0
    assert seen == [2] * handlers
    query = "SELECT * FROM core.outbox WHERE coalesce(origin_id, id) = $1 AND handler_name <> '*'"
    for found in await conn.fetch(query, soon):
        assert (found["status"], found["failure_reason"]) == ("failed", "expired")
        assert found["deleted_at"] is not None
    for found in await conn.fetch(query, later):
        assert found["status"] == "delivered"
    assert await conn.fetchval("SELECT count(*) FROM core.failed") == 0
    assert {fact.failure_reason for fact in facts.of(Failed)} <= {"expired"}


async def test_cancel_by_key(dsn: str, conn: asyncpg.Connection, other: asyncpg.Connection) -> None:
    """A producer takes a pending event back by its key; what has run cannot be taken back (PUB-2)."""
    punctual = Punctual(other)
    async with running(dsn, punctual.registry, poll_interval=3600):
        first = await publish(conn, "order.placed", {"n": 1}, key="reminder-1", delay=0.4)
        second = await publish(conn, "order.placed", {"n": 2}, key="reminder-2", delay=0.5)
        async with conn.transaction():
            assert await PUBLISHER.cancel(conn, "reminder-1")
            assert not await PUBLISHER.cancel(conn, "reminder-1")
        await settled(conn, second)
        async with conn.transaction():
            assert not await PUBLISHER.cancel(conn, "reminder-2")
    assert punctual.seen == [2]
    cancelled = await row(conn, first)
    assert (cancelled["status"], cancelled["failure_reason"]) == ("failed", "cancelled")
    assert cancelled["deleted_at"] is not None


async def test_reschedule_by_key(dsn: str, conn: asyncpg.Connection, other: asyncpg.Connection) -> None:
    """An event moved forward runs at its new time although the worker sleeps until the old one (PUB-2)."""
    punctual = Punctual(other)
    async with running(dsn, punctual.registry, poll_interval=3600):
        await publish(conn, "order.placed", {"n": 1}, key="sooner", delay=3600)
        await publish(conn, "order.placed", {"n": 2}, key="later", delay=0.3)
        async with conn.transaction():
            assert await PUBLISHER.reschedule(conn, "sooner", delay=0.6)
            assert await PUBLISHER.reschedule(conn, "later", delay=0.9)
        await until(lambda: punctual.seen == [1, 2], within=5, what="both, in the new order")
        await drained(conn)
    assert min(punctual.late) >= 0
    assert max(punctual.late) <= 0.5


async def test_publishing_again_with_a_key(dsn: str, conn: asyncpg.Connection, other: asyncpg.Connection) -> None:
    """A key belongs to one pending event: a second publish is ignored or moves it, until it has run (PUB-2)."""
    punctual = Punctual(other)
    async with running(dsn, punctual.registry, poll_interval=3600):
        first = await publish(conn, "order.placed", {"n": 1}, key="k", delay=3600)
        assert await publish(conn, "order.placed", {"n": 2}, key="k", delay=1) == first
        assert (await row(conn, first))["attempts"] == 0
        moved = await publish(conn, "order.placed", {"n": 3}, key="k", delay=0.2, on_duplicate="reschedule")
        assert moved == first
        await settled(conn, first, within=5)
        again = await publish(conn, "order.placed", {"n": 4}, key="k")
        assert again != first
        await settled(conn, again, within=5)
    assert punctual.seen == [1, 4]
