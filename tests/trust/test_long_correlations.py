"""A producer writes as long a correlation id as it likes; logs, traces and Sentry have the beginning of it (SEC-1)."""

from __future__ import annotations

import json

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Reject
from holdfast.context import HandlerContext, current_context
from holdfast.observability.logging import add_delivery
from holdfast.telemetry import Failed
from tests.worker.support import Facts, drained, running

pytestmark = pytest.mark.trust


async def test_a_long_correlation_id_is_cut_where_it_is_told(dsn: str, conn: asyncpg.Connection) -> None:
    """In what is told of the delivery, and in what the handler logs itself; the handler has all of it (SEC-1,
    OBS-1).
    """
    registry = HandlerRegistry()
    lengths: list[tuple[int, int]] = []

    @registry.handler("order.placed", name="billing.charge_card")
    async def handle(event: EventEnvelope, context: HandlerContext) -> Reject:
        assert current_context.get() is not None
        lengths.append((len(context.correlation_id), len(add_delivery(None, "", {})["correlation_id"])))
        return Reject("not ours")

    facts = Facts()
    async with running(dsn, registry, facts):
        await conn.execute(
            "INSERT INTO core.outbox (event_type, source, payload, headers) VALUES ('order.placed', 'shop', '{}', $1)",
            json.dumps({"correlation_id": "A" * 60_000}),
        )
        await drained(conn)
    assert lengths == [(60_000, 128)]
    assert [len(fact.correlation_id) for fact in facts.of(Failed)] == [128]
