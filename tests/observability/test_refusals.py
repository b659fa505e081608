"""What observability is given in place of a worker, a provider or an address is refused when it is given (OBS-1, OBS-2,
OBS-3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry, generate_latest

from holdfast import EventEnvelope, HandlerRegistry, Worker
from holdfast.errors import ConfigurationError
from holdfast.integrations.fastapi import worker_lifespan
from holdfast.integrations.sentry import SentryObserver
from holdfast.observability.health_pages import HealthApp
from holdfast.observability.logging import LogObserver
from holdfast.observability.otel import OpenTelemetry
from holdfast.observability.prometheus import Collector


async def note(event: EventEnvelope) -> None:
    pass


def worker() -> Worker:
    registry = HandlerRegistry()
    registry.add("shop.note", ("order.placed",), note)
    return Worker("postgresql://localhost/x", registry)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: HealthApp(worker()), "read is Worker, not a function"),  # type: ignore[arg-type]
    (lambda: HealthApp(worker().health()), "read is Health, not a function"),  # type: ignore[arg-type]
    (lambda: HealthApp(worker_lifespan(worker)), "read takes an argument"),  # type: ignore[arg-type]
    (lambda: Collector("x"), "workers has str"),  # type: ignore[arg-type]
    (lambda: Collector(None), "workers has NoneType"),  # type: ignore[arg-type]
    (lambda: Collector(Worker), "workers has the class Worker"),  # type: ignore[arg-type]
    (lambda: Collector([worker()]), "workers has list"),  # type: ignore[arg-type]
    (lambda: OpenTelemetry(tracer_provider="x"), "tracer_provider is str"),  # type: ignore[arg-type]
    (lambda: OpenTelemetry(tracer_provider=TracerProvider), "tracer_provider is the class TracerProvider"),  # type: ignore[arg-type]
    (lambda: OpenTelemetry(tracer_provider=trace.get_tracer("x")), "tracer_provider is "),  # type: ignore[arg-type]
    (lambda: OpenTelemetry(meter_provider=1), "meter_provider is int"),  # type: ignore[arg-type]
    (lambda: OpenTelemetry(metrics="no"), "metrics is str, not bool"),  # type: ignore[arg-type]
    (lambda: SentryObserver(""), "sentry_dsn is empty"),
    (lambda: SentryObserver(None), "sentry_dsn is NoneType, not str"),  # type: ignore[arg-type]
    (lambda: LogObserver(service=1), "LogObserver.service is int, not str"),  # type: ignore[arg-type]
    (lambda: LogObserver(service=" "), "LogObserver.service is empty"),
]


@pytest.mark.parametrize(("make", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_a_wrong_object_is_refused(make: Callable[[], Any], problem: str) -> None:
    """With field, problem and remedy, and not when it is first used (OBS-1, OBS-2, OBS-3)."""
    with pytest.raises(ConfigurationError) as refused:
        make()
    assert str(refused.value).startswith(problem) and refused.value.remedy


@pytest.mark.parametrize("second", [lambda: Collector(worker()), Collector], ids=["of_a_worker", "of_none"])
def test_a_registry_refuses_a_second_collector(second: Callable[[], Collector]) -> None:
    """Each sample would be there twice, which Prometheus does not take; one collector has several workers (OBS-3)."""
    metrics = CollectorRegistry()
    metrics.register(Collector(worker()))
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.register(second())
    page = generate_latest(metrics).decode()
    assert page.count("\nholdfast_worker_processes ") == 1
    together = CollectorRegistry()
    together.register(Collector(worker(), worker()))
    assert "\nholdfast_worker_processes 0.0" in generate_latest(together).decode()


def test_what_a_collector_describes_is_what_it_collects() -> None:
    """OBS-3."""
    collector = Collector(worker())
    assert [each.name for each in collector.describe()] == [each.name for each in collector.collect()]


def test_the_lifespan_of_an_application_stands_for_its_worker() -> None:
    """Before the application has started, too (OBS-3)."""
    metrics = CollectorRegistry()
    metrics.register(Collector(worker_lifespan(worker)))
    assert "\nholdfast_worker_processes 0.0" in generate_latest(metrics).decode()
