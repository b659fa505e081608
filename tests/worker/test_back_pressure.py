"""What is handled and not settled is bounded, however slow the database commits."""

from __future__ import annotations

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from tests.worker.support import drained, process, publish_many, running, until

pytestmark = pytest.mark.trust

# As with a synchronous standby far away.
SLOW_SETTLES = """
    CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.06); RETURN NULL; END $$;
    CREATE TRIGGER slow AFTER INSERT ON core.event_handled FOR EACH STATEMENT EXECUTE FUNCTION slow();
"""


async def test_unsettled_is_bounded(dsn: str, conn: asyncpg.Connection) -> None:
    """Handled and not settled are at most two batches and what runs; payloads do not pile up (LSN-16)."""
    registry, handled, peak = HandlerRegistry(), 0, 0

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        nonlocal handled, peak
        handled += 1
        peak = max(peak, handled - worker.counters.delivered)

    await conn.execute(SLOW_SETTLES)
    await publish_many(conn, "order.placed", 2000)
    async with running(dsn, registry, batch=100, concurrency=20) as worker:
        await drained(conn)
    assert handled == 2000
    assert 100 < peak <= 2 * 100 + 20


@pytest.mark.slow
async def test_repeats_after_a_kill(dsn: str, conn: asyncpg.Connection) -> None:
    """A kill while commits are slow repeats no more than that (LSN-16)."""
    await conn.execute(SLOW_SETTLES)
    await publish_many(conn, "order.placed", 2500)
    settings = {"batch": 100, "concurrency": 20, "lease": 1.0, "poll_interval": 0.2}
    async with process(dsn, "telling", **settings) as killed:
        await killed.wait_told("ran", times=600)
        killed.process.kill()
        await killed.end()
    async with process(dsn, "telling", **settings) as other:
        await drained(conn)
        await until(lambda: len({line["n"] for line in killed.told("ran") + other.told("ran")}) == 2500)
    repeats = len(killed.told("ran")) + len(other.told("ran")) - 2500
    assert 0 <= repeats <= 2 * 100 + 20
