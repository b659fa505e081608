"""What a worker reports beside its work."""

from __future__ import annotations

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.worker import maintenance
from tests.acceptance.support import Facts, publish, row, running, settled, until

pytestmark = pytest.mark.newest_postgres


async def test_a_channel_that_nobody_serves_is_reported(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OBX-4: once, with what to start; the event waits, and is handled by the worker that comes."""
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


async def test_a_session_in_front_of_the_worker_is_reported(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-5: who it is and since when, once; and the worker delivers when it is gone."""
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
