"""A handler in a thread that overran its time limit never overlaps with its own retry."""

from __future__ import annotations

import threading
import time

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy
from tests.worker.support import Facts, publish, row, running, settled, until

pytestmark = pytest.mark.trust

FIVE = RetryPolicy(max_attempts=5, base_delay=0.001, max_delay=0.001)


@pytest.mark.slow
async def test_past_its_limit_five_times(dsn: str, conn: asyncpg.Connection) -> None:
    """The lease is held while the thread lives, also for longer than leases are; two workers compete (LSN-16, T23)."""
    registry, facts, lock = HandlerRegistry(), Facts(), threading.Lock()
    runs = now = most = 0

    @registry.handler("order.placed", name="billing.charge", timeout=0.1, retry=FIVE)
    def charge(event: EventEnvelope) -> None:
        nonlocal runs, now, most
        with lock:
            runs, now = runs + 1, now + 1
            most, first = max(most, now), runs == 1
        time.sleep(2.0 if first else 0.3)
        with lock:
            now -= 1

    settings = {"lease": 0.5, "poll_interval": 0.1}
    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, facts, **settings), running(dsn, registry, facts, **settings):
        failed = await settled(conn, identity, "failed")
    assert (runs, most) == (5, 1)
    assert (failed["attempts"], failed["failure_reason"]) == (5, "retry_terminal")
    assert failed["last_error"] == "TimeoutError: the handler ran longer than its limit of 0.1 s"
    assert facts.notices("handler_overran")


async def test_stop_with_a_thread_past_its_limit(dsn: str, conn: asyncpg.Connection) -> None:
    """The worker stops within its grace, and the event is due when the process has had time to end (LSN-16, LSN-4)."""
    registry, facts, release = HandlerRegistry(), Facts(), threading.Event()

    @registry.handler("order.placed", name="billing.charge", timeout=0.1)
    def charge(event: EventEnvelope) -> None:
        release.wait(60)

    identity = await publish(conn, "order.placed")
    try:
        async with running(dsn, registry, facts, grace=0.2):
            await until(lambda: facts.notices("handler_overran"), what="it overran")
            stopping = time.monotonic()
        assert time.monotonic() - stopping < 0.2 + 5
        found = await row(conn, identity)
        assert (found["status"], found["attempts"]) == ("pending", 0)
        assert await conn.fetchval("SELECT available_at > now() + '2 s' FROM core.outbox WHERE id = $1", identity)
    finally:
        release.set()
    await conn.execute("DELETE FROM core.outbox")
