"""The state of an outbox as gauges: backlog, ages, dead letters, workers, wake-ups, schedules, tables, the server.

They are values without an exporter, for Prometheus and others. The reads never touch settled rows: they cost the same
beside ten delivered events or ten million. Counts end at a limit; one that equals `outbox_count_limit` means "or more".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.measurements import OTHER
from holdfast.postgres.operations.metrics import Snapshot
from holdfast.postgres.operations.status import MOST, BrokerBacklog, RouteStatus

WAKEUP_MODES: Final = ("when_idle", "always", "never", "missing")
MOST_HANDLERS: Final = 200

Sample = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class Gauge:
    """One gauge, with a sample for each combination of its labels."""

    name: str
    text: str
    samples: list[Sample]


def gauges(snapshot: Snapshot) -> Iterator[Gauge]:
    """Return the gauges of one moment. Each is there also when it has no sample, or is zero."""
    yield from _outbox(snapshot)
    yield from _routes(snapshot)
    yield from _handlers(snapshot)
    yield from _flows(snapshot)
    yield from _brokers(snapshot)
    yield from _workers(snapshot)
    yield from _schedules(snapshot)
    yield from _server(snapshot)


def _outbox(snapshot: Snapshot) -> Iterator[Gauge]:
    status = snapshot.status
    unrouted = sum(route.open for route in status.unrouted)
    yield _one("outbox_pending", "Pending events that are due.", status.pending)
    yield _one("outbox_delayed", "Pending events that are not due yet, including retries.", status.delayed)
    yield _one("outbox_in_flight", "Events that a worker holds under a lease.", status.in_flight)
    yield _one("outbox_expired_leases", "Events in flight whose lease has expired.", status.expired_leases)
    yield _one("outbox_failed", "Events that failed for good and wait for an operator.", status.failed)
    yield _one("outbox_archived", "Events that failed for good and were moved to the archive.", status.archived)
    yield _one("outbox_unrouted", "Open events that no handler subscribes to.", unrouted)
    yield _one(
        "failures_last_week", "Deliveries that failed for good in the last seven days.", snapshot.failures_of_week
    )
    yield _one("rollup_journal_lines", "Counts that are not folded into the roll-up yet.", snapshot.rollup_lag.lines)
    yield _one("rollup_journal_oldest_seconds", "Age of the oldest of them, in seconds.", snapshot.rollup_lag.seconds)
    yield _one("outbox_count_limit", "Limit of these counts: a count equal to it means at least that many.", MOST)
    yield _one("outbox_oldest_seconds", "Age of the oldest due event, in seconds.", status.oldest or 0.0)


def _routes(snapshot: Snapshot) -> Iterator[Gauge]:
    routes, unserved = snapshot.status.routes, snapshot.status.unserved
    yield Gauge("route_open", "Open events of a route.", _by_route(routes, lambda route: route.open))
    yield Gauge(
        "route_oldest_seconds",
        "Age of the oldest due event of a route, in seconds.",
        _by_route(routes, lambda route: route.oldest or 0.0),
    )
    yield Gauge(
        "route_unrouted",
        "1 for a route whose events no handler subscribes to.",
        _by_route(routes, lambda route: not route.handlers),
    )
    yield Gauge(
        "route_unserved_handlers",
        "Subscribed handlers of a route that no living worker has.",
        _by_route(routes, lambda route: len(route.unserved)),
    )
    yield _one("routes_left_out", "Routes with open events that have no samples of their own.", routes.left_out)
    yield Gauge(
        "channel_unserved",
        "1 for a channel that has open events and no living worker.",
        [({"channel": channel, "generation": str(generation)}, 1.0) for channel, generation in unserved],
    )


Handler = tuple[str, str, str]  # channel, generation, handler
_OTHERS: Final[Handler] = (OTHER, OTHER, OTHER)


def _handlers(snapshot: Snapshot) -> Iterator[Gauge]:
    """By handler: from its own route, and from those of the event types that it subscribes to."""
    status = snapshot.status
    pending: Counter[Handler] = Counter()
    in_flight: Counter[Handler] = Counter()
    failed: Counter[Handler] = Counter()
    oldest: dict[Handler, float] = {}
    for route in status.routes:
        for name in route.handlers:
            handler = _handler(route.channel, route.generation, name)
            pending[handler] += route.pending
            in_flight[handler] += route.in_flight
            oldest[handler] = max(oldest.get(handler, 0.0), route.oldest or 0.0)
    if status.routes.left_out:
        pending[_OTHERS] = status.pending - sum(route.pending for route in status.routes)
        in_flight[_OTHERS] = status.in_flight - sum(route.in_flight for route in status.routes)
    for dead in snapshot.failed_by_handler:
        failed[_handler(dead.channel, dead.generation, dead.handler)] += dead.failed
    yield Gauge("handler_pending", "Due events that are owed to a handler.", _by_handler(pending, sum))
    yield Gauge("handler_in_flight", "Events in flight that are owed to a handler.", _by_handler(in_flight, sum))
    yield Gauge(
        "handler_failed", "Dead letters of a handler, of the newest 100000 in the outbox.", _by_handler(failed, sum)
    )
    yield Gauge(
        "handler_oldest_seconds",
        "Age of the oldest due event that is owed to a handler, in seconds.",
        _by_handler(oldest, max),
    )


def _flows(snapshot: Snapshot) -> Iterator[Gauge]:
    """What holds handlers back; of handlers that nothing does, there are no samples."""
    flows = snapshot.status.flows[:MOST_HANDLERS]
    breakers = [flow for flow in flows if flow.breaker is not None]
    yield Gauge(
        "handler_paused",
        "1: nothing is claimed for the handler until it is resumed.",
        [({"handler": flow.handler_name}, float(flow.paused_at is not None)) for flow in flows],
    )
    yield Gauge(
        "handler_breaker_open",
        "1: the breaker of the handler is open, or probes.",
        [({"handler": flow.handler_name}, float(flow.opened_at is not None)) for flow in breakers],
    )
    yield Gauge(
        "handler_breaker_failed_probes",
        "Probes that have failed since the breaker of the handler opened.",
        [({"handler": flow.handler_name}, float(flow.failed_probes)) for flow in breakers],
    )
    yield Gauge(
        "handler_fleet_concurrency",
        "How many deliveries of the handler may be in flight in all workers together.",
        [({"handler": f.handler_name}, float(f.fleet_concurrency)) for f in flows if f.fleet_concurrency is not None],
    )
    yield Gauge(
        "handler_fleet_in_flight",
        "How many of them are in flight.",
        [({"handler": f.handler_name}, float(f.in_flight)) for f in flows if f.fleet_concurrency is not None],
    )
    yield Gauge(
        "handler_rate_limit",
        "How many deliveries of the handler may begin per second.",
        [({"handler": flow.handler_name}, flow.rate) for flow in flows if flow.rate is not None],
    )
    yield Gauge(
        "handler_blocked_keys",
        "Ordering keys whose events wait for the handler behind a dead letter.",
        _largest([({"handler": each.handler_name}, float(each.keys)) for each in snapshot.status.blocked]),
    )


def _brokers(snapshot: Snapshot) -> Iterator[Gauge]:
    """What brokers hold for handlers; where they do not tell, there is no sample."""
    backlogs = snapshot.status.backlogs
    yield from broker_gauges(backlogs)
    weak = Counter({each.broker: 0 for each in backlogs})
    weak.update(each.broker for each in snapshot.status.weaknesses)
    yield Gauge(
        "broker_weaknesses",
        "Settings of a broker that may lose events; holdfast doctor names them.",
        [({"broker": broker}, float(count)) for broker, count in sorted(weak.items())],
    )


def broker_gauges(backlogs: Sequence[BrokerBacklog]) -> Iterator[Gauge]:
    """Return what brokers hold for handlers, whoever has asked them."""
    labels = [{"broker": each.broker, "handler": each.handler_name} for each in backlogs]

    def known(name: str, text: str, values: Iterable[float | None]) -> Gauge:
        told = zip(labels, values, strict=True)
        return Gauge(name, text, [(each, float(value)) for each, value in told if value is not None])

    yield known(
        "broker_waiting",
        "Messages that a broker holds for a handler and that nobody has taken: its lag.",
        (each.waiting for each in backlogs),
    )
    yield known(
        "broker_unacknowledged",
        "Messages that were taken for a handler and are not acknowledged.",
        (each.unacknowledged for each in backlogs),
    )
    yield known(
        "broker_redelivered",
        "Of them, those that the broker had delivered before.",
        (each.redelivered for each in backlogs),
    )
    yield known(
        "broker_report_age_seconds",
        "How long ago a broker has told a worker about a handler, in seconds.",
        (each.seconds for each in backlogs),
    )


def _handler(channel: str | None, generation: int | None, name: str | None) -> Handler:
    return _OTHERS if channel is None or name is None else (channel, str(generation), name)


def _workers(snapshot: Snapshot) -> Iterator[Gauge]:
    status, notifications = snapshot.status, snapshot.notifications
    living = sum(worker.living for worker in status.workers)
    yield _one("workers_living", "Workers with a heartbeat in the last minute.", living)
    yield _one(
        "workers_silent", "Workers without a heartbeat that did not stop in order.", len(status.workers) - living
    )
    yield _one("listeners", "Connections of workers that listen for wake-ups.", notifications.listeners)
    yield Gauge(
        "notify_mode",
        "1 for the present wake-up mode.",
        [({"mode": mode}, float(mode == (status.wakeup_mode or "missing"))) for mode in WAKEUP_MODES],
    )
    yield _one(
        "notification_queue_usage_ratio",
        "Share of the server's notification queue that is in use; alert at 0.25.",
        notifications.queue_usage,
    )


def _schedules(snapshot: Snapshot) -> Iterator[Gauge]:
    by_name = [({"schedule": each.name}, each) for each in snapshot.schedules]
    yield Gauge(
        "schedule_overdue_seconds",
        "Age of the oldest slot of a schedule that was not fired, in seconds.",
        [(labels, each.overdue_for or 0.0) for labels, each in by_name],
    )
    yield Gauge(
        "schedule_served",
        "1 for a schedule that a living worker declares.",
        [(labels, float(each.served)) for labels, each in by_name],
    )
    yield Gauge(
        "schedule_paused",
        "1 for a schedule that an operator has paused.",
        [(labels, float(each.paused_at is not None)) for labels, each in by_name],
    )


def _server(snapshot: Snapshot) -> Iterator[Gauge]:
    server = snapshot.server
    by_table = [({"table": each.name}, each) for each in server.tables]
    yield Gauge(
        "table_rows",
        "Rows of a table, as the server estimated them at the last vacuum or analyze.",
        [(labels, each.rows) for labels, each in by_table],
    )
    yield Gauge(
        "table_dead_rows",
        "Dead rows of a table that vacuum has not removed.",
        [(labels, each.dead_rows) for labels, each in by_table],
    )
    yield Gauge(
        "table_size_bytes",
        "Size of a table with its indexes, as of the last vacuum or analyze.",
        [(labels, each.bytes) for labels, each in by_table],
    )
    yield _maybe(
        "horizon_age_seconds",
        "Age of the oldest transaction that keeps dead rows from being removed. Needs pg_monitor.",
        server.horizon_seconds,
    )
    yield _maybe(
        "horizon_age_transactions",
        "The same in transactions, with replication slots and standbys. Needs pg_monitor.",
        server.horizon_transactions,
    )
    yield _one("server_connections", "Connections of clients to the server.", server.connections)
    yield _one("server_connections_limit", "Connections that the server allows its clients.", server.connection_limit)


def _by_route(routes: Iterable[RouteStatus], value: Callable[[RouteStatus], float]) -> list[Sample]:
    return [
        ({"channel": each.channel, "generation": str(each.generation), "route": each.route}, float(value(each)))
        for each in routes
    ]


def _by_handler(values: Mapping[Handler, float], together: Callable[[Iterable[float]], float]) -> list[Sample]:
    """The largest have a sample each, the others one together."""
    ranked = sorted(values, key=lambda handler: (handler == _OTHERS, -values[handler], handler))
    shown = {handler: values[handler] for handler in ranked[:MOST_HANDLERS]}
    if rest := ranked[MOST_HANDLERS:]:
        shown[_OTHERS] = together(values[handler] for handler in rest)
    return [
        ({"channel": channel, "generation": generation, "handler": handler}, value)
        for (channel, generation, handler), value in shown.items()
    ]


def _largest(samples: list[Sample]) -> list[Sample]:
    """Samples by handler, the largest first: those beyond the limit as one."""
    if rest := sum(value for _, value in samples[MOST_HANDLERS:]):
        return [*samples[:MOST_HANDLERS], ({"handler": OTHER}, rest)]
    return samples


def _one(name: str, text: str, value: float) -> Gauge:
    return Gauge(name, text, [({}, float(value))])


def _maybe(name: str, text: str, value: float | None) -> Gauge:
    return Gauge(name, text, [] if value is None else [({}, float(value))])
