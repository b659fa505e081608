"""Spans of idempotent requests: in the trace of the server that is instrumented, or of the caller."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind, StatusCode

from holdfast import Publisher
from holdfast.idempotency import IdempotencyMiddleware, exchange_of
from tests.http.shop import SECRET, TABLES
from tests.observability.spans import Spans, attributes

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0"


class Shop:
    """An ASGI application without a framework, one endpoint of which takes part."""

    def __init__(self, pool: Any, spans: Spans) -> None:
        self.runs = 0
        self._publisher = Publisher("shop", tracing=spans.tracing)
        self._app = IdempotencyMiddleware(
            self._serve, pool.acquire, {1: SECRET}, observe=lambda _: None, tracing=spans.tracing
        )
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://shop")

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        status = 200
        if scope["path"] == "/orders":
            self.runs += 1
            tx = await exchange_of(scope).begin("tenant-1")
            await self._publisher.publish(tx, "order.placed", {})
            if self.runs == 1:
                raise asyncpg.SerializationError("could not serialize access")
            status = 201
        if scope["path"] == "/broken":
            raise ValueError(f"card {dict(scope['headers'])[b'card'].decode()}")
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body"})

    async def post(self, path: str, **headers: str) -> int:
        return (await self.client.post(path, json={}, headers=headers)).status_code


async def test_a_request_is_a_span_with_all_its_repetitions(dsn: str, conn: asyncpg.Connection) -> None:
    """In the trace of its caller; the answer of a duplicate is not a publish (OBS-2)."""
    spans = Spans()
    async with asyncpg.create_pool(dsn, min_size=0) as pool:
        shop = Shop(pool, spans)
        key = {"Idempotency-Key": "k-1", "traceparent": f"{CALLER}1", "baggage": "user=ada"}
        assert [await shop.post("/orders", **key), await shop.post("/orders", **key)] == [201, 201]
        with spans.tracer.start_as_current_span("GET /", kind=SpanKind.SERVER):
            assert await shop.post("/other") == 200
    assert spans.tree() == [
        "POST",
        "  publish order.placed",
        "  publish order.placed",
        "POST",
        "GET /",
        "  idempotent POST",
    ]
    first, second = spans.named("POST")
    assert first.kind is SpanKind.SERVER and f"{first.context.trace_id:032x}" == CALLER[3:35]
    assert first.parent is not None and f"{first.parent.span_id:016x}" == CALLER[36:52]
    assert attributes(first) == {
        "http.request.method": "POST",
        "http.response.status_code": 201,
        "holdfast.request.result": "completed",
        "holdfast.request.attempts": 2,
    }
    assert attributes(second)["holdfast.request.result"] == "replayed"
    inside = spans.one("idempotent POST")
    assert inside.kind is SpanKind.INTERNAL and "holdfast.request.result" not in attributes(inside)


async def test_a_request_that_fails_is_an_error_without_what_it_quotes(dsn: str) -> None:
    """OBS-2."""
    spans = Spans()
    async with asyncpg.create_pool(dsn, min_size=0) as pool:
        assert await Shop(pool, spans).post("/broken", traceparent=f"{CALLER}1", card="4111-1111") == 500
    span = spans.one("POST")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "ValueError"
    assert "4111" not in span.to_json()


@pytest.mark.parametrize("caller", ["nonsense", "00-\xff", f"{CALLER}0", ""])
async def test_what_a_caller_sends_breaks_no_request(dsn: str, caller: str) -> None:
    """A caller that has not sampled its trace has decided for it (OBS-2)."""
    spans = Spans(ALWAYS_ON)
    async with asyncpg.create_pool(dsn, min_size=0) as pool:
        shop = Shop(pool, spans)
        answer = await shop.client.post("/other", headers={b"traceparent": caller.encode("latin-1")})
    assert answer.status_code == 200
    assert len(spans) == (0 if caller == f"{CALLER}0" else 1)


DJANGO = """
import json, sys
from tests.http import djangoshop
from tests.observability.spans import Spans, attributes

spans = Spans()
djangoshop.configure(sys.argv[1], TRACING=spans.tracing)
from django.test import Client
from holdfast import Publisher
djangoshop.publisher = Publisher("shop", tracing=spans.tracing)
client = Client(headers={"authorization": "Bearer ada", "idempotency-key": "k-1"})
for _ in range(2):
    answer = client.post("/orders", {"sku": "a"}, content_type="application/json")
    assert answer.status_code == 201, answer.content
print(json.dumps({"tree": spans.tree(), "requests": [attributes(each) for each in spans.named("POST /orders")]}))
"""


async def test_a_request_of_django_is_a_span(dsn: str, conn: asyncpg.Connection) -> None:
    """With what its view publishes on Django's connection (OBS-2)."""
    await conn.execute(TABLES)
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", DJANGO, dsn],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["tree"] == ["POST /orders", "  publish order.placed", "POST /orders"]
    assert [each["holdfast.request.result"] for each in found["requests"]] == ["completed", "replayed"]
    assert found["requests"][0]["http.route"] == "/orders"
    stored = await conn.fetchval("SELECT trace_context FROM core.outbox")
    assert stored.startswith("00-")
