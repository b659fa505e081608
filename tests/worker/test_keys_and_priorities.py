"""Blocked keys as operators see them, order in memory, and priorities that starve nobody (LSN-9, LSN-10, LSN-15)."""

from __future__ import annotations

import asyncpg

from holdfast import EventEnvelope, HandlerRegistry, NewEvent
from holdfast.operator import Operator
from holdfast.testing import MemoryOutbox
from tests.worker.support import PUBLISHER, drained, publish, running, settled, until


async def test_an_operator_finds_and_releases_a_blocked_key(dsn: str, conn: asyncpg.Connection) -> None:
    """The key, the handler, the head and its followers; released once, and audited (LSN-9, OPS-2)."""
    registry, handled = HandlerRegistry(), []

    @registry.handler("order.*", name="billing.apply", on_error="reject")
    async def apply(event: EventEnvelope) -> None:
        if event.payload["n"] == 0:
            raise RuntimeError("broken")
        handled.append(event.payload["n"])

    async with running(dsn, registry, poll_interval=600.0):
        head = await publish(conn, "order.placed", {"n": 0}, ordering_key="order-17")
        for n in (1, 2):
            await publish(conn, "order.placed", {"n": n}, ordering_key="order-17")
        await settled(conn, head, "failed")
        async with Operator(dsn, actor="ann@example.org") as operator:
            (blocked,) = await operator.keys.blocked()
            found = (blocked.ordering_key, blocked.handler_name, blocked.head_id, blocked.followers)
            assert found == ("order-17", "billing.apply", head, 2)
            assert await operator.keys.release("billing.apply", "order-17", dry_run=True) == head
            assert handled == []
            assert await operator.keys.release("billing.apply", "order-17", reason="never mind") == head
            await until(lambda: handled == [1, 2])
            assert await operator.keys.blocked() == []
            assert await operator.keys.release("billing.apply", "order-17") is None
            assert [line.action for line in (await operator.audit.page())][:1] == ["key.release"]


async def test_a_flood_of_urgent_events_does_not_starve_the_others(dsn: str, conn: asyncpg.Connection) -> None:
    """Each lane that is not empty gets at least a sixteenth (LSN-10)."""
    registry, order = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.apply")
    async def apply(event: EventEnvelope) -> None:
        order.append(event.payload["p"])

    events = [
        NewEvent("order.placed", {"p": p}, priority=p) for p, n in ((0, 3_000), (1, 300), (2, 300)) for _ in range(n)
    ]
    async with conn.transaction():
        await PUBLISHER.publish_many(conn, events)
    async with running(dsn, registry):
        await drained(conn)
    for priority in (1, 2):
        assert order[:1_600].count(priority) >= 100, f"{order[:1_600].count(priority)} of priority {priority}"


async def test_one_event_does_not_wait_behind_those_of_another_tenant(dsn: str, conn: asyncpg.Connection) -> None:
    """With a worker at full speed, and a limit for each key (LSN-15)."""
    registry, order = HandlerRegistry(), []

    @registry.handler("report.due", name="reports.render", per_key_concurrency=50)
    async def render(event: EventEnvelope) -> None:
        order.append(event.payload["tenant"])

    events = [NewEvent("report.due", {"tenant": "large"}, fairness_key="large") for _ in range(1_000)]
    events.append(NewEvent("report.due", {"tenant": "small"}, fairness_key="small"))
    async with conn.transaction():
        await PUBLISHER.publish_many(conn, events)
    async with running(dsn, registry):
        await drained(conn)
    assert len(order) == 1_001 and order.index("small") <= 300


def test_an_outbox_in_memory_keeps_the_order() -> None:
    """A head that waits for its retry keeps its key back, and a dead letter blocks it (LSN-9, QA-4)."""
    registry, handled, attempts = HandlerRegistry(), [], []

    @registry.handler("order.*", name="billing.apply")
    async def apply(event: EventEnvelope) -> None:
        attempts.append(event.payload["n"])
        if event.payload["n"] == 0 and attempts.count(0) < 3:
            raise ConnectionError("again")
        handled.append(event.payload["n"])

    @registry.handler("bill.*", name="billing.reject", on_error="reject")
    async def reject(event: EventEnvelope) -> None:
        if event.payload["n"] == 0:
            raise RuntimeError("broken")
        handled.append(10 + event.payload["n"])

    memory = MemoryOutbox(registry)
    for n in range(3):
        memory.publish("order.placed" if n % 2 else "order.paid", {"n": n}, ordering_key="k")
        memory.publish("bill.sent", {"n": n}, ordering_key="b")
    memory.drain()
    assert handled == [0, 1, 2]
