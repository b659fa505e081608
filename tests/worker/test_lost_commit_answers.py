"""The connection of a transactional handler is lost at its COMMIT: what the database has decides what is counted."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy
from tests.worker.proxies import proxied
from tests.worker.support import drained, effects, make_tables, publish_many, running, until

pytestmark = pytest.mark.trust

EVENTS = 12
ANSWER = b"C\x00\x00\x00\x0bCOMMIT\x00"  # the server's, to a COMMIT
REQUEST = b"COMMIT;\x00"


def recording(runs: Counter[UUID]) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(base_delay=0.1))
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        runs[event.event_id] += 1
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])

    return registry


@pytest.mark.parametrize("deletes", [False, True], ids=["kept", "deleted"])
async def test_lost_answer_of_a_commit_counts_as_delivered(dsn: str, conn: asyncpg.Connection, deletes: bool) -> None:
    """Delivered once, with no lost lease, no retry and no duplicate (LSN-5, T17)."""
    await make_tables(conn)
    if deletes:
        await conn.execute("SELECT core.retention_set('ann', NULL, 'outbox_row', '*', 0, 0, 'HARD_DELETE')")
    runs: Counter[UUID] = Counter()
    async with proxied(dsn) as (proxy, address), running(address, recording(runs), connections=2, lease=3) as worker:
        proxy.cut_at, proxy.cuts = ANSWER, EVENTS
        await publish_many(conn, "order.placed", EVENTS)
        await drained(conn)
        await until(lambda: worker.counters.delivered >= EVENTS, what="all counted")
        assert proxy.cuts == 0
        counters = worker.counters
        assert (counters.delivered, counters.lost_leases, counters.retried, counters.duplicates) == (EVENTS, 0, 0, 0)
    assert set(runs.values()) == {1}
    assert await effects(conn) == list(range(EVENTS))


async def test_commit_that_did_not_arrive_is_tried_again(dsn: str, conn: asyncpg.Connection) -> None:
    """What was not committed is not counted; the handler runs again, and has one effect (LSN-5, T17)."""
    await make_tables(conn)
    runs: Counter[UUID] = Counter()
    async with proxied(dsn) as (proxy, address), running(address, recording(runs), connections=2, lease=3) as worker:
        proxy.cut_at, proxy.cuts = REQUEST, EVENTS
        await publish_many(conn, "order.placed", EVENTS)
        await drained(conn)
        await until(lambda: worker.counters.delivered >= EVENTS, what="all counted")
        assert proxy.cuts == 0
        assert (worker.counters.delivered, worker.counters.lost_leases) == (EVENTS, 0)
        assert sum(runs.values()) - EVENTS == worker.counters.retried > 0  # other COMMITs were cut as well
    assert await effects(conn) == list(range(EVENTS))
