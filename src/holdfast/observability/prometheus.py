"""Metrics for Prometheus: what a process has done, and the state of an outbox.

    from prometheus_client import REGISTRY

    REGISTRY.register(Collector(worker))  # beside a worker that your program starts
    REGISTRY.register(Collector())        # in a program that only publishes

`holdfast worker --metrics` and `holdfast metrics` need no such program.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from holdfast.errors import ConfigurationError
from holdfast.handler_tally import BOUNDS, HandlerTally, Histogram
from holdfast.installing import require_extra
from holdfast.measurements import (
    MOST_EVENT_TYPES,
    MOST_FAILURES,
    OTHER,
    FailureKind,
    Measurements,
)
from holdfast.observability.gauges import Gauge, Sample, broker_gauges, gauges
from holdfast.postgres.operations.metrics import Snapshot
from holdfast.postgres.operations.status import BrokerBacklog

if TYPE_CHECKING:
    from prometheus_client import Metric

# Handlers with samples of their own; the others have one set together. Each has 55 samples, so that a scrape of a
# worker stays below this, whatever the number of handlers and event types.
MOST_HANDLERS: Final = 125
MOST_SAMPLES: Final = 10_000
PLAIN: Final = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS: Final = "application/openmetrics-text"
# What is not counted for each database.
_OF_THE_PROCESS: Final = frozenset(
    f"holdfast_{name}" for name in ("events_published", "facts_dropped", "log_lines_dropped", "worker_deaths")
)

K = TypeVar("K")


class Measured(Protocol):
    """A worker, or the lifespan of an application with one in it."""

    def measurements(self) -> Measurements:
        """Return what it has done and its state."""


def require() -> None:
    """Raise ModuleNotFoundError unless prometheus_client is installed."""
    require_extra("prometheus", "prometheus_client")


class Collector:
    """What this process has published, and what its given workers have done, for a registry of prometheus_client.

    A registry takes one of them: with several, each sample would be there several times.
    """

    def __init__(self, *workers: Measured) -> None:
        require()
        for worker in workers:
            if isinstance(worker, type) or not callable(getattr(worker, "measurements", None)):
                shown = f"the class {worker.__name__}" if isinstance(worker, type) else type(worker).__name__
                raise ConfigurationError(
                    "workers", f"has {shown}", "pass workers: Collector(worker), Collector(*workers), or none"
                )
        self._workers = workers
        self._families = ProcessFamilies()

    def describe(self) -> Iterator[Metric]:
        """Return the metrics without samples: a registry refuses two collectors of the same ones."""
        return ProcessFamilies().of(Measurements())

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of this moment."""
        found = sum((worker.measurements() for worker in self._workers), Measurements.of_publishing())
        return self._families.of(found)


def outbox_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """Return the state of an outbox."""
    return map(_gauge, gauges(snapshot))


def outboxes_metrics(snapshots: Mapping[str, Snapshot | None]) -> Iterator[Metric]:
    """Return the state of the outboxes of several databases, by their names; None of one that does not answer."""
    up: list[Sample] = [({"database": name}, float(found is not None)) for name, found in snapshots.items()]
    yield _gauge(Gauge("database_up", "1 for a database that answers, 0 for one that does not.", up))
    yield from labelled({name: outbox_metrics(found) for name, found in snapshots.items() if found is not None})


def labelled(by_database: Mapping[str, Iterable[Metric]]) -> Iterator[Metric]:
    """Return the metrics of several databases as one, each sample with the label `database`."""
    families: dict[str, Metric] = {}
    for database, found in by_database.items():
        for family in found:
            samples = [each._replace(labels={"database": database, **each.labels}) for each in family.samples]
            family.samples = []
            families.setdefault(family.name, family).samples += samples
    return iter(families.values())


def exposition(collect: Callable[[], Iterable[Metric]], accepted: str = "") -> tuple[str, str]:
    """Return metrics as a text, and its content type: OpenMetrics where it is accepted, else Prometheus' own format."""
    require()
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.openmetrics import exposition as openmetrics

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collecting(collect))
    if _OPENMETRICS in accepted:
        text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
        return text.decode(), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry).decode(), PLAIN


class _Collecting:
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect


class _Admitted(Generic[K]):
    """The first names that come, up to a limit: what has a sample of its own keeps it from scrape to scrape."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: set[K] = set()

    def __call__(self, name: K) -> bool:
        if len(self._names) < self._most:
            self._names.add(name)
        return name in self._names


class ProcessFamilies:
    """Makes metrics of measurements, with a bounded number of samples: past a limit, new names count as `other`."""

    def __init__(self) -> None:
        self._handlers: _Admitted[str] = _Admitted(MOST_HANDLERS)
        self._event_types: _Admitted[str] = _Admitted(MOST_EVENT_TYPES)
        self._failures: _Admitted[FailureKind] = _Admitted(MOST_FAILURES)
        self._databases: dict[str, ProcessFamilies] = {}

    def of(self, found: Measurements, deaths: int | None = None) -> Iterator[Metric]:
        """Return the metrics. `deaths` are those of worker processes, where there are several under one parent.

        Where there are several databases, what is counted for each has the label `database`.
        """
        if not found.databases:
            yield from self._of_one(found, deaths)
            return
        by_database = {
            name: self._databases.setdefault(name, ProcessFamilies()).of(each) for name, each in found.databases.items()
        }
        whole = {family.name: family for family in self._of_one(found, deaths) if family.name in _OF_THE_PROCESS}
        for family in labelled(by_database):
            yield whole.pop(family.name, family)
        yield from whole.values()

    def _of_one(self, found: Measurements, deaths: int | None) -> Iterator[Metric]:
        handlers = self._together(found.handlers)
        yield _counter(
            "deliveries",
            "Deliveries that a worker has claimed, by what became of them; each is counted once for each claim.",
            ("handler", "outcome"),
            {(name, outcome): count for name, each in handlers.items() for outcome, count in each.counts.items()},
        )
        yield _histogram(
            "handler_duration_seconds",
            "How long the handler of an attempt ran.",
            {name: each.handler_time for name, each in handlers.items()},
        )
        yield _histogram(
            "time_in_outbox_seconds",
            "Time from when a delivery was due until its handler had ended.",
            {name: each.outbox_time for name, each in handlers.items()},
        )
        yield _counter(
            "nacked_terminal",
            "Deliveries that were judged to have failed for good, before that is written.",
            FailureKind._fields,
            self._by_kind(found.nacked_terminal),
        )
        yield _counter(
            "dlq_written",
            "Dead letters that were written, in the outbox or in the archive; none for a lost lease.",
            FailureKind._fields,
            self._by_kind(found.dlq_written),
        )
        yield _counter(
            "events_published",
            "Events that publishers of this process have handed to transactions, which may yet roll back.",
            ("event_type",),
            self._by_event_type(found.published),
        )
        yield from _counters(found)
        yield from _brokers(found)
        if deaths is not None:
            yield _total("worker_deaths", "Worker processes that have died and were started again.", deaths)

    def _together(self, handlers: Mapping[str, HandlerTally]) -> dict[str, HandlerTally]:
        shown = {name: each for name, each in handlers.items() if self._handlers(name)}
        left = [Measurements({OTHER: each}) for name, each in handlers.items() if name not in shown]
        return shown | dict(sum(left, Measurements()).handlers)

    def _by_kind(self, counts: Mapping[FailureKind, int]) -> dict[tuple[str, ...], int]:
        found: Counter[tuple[str, ...]] = Counter()
        for kind, count in counts.items():
            if not self._handlers(kind.handler):
                kind = kind._replace(handler=OTHER)
            found[kind if self._failures(kind) else kind._replace(exception_type=OTHER)] += count
        return found

    def _by_event_type(self, counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
        # One of them is always there: without any, a chart of the rate would show nothing instead of zero.
        found: Counter[tuple[str, ...]] = Counter({(OTHER,): 0})
        for event_type, count in counts.items():
            found[(event_type if self._event_types(event_type) else OTHER,)] += count
        return found


def _brokers(found: Measurements) -> Iterator[Metric]:
    now = time.time()
    answers = sorted(found.brokers, key=lambda each: -(each.waiting or 0))[:MOST_HANDLERS]
    return map(_gauge, broker_gauges([BrokerBacklog(*each[:2], now - each.at, *each[2:5]) for each in answers]))


def _counters(found: Measurements) -> Iterator[Metric]:
    counters = found.counters
    yield _total("claims", "Claims that were sent to the database.", counters.claims)
    yield _total("events_claimed", "Events that claims have returned.", counters.claimed)
    yield _total("settle_statements", "Statements that have settled deliveries.", counters.settles)
    yield _total("events_split", "Events that were split into a delivery for each of several handlers.", counters.split)
    yield _total("wakeups", "Wake-ups by a notification.", counters.wakeups)
    yield _total("polls", "Looks for events that no notification has asked for.", counters.polls)
    yield _total(
        "listener_reconnects", "Connections for notifications that were opened again.", counters.listen_reconnects
    )
    yield _total("schedule_slots_fired", "Slots of schedules that were fired.", counters.fired)
    yield _total(
        "facts_dropped", "Facts that an observer did not get, because it blocked or raised.", found.facts_dropped
    )
    yield _total("log_lines_dropped", "Lines of the log that could not be written in time.", found.log_lines_dropped)
    yield _gauge(Gauge("worker_processes", "Workers that run.", [({}, float(found.workers))]))
    yield _gauge(
        Gauge("worker_listeners", "Of them, those that should hear notifications.", [({}, float(found.listeners))])
    )
    yield _gauge(Gauge("worker_listening", "Of them, those that hear notifications.", [({}, float(found.listening))]))
    yield _gauge(Gauge("worker_in_flight", "Deliveries that they hold under a lease.", [({}, float(found.in_flight))]))
    text = "Events that a handler may run at once, in all of them together."
    yield _gauge(Gauge("worker_concurrency", text, [({}, float(found.concurrency))]))


def _gauge(gauge: Gauge) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"holdfast_{gauge.name}", gauge.text)
    for labels, value in gauge.samples:
        family.add_sample(family.name, {label: _label(each) for label, each in labels.items()}, value)
    return family


def _total(name: str, text: str, value: int) -> Metric:
    return _counter(name, text, (), {(): value})


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(f"holdfast_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric([_label(each) for each in key], value)
    return family


_LE: Final = (*map(str, BOUNDS), "+Inf")


def _histogram(name: str, text: str, values: Mapping[str, Histogram]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(f"holdfast_{name}", text, labels=("handler",))
    for handler, each in values.items():
        family.add_metric([_label(handler)], list(zip(_LE, each.cumulative, strict=True)), each.sum)
    return family


def _label(value: str) -> str:
    """Return a value that every format can hold; quotes and line ends are escaped by the formats themselves."""
    return value.encode("utf-8", "backslashreplace").decode()
