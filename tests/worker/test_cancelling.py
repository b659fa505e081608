"""Cancelling events from outside, what a notification alone cannot do, and what a dead worker costs what it held."""

import asyncio
import contextlib
import uuid
from datetime import timedelta

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, RetryPolicy, Worker
from holdfast.worker.lease_keeper import digest_of
from tests.outbox import CHANNEL, NOBODY
from tests.worker.support import Facts, drained, running, until


async def test_a_forged_notification_cancels_nothing(dsn: str, conn: asyncpg.Connection) -> None:
    """Any role may send a notification; only the database's word ends a handler (LSN-11, S6)."""
    registry, started, finished = HandlerRegistry(), asyncio.Event(), asyncio.Event()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        started.set()
        async with asyncio.timeout(20):
            await finished.wait()

    async with running(dsn, registry, lease=1.0) as worker:
        async with conn.transaction():
            event = await Publisher("shop").publish(conn, "order.placed", {})
        await started.wait()
        for _ in range(5):
            await conn.execute(f"NOTIFY {CHANNEL}, 'cancel {digest_of(event.event_id)}'")
        heard = worker.counters.wakeups
        await until(lambda: worker.counters.wakeups >= heard, what="the notifications are heard")
        # Longer than the lease keeper takes to ask the database about them.
        extended = await conn.fetchval("SELECT lease_expires_at FROM core.outbox")
        await until(
            lambda: conn.fetchval("SELECT lease_expires_at > $1 FROM core.outbox", extended), what="a heartbeat"
        )
        finished.set()
        await drained(conn)
        assert worker.counters.lost_leases == 0
    assert await conn.fetchrow("SELECT status, attempts FROM core.outbox") == ("delivered", 1)


async def test_a_handler_that_swallows_its_cancellation_is_reported(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can end it, so a notice names it, and another what the end of the worker waits for (LSN-4)."""
    monkeypatch.setattr("holdfast.worker.dispatcher._CANCEL_NOTICE", 0.1)
    registry, facts, names = HandlerRegistry(), Facts(), list[str]()

    @registry.handler("order.placed", name="billing.charge", timeout=0.1)
    async def charge(event: EventEnvelope) -> None:
        names.append(getattr(asyncio.current_task(), "get_name", str)())
        while not facts.notices("worker_stopping"):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async with running(dsn, registry, facts, grace=5.0):
        async with conn.transaction():
            await Publisher("shop").publish(conn, "order.placed", {})
        await until(lambda: facts.notices("handler_overran"), what="a notice")
    [overran], [stopping] = facts.notices("handler_overran"), facts.notices("worker_stopping")
    assert overran.details["handler_name"] == "billing.charge" and "CancelledError" in str(overran.details["remedy"])
    assert (stopping.details["running"], stopping.details["grace_s"]) == (1, 5.0)
    assert stopping.details["handlers"] == ["billing.charge"] and "second Ctrl-C" in str(stopping.details["remedy"])
    assert names == ["handler billing.charge"], "as it is named among what is left behind"


@pytest.mark.slow
async def test_a_running_transactional_handler_can_be_cancelled(dsn: str, conn: asyncpg.Connection) -> None:
    """Its transaction holds the row, so the wish is written down; the handler ends, and nothing stays of it
    (LSN-11).
    """
    await conn.execute("CREATE TABLE ledger (n int)")
    registry, started = HandlerRegistry(), asyncio.Event()
    runs = 0

    @registry.handler("order.placed", name="ledger.record")
    async def record(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        nonlocal runs
        runs += 1
        await tx.execute("INSERT INTO ledger VALUES (1)")
        started.set()
        await asyncio.sleep(60)

    async with running(dsn, registry, lease=3.0):
        async with conn.transaction():
            event = await Publisher("shop").publish(conn, "order.placed", {})
        await started.wait()
        async with asyncio.timeout(2):  # it does not wait for the handler
            assert await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann@example.org')", event.event_id) == 1
        await drained(conn, within=10)
    row = await conn.fetchrow("SELECT status, failure_reason, deleted_at IS NOT NULL FROM core.outbox")
    assert tuple(row) == ("failed", "cancelled", True)
    assert (runs, await conn.fetchval("SELECT count(*) FROM ledger")) == (1, 0)
    assert await conn.fetchval("SELECT count(*) FROM core.cancel_requests") == 0
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 0


async def test_one_dead_worker_does_not_fail_what_it_had_not_started(dsn: str, conn: asyncpg.Connection) -> None:
    """A handler with a single attempt still gets the events that a worker took to its grave (A3, DLQ-1)."""
    registry, seen = HandlerRegistry(), set()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(strategy="none"))
    async def charge(event: EventEnvelope) -> None:
        seen.add(event.payload["n"])

    async with conn.transaction():
        await Publisher("shop").publish_many(conn, [NewEvent("order.placed", {"n": n}) for n in range(50)])
    await conn.execute(
        """
        UPDATE core.outbox SET status = 'in_flight', attempts = 1, claimed_by = $1, lease_token = gen_random_uuid(),
               lease_expires_at = now() - $2::interval
        """,
        uuid.UUID(str(NOBODY)),
        timedelta(seconds=1),
    )
    await Worker(dsn, registry, observers=()).drain()
    assert seen == set(range(50))
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 50
