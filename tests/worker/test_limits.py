"""Time limits, and events cancelled from outside while they wait or run."""

from __future__ import annotations

import asyncio
import threading
import time
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, RetryPolicy
from holdfast.telemetry import Retried
from holdfast.worker.listener import Listener
from tests.worker.support import Facts, effects, make_tables, publish, row, running, settled, until

QUICK = RetryPolicy(max_attempts=2, base_delay=0.001, max_delay=0.001)


@pytest.mark.parametrize("kind", ["async", "sync", "tx"])
async def test_time_limit_counts_as_an_attempt(dsn: str, conn: asyncpg.Connection, kind: str) -> None:
    """An attempt past its limit is cancelled, counts, says TimeoutError, and leaves no writes (LSN-11)."""
    await make_tables(conn)
    registry, facts, release = HandlerRegistry(), Facts(), threading.Event()

    if kind == "async":

        @registry.handler("order.placed", name="billing.charge", retry=QUICK, timeout=0.2)
        async def charge(event: EventEnvelope) -> None:
            await asyncio.sleep(30)

    elif kind == "sync":

        @registry.handler("order.placed", name="billing.charge", retry=QUICK, timeout=0.2)
        def block(event: EventEnvelope) -> None:
            release.wait(0.5)

    else:

        @registry.handler("order.placed", name="billing.charge", retry=QUICK, timeout=0.2)
        async def write(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            await tx.execute("INSERT INTO ledger (n) VALUES (1)")
            await tx.execute("SELECT pg_sleep(30)")

    identity = await publish(conn, "order.placed")
    try:
        async with running(dsn, registry, facts):
            started = time.monotonic()
            failed = await settled(conn, identity, "failed")
            assert time.monotonic() - started < 5
    finally:
        release.set()
    assert (failed["attempts"], failed["failure_reason"]) == (2, "retry_terminal")
    assert failed["last_error"] == "TimeoutError: the handler ran longer than its limit of 0.2 s"
    assert len(facts.of(Retried)) == 1
    assert await effects(conn) == []


async def test_handler_that_survives_its_cancellation(dsn: str, conn: asyncpg.Connection) -> None:
    """One that swallows the cancellation or answers it with an error of its own harms no later event (LSN-11)."""
    registry, seen = HandlerRegistry(), []
    none = RetryPolicy(strategy="none")

    @registry.handler("order.placed", name="billing.charge", retry=none, timeout=0.1)
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.payload.get("how"))
        try:
            if "how" in event.payload:
                await asyncio.sleep(30)
        except asyncio.CancelledError:
            if event.payload["how"] == "error":
                raise ConnectionError("closed while waiting") from None
            if event.payload["how"] == "plain":
                raise
        if event.payload.get("cancelled"):
            raise asyncio.CancelledError

    swallowed = await publish(conn, "order.placed", {"how": "swallow"})
    answered = await publish(conn, "order.placed", {"how": "error"})
    own = await publish(conn, "order.placed", {"cancelled": True})
    plain = await publish(conn, "order.placed", {"how": "plain"})
    async with running(dsn, registry, concurrency=1) as worker:
        # Nobody can tell whether what it did before counts: it said that it is done.
        await settled(conn, swallowed)
        assert "ConnectionError" in (await settled(conn, answered, "failed"))["last_error"]
        assert "CancelledError" in (await settled(conn, own, "failed"))["last_error"]
        assert "TimeoutError" in (await settled(conn, plain, "failed"))["last_error"]
        good = await publish(conn, "order.placed")
        await settled(conn, good)
        await until(lambda: worker.in_flight == 0, what="nothing is held")


async def test_cancelling_a_running_event(dsn: str, conn: asyncpg.Connection) -> None:
    """core.outbox_cancel_event cancels the handler at once; nothing it does afterwards is settled (LSN-11)."""
    registry, started, ended = HandlerRegistry(), asyncio.Event(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append(time.monotonic())
            raise

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, poll_interval=3600) as worker:
        await started.wait()
        cancelled = time.monotonic()
        assert await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann@example.com')", identity) == 1
        await until(lambda: ended, within=5, what="the handler was cancelled")
        assert ended[0] - cancelled < 1.0
        await until(lambda: worker.in_flight == 0, within=5, what="the worker let go")
        assert worker.counters.lost_leases == 1
    found = await row(conn, identity)
    assert (found["status"], found["failure_reason"]) == ("failed", "cancelled")
    assert found["last_error"] == "cancelled by ann@example.com"
    assert found["deleted_at"] is not None
    assert await conn.fetchval("SELECT count(*) FROM core.failed") == 0


async def test_cancelling_without_a_listener(dsn: str, conn: asyncpg.Connection) -> None:
    """With notifications unheard, the next extension of the lease tells that the lease is gone (LSN-11, LSN-3)."""
    registry, started, ended = HandlerRegistry(), asyncio.Event(), asyncio.Event()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, listen=False, lease=1.5):
        await started.wait()
        await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann')", identity)
        async with asyncio.timeout(5):
            await ended.wait()


async def test_cancelling_before_the_worker_hears(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler whose event was cancelled while the worker could not be told is stopped when it listens (LSN-11)."""
    registry, started, cancelled, heard = HandlerRegistry(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    listen = Listener._listen

    async def deaf(listener: Listener) -> None:
        await heard.wait()
        await listen(listener)

    monkeypatch.setattr(Listener, "_listen", deaf)

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, lease=60.0):
        await until(started.is_set, what="the handler runs")
        await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann')", identity)
        heard.set()
        await until(cancelled.is_set, within=5, what="the handler is stopped")


async def test_many_that_are_cancelled_before_the_worker_hears(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many were cancelled, each is stopped when the worker listens (LSN-11)."""
    registry, heard, many = HandlerRegistry(), asyncio.Event(), 700
    started, stopped = set[UUID](), set[UUID]()
    listen = Listener._listen

    async def deaf(listener: Listener) -> None:
        await heard.wait()
        await listen(listener)

    monkeypatch.setattr(Listener, "_listen", deaf)

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        started.add(event.event_id)
        try:
            await asyncio.sleep(60)
        finally:
            stopped.add(event.event_id)

    identities = [await publish(conn, "order.placed") for _ in range(many)]
    async with running(dsn, registry, lease=60.0, concurrency=many):
        await until(lambda: len(started) == many, what="all handlers run")
        await conn.execute("SELECT core.outbox_cancel_event(i, 'ann') FROM unnest($1::uuid[]) AS i", identities)
        heard.set()
        await until(lambda: len(stopped) == many, within=15, what="all handlers are stopped")


async def test_cancelling_a_handler_that_goes_on(dsn: str, conn: asyncpg.Connection) -> None:
    """A thread cannot be cancelled; what it returns is fenced off (LSN-11, LSN-3)."""
    registry, started, release = HandlerRegistry(), threading.Event(), threading.Event()

    @registry.handler("order.placed", name="billing.charge")
    def charge(event: EventEnvelope) -> None:
        started.set()
        release.wait(20)

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry) as worker:
        await until(started.is_set, what="the handler runs")
        await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann')", identity)
        await until(lambda: worker.in_flight == 0, within=5, what="the worker let go")
        release.set()
        other = await publish(conn, "order.placed")
        await settled(conn, other)
    found = await row(conn, identity)
    assert (found["status"], found["failure_reason"]) == ("failed", "cancelled")


async def test_cancelling_a_pending_event(dsn: str, conn: asyncpg.Connection) -> None:
    """An event that waits for its time, or for a retry, is cancelled and never runs again (LSN-11)."""
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(base_delay=60))
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        seen.append(event.event_id)
        raise ConnectionError

    delayed = await publish(conn, "order.placed", delay=1.0)
    retried = await publish(conn, "order.placed")
    async with running(dsn, registry):
        await until(lambda: seen, what="the first attempt")
        await settled(conn, retried, "pending")
        for identity in (delayed, retried):
            assert await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann')", identity) == 1
            assert await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann')", identity) == 0
        after = await publish(conn, "order.placed", delay=1.2)
        await until(lambda: after in seen, what="a later event")
        await settled(conn, after, "pending")
        await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann')", after)
    assert seen == [retried, after]
