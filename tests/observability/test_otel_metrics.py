"""Metrics through the OpenTelemetry API: durations with exemplars, and the counts of the tally."""

from __future__ import annotations

import os
from typing import Any

import asyncpg
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler

from holdfast import EventEnvelope, HandlerRegistry, Publisher, Reject, RetryPolicy, Worker
from holdfast.handler_tally import OUTCOMES
from holdfast.observability.otel import OpenTelemetry
from holdfast.observability.otel.metrics import meter_of
from tests.observability.collector import Collector
from tests.observability.spans import Spans
from tests.worker.support import drained, until

HANDLER = "messaging.destination.subscription.name"


class Metrics:
    """What is measured through a provider of the test's own."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider(metric_readers=[self.reader])
        self.spans = Spans(sampler, meter_provider=self.provider)
        self.tracing = self.spans.tracing

    def collect(self) -> dict[str, list[Any]]:
        """All points by the names of their metrics. Exemplars are handed out once."""
        found = self.reader.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for resource in (found.resource_metrics if found else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def points(self, name: str) -> list[Any]:
        return self.collect().get(name, [])

    def values(self, name: str, label: str) -> dict[tuple[Any, Any], float]:
        """By handler and another attribute."""
        return {
            (point.attributes.get(HANDLER), point.attributes.get(label)): point.value for point in self.points(name)
        }


def shop(results: list[Any]) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(base_delay=0.01))
    async def charge(event: EventEnvelope) -> Any:
        result = results.pop(0) if results else None
        if isinstance(result, Exception):
            raise result
        return result

    return registry


async def handled(dsn: str, conn: asyncpg.Connection, metrics: Metrics, results: list[Any], count: int) -> Worker:
    publisher = Publisher("shop", tracing=metrics.tracing)
    async with conn.transaction():
        for _ in range(count):
            await publisher.publish(conn, "order.placed", {})
    async with Worker(dsn, shop(results), observers=(), tracing=metrics.tracing) as worker:
        await drained(conn)
        return worker


async def test_durations_are_recorded_with_exemplars(dsn: str, conn: asyncpg.Connection) -> None:
    """Of every attempt, with the error's type, and with the span by which a slow one is found (OBS-2)."""
    metrics = Metrics()
    await handled(dsn, conn, metrics, [ConnectionError("busy")], 3)
    found = metrics.collect()
    by_error = {point.attributes.get("error.type"): point for point in found["messaging.process.duration"]}
    assert {error: point.count for error, point in by_error.items()} == {None: 3, "ConnectionError": 1}
    assert by_error[None].attributes == {
        "messaging.system": "holdfast",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        HANDLER: "billing.charge",
    }
    spans = {span.context.span_id for span in metrics.spans.named("process billing.charge")}
    assert {exemplar.span_id for point in by_error.values() for exemplar in point.exemplars} <= spans
    assert by_error["ConnectionError"].exemplars
    operations = {p.attributes["messaging.operation.name"]: p for p in found["messaging.client.operation.duration"]}
    assert operations["publish"].count == 3 and operations["publish"].exemplars
    assert operations["settle"].count >= 2
    [sent] = found["messaging.client.sent.messages"]
    assert sent.value == 3


async def test_counts_are_those_of_the_tally(dsn: str, conn: asyncpg.Connection) -> None:
    """They stay when the worker has stopped, and a second worker adds to them (OBS-2)."""
    metrics = Metrics(ALWAYS_OFF)
    worker = await handled(dsn, conn, metrics, [Reject("no"), ConnectionError("busy")], 4)
    seen = worker.tally()["billing.charge"].counts
    assert {outcome: count for outcome, count in seen.items() if count} == {"delivered": 3, "retried": 1, "failed": 1}
    outcome = "messaging.outbox.outcome"
    assert metrics.values("messaging.outbox.deliveries", outcome) == {
        ("billing.charge", name): seen[name] for name in OUTCOMES if seen[name]
    }
    assert metrics.values("messaging.client.consumed.messages", "none") == {("billing.charge", None): 5}
    assert metrics.values("messaging.outbox.dlq_written", "messaging.outbox.dlq_reason") == {
        ("billing.charge", "rejected"): 1
    }
    await handled(dsn, conn, metrics, [], 2)
    assert metrics.values("messaging.outbox.deliveries", outcome)[("billing.charge", "delivered")] == 5
    assert not metrics.points("messaging.process.duration")[0].exemplars  # nothing is sampled


async def test_nothing_is_measured_without_a_provider_or_a_wish(dsn: str) -> None:
    """OBS-2."""
    assert OpenTelemetry().meter is None
    provider = MeterProvider(metric_readers=[InMemoryMetricReader()])
    assert OpenTelemetry(meter_provider=provider, metrics=False).meter is None
    assert OpenTelemetry(meter_provider=provider).meter is OpenTelemetry(meter_provider=provider).meter


def test_a_forked_process_does_not_count_what_its_parent_counts(tmp_path: Any) -> None:
    """OBS-2."""
    metrics = Metrics()
    meter = meter_of(metrics.provider)
    assert meter is not None
    from holdfast.handler_tally import HandlerTally, Histogram

    counted = HandlerTally(dict.fromkeys(OUTCOMES, 2), 0, Histogram(), Histogram())
    meter.watch(lambda: {"billing.charge": counted})
    pid = os.fork()
    if pid == 0:
        try:
            (tmp_path / "child").write_text(str(len(metrics.points("messaging.outbox.deliveries"))))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "child").read_text() == "0"
    assert len(metrics.points("messaging.outbox.deliveries")) == len(OUTCOMES)


async def test_metrics_arrive_over_otlp(dsn: str, conn: asyncpg.Connection) -> None:
    """As a collector decodes them (OBS-2)."""
    with Collector() as collector:
        exporter = OTLPMetricExporter(endpoint=f"{collector.url}/v1/metrics")
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=100)
        provider = MeterProvider(metric_readers=[reader])
        tracing = OpenTelemetry(meter_provider=provider)
        await Publisher("shop", tracing=tracing).publish_alone(conn, "order.placed", {})
        async with Worker(dsn, shop([]), observers=(), tracing=tracing):
            await drained(conn)
            names = {
                "messaging.process.duration",
                "messaging.client.operation.duration",
                "messaging.client.sent.messages",
                "messaging.client.consumed.messages",
                "messaging.outbox.deliveries",
            }
            await until(lambda: names <= {metric.name for metric in collector.metrics}, what="all metrics")
        provider.shutdown()
