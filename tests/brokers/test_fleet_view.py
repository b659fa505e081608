"""What operators see of a broker by the database alone: its lag, what is taken, and settings that lose events."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Worker, WorkerSettings
from holdfast.observability.prometheus import exposition, outbox_metrics
from holdfast.operator import Operator
from holdfast.postgres.operations.metrics import snapshot
from servers.nats import NatsServer
from tests.acceptance.support import publish_many, until

pytestmark = [pytest.mark.brokers, pytest.mark.newest_postgres]

WEAK = "SELECT max(jsonb_array_length(weaknesses)) = 1 FROM core.broker_reports"
MOVED = "SELECT via = 'nats' FROM core.subscriptions WHERE handler_name = 'shop.note'"
HELD = "SELECT sum(waiting + unacknowledged) = 5 FROM core.broker_reports WHERE handler_name = 'shop.note'"


async def test_operators_see_what_a_broker_holds(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCL-2, OBS-2: in the status, the metrics and the findings of the doctor."""
    monkeypatch.setattr("holdfast.worker.broker_reports._EVERY", 0.3)
    registry, going = HandlerRegistry(), asyncio.Event()

    @registry.handler("order.placed", name="shop.note")
    async def note(event: EventEnvelope) -> None:
        await going.wait()

    with NatsServer(tmp_path) as nats:
        async with Worker(dsn, registry, WorkerSettings(substrate=nats.address, concurrency=1), observers=()):
            await until(lambda: conn.fetchval(MOVED), what="a handler behind the broker")
            await publish_many(conn, "order.placed", 5)
            await until(lambda: conn.fetchval(HELD), what="a report of five messages")
            # The first look may have been before the stream was made.
            await until(lambda: conn.fetchval(WEAK), what="a report of the stream")
            found = await snapshot(conn)
            going.set()
            await until(lambda: conn.fetchval("SELECT count(*) = 5 FROM core.event_handled"), what="five effects")
    text, _ = exposition(lambda: outbox_metrics(found))
    labels = '{broker="nats",handler="shop.note"}'
    held = {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert held[f"holdfast_broker_waiting{labels}"] + held[f"holdfast_broker_unacknowledged{labels}"] == 5
    assert held[f"holdfast_broker_report_age_seconds{labels}"] < 60
    assert held['holdfast_broker_weaknesses{broker="nats"}'] == 1
    async with Operator(dsn, actor="ann") as operator:
        assert [each.subject for each in (await operator.status()).weaknesses] == ["stream HF_outbox_default"]
        await conn.execute("UPDATE core.broker_reports SET waiting = 20000 WHERE handler_name <> ''")
        assert {"broker-lag", "broker-weak"} <= {each.code for each in (await operator.doctor()).findings}
        await conn.execute("UPDATE core.broker_reports SET reported_at = now() - interval '2 minutes'")
        assert "broker-silent" in {each.code for each in (await operator.doctor()).findings}
