"""An operator rewrites the outbox under load: deliveries stall and go on, none is lost or made twice (OPS-6, T27)."""

from __future__ import annotations

import asyncio
from collections import Counter

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from tests.worker.support import Facts, drained, make_tables, publish, running, until

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

REWRITES = {
    "vacuum full": ["VACUUM FULL core.outbox", "VACUUM FULL core.event_handled"],
    "reindex": ["REINDEX TABLE CONCURRENTLY core.outbox", "REINDEX TABLE core.event_handled"],
    "cluster": ["CLUSTER core.outbox USING outbox_pkey"],
    "add column": ["ALTER TABLE core.outbox ADD COLUMN note text", "ALTER TABLE core.outbox DROP COLUMN note"],
    "analyze with other settings": [
        "ALTER TABLE core.outbox SET (fillfactor = 90)",
        "VACUUM (ANALYZE, FREEZE) core.outbox",
    ],
}


@pytest.mark.parametrize("how", REWRITES)
async def test_deliveries_go_on(dsn: str, conn: asyncpg.Connection, how: str) -> None:
    """Plain and transactional handlers, retries among them; producers go on as well (T27)."""
    registry, plain, facts = HandlerRegistry(), Counter[int](), Facts()
    await make_tables(conn)

    @registry.handler("order.noted", name="shop.note")
    async def note(event: EventEnvelope) -> None:
        plain[event.payload["n"]] += 1

    @registry.handler("order.booked", name="shop.book")
    async def book(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (handler, n) VALUES ('shop.book', $1)", event.payload["n"])

    published, rewritten = 0, asyncio.Event()

    async def produce() -> None:
        nonlocal published
        producer = await asyncpg.connect(dsn)
        try:
            while not rewritten.is_set() or published < 50:
                await publish(producer, "order.noted", {"n": published})
                await publish(producer, "order.booked", {"n": published})
                published += 1
        finally:
            await producer.close()

    async with running(dsn, registry, facts):
        producing = asyncio.create_task(produce())
        await until(lambda: published > 10, what="producers at work")
        for _ in range(2):
            for statement in REWRITES[how]:
                await conn.execute(statement)
                before = published
                await until(lambda before=before: published > before, what="producers go on")
        rewritten.set()
        await producing
        await drained(conn)
    assert plain == Counter(range(published))
    booked = Counter(row["n"] for row in await conn.fetch("SELECT n FROM ledger"))
    assert booked == Counter(range(published))
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'failed' OR attempts <> 1") == 0
