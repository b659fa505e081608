"""What a worker reports beside its work."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.operator import Operator
from holdfast.worker import maintenance
from tests.worker.support import Facts, publish, row, running, settled, until


async def test_a_channel_that_nobody_serves_is_reported(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with what to start; the event waits, and is handled by the worker that comes (OBX-4)."""
    monkeypatch.setattr(maintenance, "_INTERVAL", 0.1)
    facts, handled = Facts(), []
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        handled.append(event.event_id)

    async with running(dsn, registry, facts):
        unserved = await publish(conn, "order.placed", channel="outbox_hot")
        (notice,) = await until(lambda: facts.notices("channel_unserved"), what="it is reported")
        assert (notice.level, notice.details["channel"], notice.details["generation"]) == ("warning", "outbox_hot", 0)
        assert "outbox_hot" in str(notice.details["remedy"])
        assert (await row(conn, unserved))["attempts"] == 0
        async with running(dsn, registry, channels=("outbox_hot",)):
            await settled(conn, unserved)
        await settled(conn, await publish(conn, "order.placed"))
    assert handled[0] == unserved
    assert len(facts.notices("channel_unserved")) == 1


async def test_an_event_in_flight_says_who_handles_it(dsn: str, conn: asyncpg.Connection) -> None:
    """The worker, since when, and the handler, although the row has no handler's name (OPS-1, LSN-7)."""
    registry, entered, leave = HandlerRegistry(), asyncio.Event(), asyncio.Event()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        entered.set()
        await leave.wait()

    async with running(dsn, registry, name="w1"), Operator(dsn, actor="ann") as operator:
        event = await publish(conn, "order.placed")
        await entered.wait()
        (delivery,) = (await operator.events.detail(event)).deliveries
        now = await conn.fetchval("SELECT now()")
        leave.set()
        await settled(conn, event)
        (after,) = (await operator.events.detail(event)).deliveries
    assert (delivery.handler_name or delivery.owed_to[0]) == "billing.charge"
    assert delivery.worker is not None and delivery.worker.startswith("w1 (")
    assert delivery.claimed_at is not None and abs(now - delivery.claimed_at) < timedelta(minutes=1)
    assert (after.worker, after.claimed_at) == (None, None)


async def test_a_session_in_front_of_the_worker_is_reported(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who it is and since when, once; and the worker delivers when it is gone (OPS-5)."""
    monkeypatch.setattr(maintenance, "_INTERVAL", 0.1)
    facts = Facts()
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        pass

    # The statements of the worker end after a second, and are sent again.
    async with running(dsn, registry, facts, lease=3, poll_interval=0.2):
        locker = await asyncpg.connect(dsn, server_settings={"application_name": "psql"})
        try:
            await locker.execute("BEGIN; LOCK TABLE core.outbox")
            (notice,) = await until(lambda: facts.notices("delivery_blocked"), within=60, what="it is reported")
            found = notice.details
            assert (notice.level, found["blocker_pid"], found["blocker_application"]) == (
                "error", locker.get_server_pid(), "psql",
            )  # fmt: skip
            assert str(found["session"]).startswith("holdfast ") and found["blocker_state"] == "idle in transaction"
            assert f"pg_terminate_backend({locker.get_server_pid()})" in str(found["remedy"])
        finally:
            await locker.close()
        await settled(conn, await publish(conn, "order.placed"))
    assert len(facts.notices("delivery_blocked")) == 1
