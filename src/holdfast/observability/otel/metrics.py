"""Metrics through the OpenTelemetry API: the durations of the semantic conventions for messaging, and what is counted.

Counts are read from the tally when they are exported, so they cost nothing before and agree with those for Prometheus.
Durations are recorded one by one, because only so they can have exemplars: the traces of some attempts.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from holdfast.context import current_database
from holdfast.handler_tally import HandlerTally
from holdfast.installing import package_version
from holdfast.tracing import Attempt, TallyReader

SCHEMA: Final = "https://opentelemetry.io/schemas/1.44.0"
# As the conventions advise for all durations of messaging.
_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_NOTHING_MEASURED: Final = ("_ProxyMeterProvider", "NoOpMeterProvider")
# Deliveries that a handler was, or would have been, called for.
_CONSUMED: Final = ("delivered", "duplicate", "retried", "snoozed", "failed")

_lock = threading.Lock()
_meters: WeakKeyDictionary[metrics.MeterProvider, Meter] = WeakKeyDictionary()


def meter_of(provider: metrics.MeterProvider | None) -> Meter | None:
    """Return the one meter of a provider, or of the global one; None where nothing is measured."""
    chosen = metrics.get_meter_provider() if provider is None else provider
    if type(chosen).__name__ in _NOTHING_MEASURED:
        return None
    with _lock:
        if chosen not in _meters:
            _meters[chosen] = Meter(chosen)
        return _meters[chosen]


class Meter:
    """The instruments of one provider. An SDK has each of them once, whoever asks for it."""

    def __init__(self, provider: metrics.MeterProvider) -> None:
        meter = metrics.get_meter("holdfast", package_version(), provider, SCHEMA)
        self._processed = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of processing operation.",
            explicit_bucket_boundaries_advisory=_BOUNDS,
        )
        self._operations = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of messaging operation initiated by a producer or consumer client.",
            explicit_bucket_boundaries_advisory=_BOUNDS,
        )
        self._sent = meter.create_counter(
            "messaging.client.sent.messages",
            "{message}",
            "Number of messages producer attempted to send to the broker.",
        )
        self._dead = meter.create_counter(
            "messaging.outbox.dlq_written", "{message}", "Number of dead letters that were written."
        )
        meter.create_observable_counter(
            "messaging.client.consumed.messages",
            [self._consumed],
            "{message}",
            "Number of messages that were delivered to the application.",
        )
        meter.create_observable_counter(
            "messaging.outbox.deliveries", [self._outcomes], "{message}", "Number of deliveries by what became of them."
        )
        self._lock = threading.Lock()
        self._running: dict[object, tuple[int, TallyReader]] = {}
        self._ended: Counter[tuple[str, str]] = Counter()  # of workers that have stopped, by handler and outcome

    # --- counted by workers -------------------------------------------------------------------------------

    def watch(self, read: TallyReader) -> Callable[[], None]:
        """Export what a worker counts, until the function that is returned is called."""
        key = object()
        with self._lock:
            self._running[key] = os.getpid(), read

        def stop() -> None:
            last = _counts(read())
            with self._lock:
                if self._running.pop(key, None) is not None:
                    self._ended.update(last)

        return stop

    def _totals(self) -> Counter[tuple[str, str]]:
        with self._lock:
            total = Counter(self._ended)
            # What a process had before it forked is counted by the process that has it still.
            running = [read for pid, read in self._running.values() if pid == os.getpid()]
        for read in running:
            total.update(_counts(read()))
        return total

    def _consumed(self, _: CallbackOptions) -> Iterable[Observation]:
        by_handler: Counter[str] = Counter()
        for (handler, outcome), count in self._totals().items():
            if outcome in _CONSUMED:
                by_handler[handler] += count
        return [Observation(count, _attributes("process", handler)) for handler, count in by_handler.items()]

    def _outcomes(self, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(count, {**_attributes("process", handler), "messaging.outbox.outcome": outcome})
            for (handler, outcome), count in self._totals().items()
        ]

    # --- recorded one by one ------------------------------------------------------------------------------

    def handled(self, attempts: Sequence[Attempt], error_type: str | None = None) -> None:
        """Record how long handlers have run, with the spans of those attempts that have one."""
        record = self._processed.record
        for each in attempts:
            if each.began_at is not None:
                attributes = _attributes("process", each.handler_name, error_type)
                record(each.ended_at - each.began_at, attributes, getattr(each.span, "context", None))

    def dead_letter(self, handler: str, reason: str, error_type: str | None) -> None:
        """Count a dead letter that was written."""
        self._dead.add(1, {**_attributes("settle", handler, error_type), "messaging.outbox.dlq_reason": reason})

    def settled(self, seconds: float) -> None:
        """Record how long the database took to settle a batch."""
        self._operations.record(seconds, _attributes("settle"))

    def published(self, count: int, seconds: float, error_type: str | None) -> None:
        """Record a publish of so many events."""
        attributes = _attributes("publish", None, error_type)
        self._sent.add(count, attributes)
        self._operations.record(seconds, attributes)


def _counts(tally: Mapping[str, HandlerTally]) -> Counter[tuple[str, str]]:
    return Counter(
        {
            (handler, outcome): count
            for handler, each in tally.items()
            for outcome, count in each.counts.items()
            if count
        }
    )


_TYPES: Final = {"publish": "send", "process": "process", "settle": "settle"}


def _attributes(operation: str, handler: str | None = None, error_type: str | None = None) -> dict[str, str]:
    attributes = {
        "messaging.system": "holdfast",
        "messaging.operation.name": operation,
        "messaging.operation.type": _TYPES[operation],
    }
    if handler is not None:
        attributes["messaging.destination.subscription.name"] = handler
    if error_type is not None:
        attributes["error.type"] = error_type
    # Counts that are read by the exporter's thread are those of all databases together.
    if (database := current_database.get()) is not None:
        attributes["messaging.outbox.database"] = database
    return attributes
