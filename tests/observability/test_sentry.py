"""Sentry (DLQ-6, OBS-2): breadcrumbs for retries in bounded memory, and handlers in the application's own traces."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import sentry_sdk

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy, TransientHandlerError
from holdfast.integrations.sentry import SentryObserver, trace_context, trace_handlers
from holdfast.telemetry import Failed, Retried
from tests.observability.test_worker_sentry import CANARY, DSN, Recorder
from tests.worker.support import drained, publish, running, until


def fields(delivery: UUID, attempts: int) -> dict[str, Any]:
    return {
        "event_id": uuid4(),
        "delivery_id": delivery,
        "event_type": "order.placed",
        "source": "shop",
        "target": None,
        "handler_name": "billing.charge",
        "attempts": attempts,
        "correlation_id": "c",
    }


def retried(delivery: UUID, attempts: int, error: str = "ConnectionError: no line") -> Retried:
    return Retried(**fields(delivery, attempts), last_error=error, retry_in=1.5)


def failed(delivery: UUID, attempts: int) -> Failed:
    reason = {"failure_reason": "retry_terminal", "last_error": "ConnectionError: gone", "error_signature": "s"}
    return Failed(**fields(delivery, attempts), **reason)


def test_the_retries_of_a_delivery_are_its_breadcrumbs() -> None:
    """In their order, the last ten, once; what another process has retried is only counted (DLQ-6)."""
    transport, one, other = Recorder(), uuid4(), uuid4()
    with SentryObserver(DSN, transport=transport) as sentry:
        for attempts in range(3, 15):
            sentry(retried(one, attempts, f"ConnectionError: {attempts}\n  and a second line {'x' * 1000}"))
            sentry(retried(other, attempts))
        sentry(failed(one, 15))
        sentry(failed(one, 15))
    first, second = transport.events
    crumbs = first["breadcrumbs"]["values"]
    assert [crumb["message"] for crumb in crumbs] == [f"attempt {n}: ConnectionError: {n}" for n in range(5, 15)]
    assert crumbs == sorted(crumbs, key=lambda crumb: crumb["timestamp"])
    assert {(crumb["category"], crumb["level"]) for crumb in crumbs} == {("holdfast.retry", "warning")}
    assert crumbs[0]["data"] == {"attempts": 5, "retry_in_s": 1.5}
    assert "breadcrumbs" not in second and second["extra"]["attempts"] == 15


def test_failures_of_several_databases_are_told_apart() -> None:
    """One client, and a tag with the name of the database (DLQ-6, SCL-4)."""
    transport = Recorder()
    with SentryObserver(DSN, transport=transport) as sentry:
        sentry.of("orders")(failed(uuid4(), 1))
        sentry.of("billing")(failed(uuid4(), 1))
        sentry(failed(uuid4(), 1))
    assert [event["tags"].get("database") for event in transport.events] == ["orders", "billing", None]


def test_nothing_is_left_out() -> None:
    """The client sends ten entries of a mapping, and no more (DLQ-6)."""
    transport = Recorder()
    with SentryObserver(DSN, transport=transport) as sentry:
        sentry(replace(failed(uuid4(), 1), target="shop", traceback="app.py:1 in f\n  app.py:1 in f\n    1 / 0"))
    (event,) = transport.events
    assert {"event_id", "target", "last_error", "error_signature", "delivery_id", "traceback"} <= set(event["extra"])
    assert {"correlation_id", "domain_id", "generation"} == set(event["contexts"]["delivery"])
    assert {"event_id", "source", "handler_name", "failure_reason", "correlation_id"} <= set(event["tags"])


def test_the_event_belongs_to_its_trace() -> None:
    """By the context that Sentry looks for, and by a tag (DLQ-6, OBS-2)."""
    transport, trace = Recorder(), "4bf92f3577b34da6a3ce929d0e0e4736"
    with SentryObserver(DSN, transport=transport) as sentry:
        sentry(replace(failed(uuid4(), 1), trace_id=trace, generation=7))
        sentry(failed(uuid4(), 1))
    traced, other = transport.events
    assert (traced["contexts"]["trace"]["trace_id"], traced["tags"]["trace_id"]) == (trace, trace)
    assert traced["tags"]["generation"] == "7" and "trace_id" not in other["tags"]


def test_twenty_thousand_open_retries_take_little_memory() -> None:
    """The latest deliveries are remembered, and no more (DLQ-6)."""
    transport, last = Recorder(), uuid4()
    with SentryObserver(DSN, transport=transport) as sentry:
        forgotten = uuid4()
        sentry(retried(forgotten, 1))
        tracemalloc.start()
        try:
            for number in range(20_000):
                sentry(retried(UUID(int=number), 1, f"ConnectionError: {number} {'x' * 5000}"))
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        sentry(retried(last, 2))
        for delivery in (forgotten, last):
            sentry(failed(delivery, 3))
    assert taken < 4_000_000
    assert ["breadcrumbs" in event for event in transport.events] == [False, True]


@pytest.fixture
def tracing() -> Iterator[Recorder]:
    """An application that traces with Sentry."""
    transport = Recorder()
    before = sentry_sdk.get_client()
    sentry_sdk.init(DSN, transport=transport, traces_sample_rate=1.0, default_integrations=False)
    try:
        yield transport
    finally:
        sentry_sdk.get_client().close()
        sentry_sdk.get_global_scope().set_client(before)


def transactions(transport: Recorder) -> list[dict[str, Any]]:
    from sentry_sdk.envelope import Envelope

    parsed = [Envelope.deserialize(each) for each in transport.envelopes]
    return [item.payload.json for each in parsed for item in each.items if item.type == "transaction"]  # type: ignore[misc]


async def test_handlers_are_transactions_of_the_trace(dsn: str, conn: asyncpg.Connection, tracing: Recorder) -> None:
    """Every attempt is one, in the trace of the publisher; nothing of the payload is in it (OBS-2)."""
    registry, policy = HandlerRegistry(middleware=[trace_handlers]), RetryPolicy(base_delay=0.01, max_delay=0.01)
    tries: list[int] = []

    @registry.handler("order.placed", name="billing.charge", retry=policy)
    async def charge(event: EventEnvelope) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise TransientHandlerError("not yet")

    with sentry_sdk.start_transaction(name="POST /orders") as request:
        await publish(conn, "order.placed", {"secret": CANARY}, trace_context=trace_context())
    await publish(conn, "order.placed", {}, trace_context="no traceparent")
    async with running(dsn, registry):
        await drained(conn)
        await until(lambda: len(transactions(tracing)) == 4, what="all transactions")
    handled = [each for each in transactions(tracing) if each["transaction"] == "billing.charge"]
    in_trace = [each for each in handled if each["contexts"]["trace"]["trace_id"] == request.trace_id]
    assert len(handled) == 3 and len(in_trace) >= 1
    for each in in_trace:
        context = each["contexts"]["trace"]
        assert (context["op"], context["parent_span_id"]) == ("queue.process", request.span_id)
        assert context["data"]["messaging.destination.name"] == "order.placed"
    assert sum(each["contexts"]["trace"]["status"] == "internal_error" for each in handled) == 1
    assert CANARY.encode() not in b"".join(tracing.envelopes)


async def test_nothing_is_traced_without_an_application_that_traces(dsn: str, conn: asyncpg.Connection) -> None:
    """The middleware may stay (OBS-2)."""
    registry = HandlerRegistry(middleware=[trace_handlers])

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None: ...

    assert trace_context() is None
    await publish(conn, "order.placed", {})
    async with running(dsn, registry) as worker:
        await drained(conn)
        await until(lambda: worker.counters.delivered == 1, what="it is delivered")
