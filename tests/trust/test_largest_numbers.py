"""Numbers at their maxima are refused at the edge, or counted no further: the lane goes on (OPS-6, T28)."""

from __future__ import annotations

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, RetryPolicy
from tests.worker.support import publish, running, settled

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

FAST = RetryPolicy(max_attempts=2, base_delay=0.01, max_delay=0.02)


async def test_rows_at_the_maxima_are_delivered(dsn: str, conn: asyncpg.Connection) -> None:
    """Versions and attempts as large as their columns; one such row fails, the others are handled (T28)."""
    registry, seen = HandlerRegistry(), list[tuple[int, int]]()

    @registry.handler("order.placed", name="billing.charge", retry=FAST)
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        seen.append((event.event_version, context.attempt))
        if event.payload.get("fails"):
            raise ConnectionError("down")

    insert = """INSERT INTO core.outbox (event_type, source, payload, event_version, attempts)
                VALUES ('order.placed', 'shop', $1::text::jsonb, $2, $3) RETURNING id"""
    version = await conn.fetchval(insert, "{}", 2**31 - 1, 0)
    spent = await conn.fetchval(insert, '{"fails": true}', 1, 2**31 - 1)
    almost = await conn.fetchval(insert, '{"fails": true}', 2, 2**31 - 2)
    plain = await publish(conn, "order.placed")
    async with running(dsn, registry):
        await settled(conn, version)
        await settled(conn, plain)
        assert (await settled(conn, spent, "failed"))["failure_reason"] == "max_deliveries"
        assert (await settled(conn, almost, "failed"))["failure_reason"] == "max_deliveries"
    assert (2**31 - 1, 1) in seen


@pytest.mark.parametrize(
    ("column", "value"),
    [("event_version", 2**31), ("generation", 2**63), ("attempts", 2**31), ("priority", 2**15), ("event_version", 0)],
)
async def test_larger_ones_are_refused(conn: asyncpg.Connection, column: str, value: int) -> None:
    """By the column or its check, and nothing is written (T28)."""
    with pytest.raises((asyncpg.DataError, asyncpg.CheckViolationError)):
        await conn.execute(
            f"INSERT INTO core.outbox (event_type, source, payload, {column}) VALUES ('a.b', 'shop', '{{}}', {value})"
        )
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0


async def test_the_last_generation_can_be_served(dsn: str, conn: asyncpg.Connection) -> None:
    """The largest generation has a channel, a worker and a delivery like any other (T28)."""
    registry, seen = HandlerRegistry(), list[str]()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.event_type)

    async with running(dsn, registry, generation=2**63 - 1):
        event = await conn.fetchval(
            """INSERT INTO core.outbox (event_type, source, payload, generation, channel)
               VALUES ('order.placed', 'shop', '{}', 9223372036854775807, 'outbox_gen_9223372036854775807')
               RETURNING id"""
        )
        await settled(conn, event)
    assert seen == ["order.placed"]


async def test_sequences_at_their_end(dsn: str, conn: asyncpg.Connection) -> None:
    """A sequence that has counted to its end refuses the publish, with the sequence's name; workers go on (T28)."""
    registry, seen = HandlerRegistry(), list[str]()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.event_type)

    async with running(dsn, registry):
        first = await publish(conn, "order.placed")
        await settled(conn, first)
        await conn.execute("SELECT setval('core.outbox_seq_seq', 9223372036854775807)")
        with pytest.raises(asyncpg.PostgresError, match="outbox_seq_seq"):
            await publish(conn, "order.placed")
        await conn.execute("SELECT setval('core.outbox_seq_seq', 1)")
        second = await publish(conn, "order.placed")
        await settled(conn, second)
