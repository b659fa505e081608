"""One order through the demo is one trace: from the HTTP request, over two processes, to every handler."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import asyncpg
import httpx
import pytest

from examples.orders.processes import Stage
from tests.observability.collector import Collector, ExportedSpan, depths
from tests.worker.support import until

SERVER, CONSUMER = 2, 5
# Where `./dev docs trace` has the spans written, of which it draws the picture in docs/tracing.md.
TRACE_FILE = "HOLDFAST_TRACE_FILE"


TREE = [
    "orders-api: idempotent POST /orders",
    "  orders-api: publish order.placed",
    "    orders-worker: process ledger.record_sale",
    "    orders-worker: process notifications.send_confirmation *",
    "      orders-worker: settle notifications.send_confirmation",
    "    orders-worker: process notifications.send_confirmation",
    "      orders-worker: settle notifications.send_confirmation",
    "    orders-api: process storefront.count_order",
]


@pytest.mark.slow
async def test_an_order_is_one_trace_from_the_request_to_every_handler(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported by two processes over OTLP/HTTP, with a retry in it (OBS-2)."""
    await conn.execute((Path(__file__).parents[2] / "examples/orders/schema.sql").read_text())
    with Collector() as collector:
        for name, value in {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "ORDERS_MAIL_BUSY": "1",
        }.items():
            monkeypatch.setenv(name, value)
        async with Stage(dsn) as stage, httpx.AsyncClient() as client:
            started = "SELECT count(*) FROM core.workers WHERE heartbeat_at > now() - interval '10 s'"
            await until(lambda: conn.fetchval(started), what="the worker has started")
            await until(lambda: _answers(client, stage.url), what="the API answers")
            order = {"customer": "Ada", "total_cents": 1200}
            for number in (1, 2):  # the first one opens connections
                answer = await client.post(stage.url, json=order, headers={"Idempotency-Key": f"order-{number}"})
                assert answer.status_code == 201
                complete = number * len(TREE)
                await until(lambda: len(_own(collector.spans)) == complete, what="all spans are exported")  # noqa: B023
    spans = _last_order(collector)
    if path := os.environ.get(TRACE_FILE):
        Path(path).write_text(json.dumps([asdict(span) for span in spans], indent=1))
    lines = [
        f"{'  ' * depth}{span.service}: {span.name}{' *' if span.failed else ''}"
        for depth, span in depths(_own(spans), key=lambda span: (span.name, span.start))
    ]
    assert lines == TREE
    assert {span.kind for span in spans if span.name.startswith("process")} == {CONSUMER}
    [request] = [span for span in spans if span.kind == SERVER]
    assert (request.parent_id, request.attributes["http.response.status_code"]) == ("", 201)
    [first, second] = [span for span in spans if span.name == "process notifications.send_confirmation"]
    assert (first.failed, second.failed) == (True, False)
    assert [span.attributes["messaging.outbox.attempt"] for span in (first, second)] == [1, 2]
    assert b"Ada" not in b"".join(collector.bodies)


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/00000000-0000-0000-0000-000000000000")).status_code == 404
    except httpx.TransportError:
        return False


def _last_order(collector: Collector) -> list[ExportedSpan]:
    """The spans of the trace that the last order belongs to."""
    published = [span for span in collector.spans if span.name == "publish order.placed"]
    last = max(published, key=lambda span: span.start).trace_id
    return [span for span in collector.spans if span.trace_id == last]


def _own(spans: list[ExportedSpan]) -> list[ExportedSpan]:
    """Those of Holdfast: FastAPI adds what it finds worth telling."""
    return [span for span in spans if span.scope == "holdfast"]
