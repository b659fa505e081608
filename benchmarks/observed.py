"""What may watch a worker while it drains: each entry is an arm of the benchmark `observability`.

An entry is a context manager around the run that yields arguments of `Worker`.
"""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from holdfast import Worker

Arguments = dict[str, Any]


@contextlib.contextmanager
def nothing() -> Iterator[Arguments]:
    """No observer: what all others are compared with."""
    yield {"observers": ()}


@contextlib.contextmanager
def default() -> Iterator[Arguments]:
    """What a worker has that is told nothing: the log of what is out of the ordinary."""
    yield {}


@contextlib.contextmanager
def _logging(successes: str, sample: float) -> Iterator[Arguments]:
    """The log as `holdfast worker` writes it, JSON lines into a file."""
    from holdfast.cli import logs
    from holdfast.observability.logging import LogObserver

    with tempfile.TemporaryFile("w") as stream:
        logs.configure(stream)
        yield {"observers": (LogObserver(service="bench", successes=successes, sample=sample),)}
        logs.flush()


def failures_logged() -> AbstractContextManager[Arguments]:
    """The default: retries, failures and a summary each minute."""
    return _logging("never", 1.0)


def some_logged() -> AbstractContextManager[Arguments]:
    """An entry for one event of a hundred."""
    return _logging("info", 0.01)


def all_logged() -> AbstractContextManager[Arguments]:
    """An entry for each event; those that cannot be written in time are dropped."""
    return _logging("info", 1.0)


@contextlib.contextmanager
def facts_counted() -> Iterator[Arguments]:
    """An observer that wants each fact of every kind and counts it."""
    from holdfast.observing import FACTS

    class Count:
        facts = FACTS

        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, _fact: object) -> None:
            self.seen += 1

    yield {"observers": (Count(),)}


@contextlib.contextmanager
def _tracing(share: float) -> Iterator[Arguments]:
    """Spans of the SDK, handed over in batches and thrown away: the export is the business of another thread."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    from holdfast.observability.otel import OpenTelemetry

    class Thrown(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(share)))
    provider.add_span_processor(BatchSpanProcessor(Thrown()))
    yield {"observers": (), "tracing": OpenTelemetry(tracer_provider=provider)}
    provider.shutdown()


def some_traced() -> AbstractContextManager[Arguments]:
    """One event of a hundred is in a trace that is sampled; all carry the context of theirs."""
    return _tracing(0.01)


def some_begun() -> AbstractContextManager[Arguments]:
    """The same share of events that carry no context: the sampler is asked for each."""
    return _tracing(0.01)


def all_traced() -> AbstractContextManager[Arguments]:
    """Every event is in a trace that is sampled: two spans for each."""
    return _tracing(1.0)


@contextlib.contextmanager
def measured() -> Iterator[Arguments]:
    """Metrics of the OpenTelemetry SDK, and no traces: a duration is recorded for each event."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from holdfast.observability.otel import OpenTelemetry

    provider = MeterProvider(metric_readers=[InMemoryMetricReader()])
    yield {"observers": (), "tracing": OpenTelemetry(meter_provider=provider)}
    provider.shutdown()


class Scraping:
    """Makes the page of `--metrics` in a thread, as its server does, four times a second: far oftener than is usual.

    A first page is made at once: what has to be imported for it is no cost of an event.
    """

    def __init__(self, worker: Worker) -> None:
        from holdfast.observability import prometheus

        self._page = partial(prometheus.exposition, prometheus.Collector(worker).collect)
        self._page()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._scrape)

    def _scrape(self) -> None:
        while not self._ended.wait(0.25):
            self._page()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


OFF = "holdfast"
ARMS: dict[str, Callable[[], AbstractContextManager[Arguments]]] = {
    OFF: nothing,
    "default": default,
    "log": failures_logged,
    "log_sampled": some_logged,
    "log_metrics": some_logged,
    "log_all": all_logged,
    "facts": facts_counted,
    "traces_1": some_traced,
    "traces_1_begun": some_begun,
    "traces_100": all_traced,
    "otel_metrics": measured,
}
# Those that have limits, around the one that they are compared with, and what is reported beside them.
LIMITED = ("log_metrics", OFF, "traces_1")
QUICK = (*LIMITED, "traces_100")
# The worker of these is scraped while it drains.
SCRAPED = {"log_metrics"}
# The events of these arms carry trace contexts, of which such a share is sampled.
SAMPLED: dict[str, float] = {"traces_1": 0.01, "traces_100": 1.0}
