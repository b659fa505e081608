"""The state of an outbox as metrics for Prometheus: backlog, ages, workers, wake-ups, schedules.

The reads never touch settled rows: a scrape costs the same with ten delivered events or ten million. Counts end at a
limit; one that equals `holdfast_outbox_count_limit` means "or more".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from holdfast.errors import ConfigurationError
from holdfast.installing import extra_remedy
from holdfast.postgres.operations.metrics import Snapshot
from holdfast.postgres.operations.status import MOST, RouteStatus

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
WAKEUP_MODES: Final = ("when_idle", "always", "never", "missing")

Sample = tuple[Mapping[str, object], float]


def require() -> None:
    """Raise ConfigurationError unless prometheus_client is installed."""
    if find_spec("prometheus_client") is None:
        raise ConfigurationError("metrics", "need prometheus_client", extra_remedy("prometheus"))


def render(snapshot: Snapshot) -> str:
    """All metrics in the text format. Each is a gauge, and is there also when it is zero."""
    require()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(snapshot))
    return generate_latest(registry).decode()


class _Collector:
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield from _outbox(self._snapshot)
        yield from _routes(self._snapshot)
        yield from _workers(self._snapshot)
        yield from _schedules(self._snapshot)


def _outbox(snapshot: Snapshot) -> Iterator[Metric]:
    status = snapshot.status
    yield _gauge("outbox_pending", "Pending events that are due.", status.pending)
    yield _gauge("outbox_delayed", "Pending events that are not due yet, including retries.", status.delayed)
    yield _gauge("outbox_in_flight", "Events that a worker holds under a lease.", status.in_flight)
    yield _gauge("outbox_expired_leases", "Events in flight whose lease has expired.", status.expired_leases)
    yield _gauge("outbox_failed", "Events that failed for good and wait for an operator.", status.failed)
    yield _gauge("outbox_archived", "Events that failed for good and were moved to the archive.", status.archived)
    yield _gauge("outbox_count_limit", "Limit of these counts: a count equal to it means at least that many.", MOST)
    yield _gauge("outbox_oldest_seconds", "Age of the oldest due event, in seconds.", status.oldest or 0.0)


def _routes(snapshot: Snapshot) -> Iterator[Metric]:
    routes, unserved = snapshot.status.routes, snapshot.status.unserved
    yield _gauges("route_open", "Open events of a route.", _by_route(routes, lambda route: route.open))
    yield _gauges(
        "route_oldest_seconds",
        "Age of the oldest due event of a route, in seconds.",
        _by_route(routes, lambda route: route.oldest or 0.0),
    )
    yield _gauges(
        "route_unrouted",
        "1 for a route whose events no handler subscribes to.",
        _by_route(routes, lambda route: not route.handlers),
    )
    yield _gauges(
        "route_unserved_handlers",
        "Subscribed handlers of a route that no living worker has.",
        _by_route(routes, lambda route: len(route.unserved)),
    )
    yield _gauges(
        "channel_unserved",
        "1 for a channel that has open events and no living worker.",
        [({"channel": channel, "generation": generation}, 1) for channel, generation in unserved],
    )


def _workers(snapshot: Snapshot) -> Iterator[Metric]:
    status, notifications = snapshot.status, snapshot.notifications
    living = sum(worker.living for worker in status.workers)
    yield _gauge("workers_living", "Workers with a heartbeat in the last minute.", living)
    yield _gauge(
        "workers_silent", "Workers without a heartbeat that did not stop in order.", len(status.workers) - living
    )
    yield _gauge("listeners", "Connections of workers that listen for wake-ups.", notifications.listeners)
    yield _gauges(
        "notify_mode",
        "1 for the present wake-up mode.",
        [({"mode": mode}, mode == (status.wakeup_mode or "missing")) for mode in WAKEUP_MODES],
    )
    yield _gauge(
        "notification_queue_usage",
        "Share of the server's notification queue that is in use; alert at 0.25.",
        notifications.queue_usage,
    )


def _schedules(snapshot: Snapshot) -> Iterator[Metric]:
    by_name = [({"schedule": each.name}, each) for each in snapshot.schedules]
    yield _gauges(
        "schedule_overdue_seconds",
        "Age of the oldest slot of a schedule that was not fired, in seconds.",
        [(labels, each.overdue_for or 0.0) for labels, each in by_name],
    )
    yield _gauges(
        "schedule_served",
        "1 for a schedule that a living worker declares.",
        [(labels, each.served) for labels, each in by_name],
    )
    yield _gauges(
        "schedule_paused",
        "1 for a schedule that an operator has paused.",
        [(labels, each.paused_at is not None) for labels, each in by_name],
    )


def _by_route(routes: Iterable[RouteStatus], value: Callable[[RouteStatus], float]) -> list[Sample]:
    return [
        ({"channel": each.channel, "generation": each.generation, "route": each.route}, value(each)) for each in routes
    ]


def _gauge(name: str, text: str, value: float) -> Metric:
    return _gauges(name, text, [({}, value)])


def _gauges(name: str, text: str, samples: Iterable[Sample]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"holdfast_{name}", text)
    for labels, value in samples:
        family.add_sample(family.name, {label: str(each) for label, each in labels.items()}, float(value))
    return family
