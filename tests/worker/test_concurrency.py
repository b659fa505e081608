"""How many events a worker runs at once when nobody has told it (LSN-15)."""

from __future__ import annotations

import asyncio
import time

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.worker.auto_concurrency import START
from tests.worker.support import Facts, publish_many, running, until


async def test_it_grows_with_handlers_that_wait(dsn: str, conn: asyncpg.Connection) -> None:
    """More run at once than the worker started with, and metrics, health and the log say so (LSN-15)."""
    registry, facts, now, peak = HandlerRegistry(), Facts(), 0, 0

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        await asyncio.sleep(0.05)
        now -= 1

    await publish_many(conn, "order.placed", 12_000)
    async with running(dsn, registry, facts) as worker:
        await until(lambda: worker.concurrency >= 2 * START)
        assert worker.measurements().concurrency == worker.health().concurrency == worker.concurrency
        await until(lambda: peak > START)
        await until(lambda: facts.notices("concurrency_changed"))
    assert worker.measurements().concurrency == 0


@pytest.mark.slow
async def test_it_shrinks_with_handlers_that_block(dsn: str, conn: asyncpg.Connection) -> None:
    """Fewer begin at once while one handler blocks the loop; a handler's own limit is never exceeded (LSN-15)."""
    registry, running_now, most = HandlerRegistry(), 0, 0

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        await asyncio.sleep(0)
        time.sleep(0.005)

    @registry.handler("order.shipped", name="mail.tell", concurrency=3)
    async def tell(event: EventEnvelope) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0.001)
        running_now -= 1

    await publish_many(conn, "order.placed", 2_000)
    await publish_many(conn, "order.shipped", 200)
    async with running(dsn, registry, grace=0.1) as worker:
        await until(lambda: worker.concurrency < START / 2)
    assert most <= 3
