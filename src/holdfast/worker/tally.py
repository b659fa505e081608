"""Counts what becomes of deliveries, handler by handler: the one place that does. A summary reports it each minute."""

import asyncio
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from holdfast.handler_tally import BOUNDS, BUCKETS, OUTCOMES, DeliveryOutcome, HandlerTally, Histogram
from holdfast.measurements import failure_counter
from holdfast.postgres.clock import DatabaseClock
from holdfast.postgres.delivery import Delivery
from holdfast.telemetry import Counters, Notice, Observer
from holdfast.worker.settlements import Fail, Settlement

_INTERVAL: Final = 60.0
_MOST_HANDLERS: Final = 20
# What a minute's summary calls the outcomes that it has.
_SUMMARISED: Final[dict[DeliveryOutcome, str]] = {"delivered": "handled", "retried": "retried", "failed": "failed"}
_ATTEMPTED: Final = frozenset(("delivered", "retried", "failed"))
# A row may be due from the year 1 on: a longer time counts as this, so that one row does not spoil the sum.
_LONGEST: Final = 30 * 86_400.0
_MANY: Final = 8


class _Counts:
    """The counts of one handler since the start."""

    __slots__ = ("archived", "handler_buckets", "handler_sum", "outbox_buckets", "outbox_sum", "outcomes", "reported")

    def __init__(self) -> None:
        self.outcomes: dict[DeliveryOutcome, int] = dict.fromkeys(OUTCOMES, 0)
        self.archived = 0
        self.handler_buckets, self.handler_sum = [0] * BUCKETS, 0.0
        self.outbox_buckets, self.outbox_sum = [0] * BUCKETS, 0.0
        self.reported: dict[DeliveryOutcome, int] = dict.fromkeys(_SUMMARISED, 0)

    def snapshot(self) -> HandlerTally:
        return HandlerTally(
            dict(self.outcomes),
            self.archived,
            Histogram(tuple(self.handler_buckets), self.handler_sum),
            Histogram(tuple(self.outbox_buckets), self.outbox_sum),
        )


class DeadLetterCounts:
    """How many deliveries were judged to have failed for good, and how many dead letters were written.

    The two differ for good when a lease was lost in between, or when the database refuses what is written.
    """

    def __init__(self) -> None:
        self.nacked_terminal = failure_counter()
        self.dlq_written = failure_counter()

    def judged(self, settlement: Settlement) -> None:
        """Count a settlement that is decided, if it makes a dead letter."""
        if isinstance(settlement, Fail) and settlement.dead:
            self.nacked_terminal.add(settlement.kind)

    def written(self, batch: Iterable[Fail]) -> None:
        """Count those that make dead letters, once that is committed."""
        for kind, count in Counter([settlement.kind for settlement in batch if settlement.dead]).items():
            self.dlq_written.add(kind, count)


class Tally:
    """The counts of one worker since it started. The worker's loop adds to them; any thread may take a snapshot."""

    def __init__(self, counters: Counters, clock: DatabaseClock, observe: Observer) -> None:
        self._counters = counters
        self._clock = clock
        self._observe = observe
        self.dead_letters = DeadLetterCounts()
        self._lock = threading.Lock()
        self._handlers: dict[str, _Counts] = {}
        self._since = time.monotonic()

    def snapshot(self) -> dict[str, HandlerTally]:
        """Return, by the name of the handler, what has become of its deliveries since the start."""
        with self._lock:
            return {name: counts.snapshot() for name, counts in self._handlers.items()}

    def handled(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries whose handlers have succeeded, once they are settled."""
        self._counters.delivered += len(deliveries)
        self._add("delivered", deliveries)

    def duplicates(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries that were handled before, and are settled."""
        self._counters.duplicates += len(deliveries)
        self._add("duplicate", deliveries)

    def retried(self, deliveries: Sequence[Delivery]) -> None:
        """Count attempts that will be repeated."""
        self._counters.retried += len(deliveries)
        self._add("retried", deliveries)

    def snoozed(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries that are due again later, without an attempt."""
        self._counters.snoozed += len(deliveries)
        self._add("snoozed", deliveries)

    def released(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries that were given back."""
        self._counters.released += len(deliveries)
        self._add("released", deliveries)

    def failed(self, deliveries: Sequence[Delivery], reasons: Sequence[str], *, archived: bool) -> None:
        """Count deliveries that have ended without success: dead letters, and those that expired or were cancelled."""
        ended: dict[DeliveryOutcome, list[Delivery]] = {"failed": [], "expired": [], "cancelled": []}
        for delivery, reason in zip(deliveries, reasons, strict=True):
            ended["expired" if reason == "expired" else "cancelled" if reason == "cancelled" else "failed"].append(
                delivery
            )
        self._counters.expired += len(ended["expired"])
        self._counters.failed += len(ended["failed"]) + len(ended["cancelled"])
        if archived:
            self._counters.archived += len(ended["failed"])
        for outcome, some in ended.items():
            self._add(outcome, some, archived=archived)

    def lost(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries that could not be settled: their leases are lost, or are left to expire."""
        self._counters.lost_leases += len(deliveries)
        self._add("lost_lease", deliveries)

    def _add(self, outcome: DeliveryOutcome, deliveries: Sequence[Delivery], *, archived: bool = False) -> None:
        if not deliveries:
            return
        alone = len(deliveries) == 1
        by_handler = {deliveries[0].handler.name: deliveries} if alone else _grouped(deliveries)
        ahead = self._clock.now() - time.monotonic() if outcome in _ATTEMPTED else 0.0
        with self._lock:
            for name, some in by_handler.items():
                counts = self._handlers.get(name)
                if counts is None:
                    counts = self._handlers[name] = _Counts()
                counts.outcomes[outcome] += len(some)
                if archived:
                    counts.archived += len(some)
                if outcome in _ATTEMPTED:
                    _observe_times(counts, some, ahead)

    async def run(self) -> None:
        """Report each minute."""
        self._since = time.monotonic()
        while True:
            await asyncio.sleep(_INTERVAL)
            self.report()

    def report(self) -> None:
        """Report what has happened since the last report; when nothing has, nothing."""
        since, self._since = self._since, time.monotonic()
        totals: Counter[str] = Counter(dict.fromkeys(_SUMMARISED.values(), 0))
        busy: dict[str, dict[str, int]] = {}
        for name, counts in self._handlers.items():
            new = {called: counts.outcomes[each] - counts.reported[each] for each, called in _SUMMARISED.items()}
            counts.reported = {each: counts.outcomes[each] for each in _SUMMARISED}
            if any(new.values()):
                totals.update(new)
                busy[name] = {called: count for called, count in new.items() if count}
        if not busy:
            return
        busiest = sorted(busy, key=lambda name: sum(busy[name].values()), reverse=True)[:_MOST_HANDLERS]
        details: dict[str, object] = {
            "seconds": round(self._since - since, 1),
            **totals,
            "handlers": {name: busy[name] for name in busiest},
        }
        if len(busy) > len(busiest):
            details["more_handlers"] = len(busy) - len(busiest)
        self._observe(Notice("info", "worker_summary", details))


def _grouped(deliveries: Iterable[Delivery]) -> Mapping[str, Sequence[Delivery]]:
    """Return the deliveries of each handler, by its name."""
    by_handler: dict[str, list[Delivery]] = {}
    for each in deliveries:
        name = each.handler.name
        if name in by_handler:
            by_handler[name].append(each)
        else:
            by_handler[name] = [each]
    return by_handler


def _observe_times(counts: _Counts, deliveries: Sequence[Delivery], ahead: float) -> None:
    """Add the times of attempts. `ahead` is the database's time, by which they were due, less the worker's."""
    if len(deliveries) < _MANY:
        for each in deliveries:
            _observe_time(counts, each, ahead)
        return
    ran = [each for each in deliveries if each.began_at is not None]
    if not ran:
        return
    handler_times = [each.ended_at - each.began_at for each in ran]  # type: ignore[operator]
    outbox_times = [each.ended_at + ahead - each.available_at.timestamp() for each in ran]
    # The database's clock is known to within a round trip, and may have been set.
    if min(outbox_times) < 0.0 or max(outbox_times) > _LONGEST:
        outbox_times = [min(max(0.0, each), _LONGEST) for each in outbox_times]
    counts.handler_sum += sum(handler_times)
    counts.outbox_sum += sum(outbox_times)
    _fill(counts.handler_buckets, handler_times)
    _fill(counts.outbox_buckets, outbox_times)


def _observe_time(counts: _Counts, delivery: Delivery, ahead: float) -> None:
    """Do the same for one attempt: a transaction settles one at a time."""
    if delivery.began_at is None:
        return
    handler_time = delivery.ended_at - delivery.began_at
    outbox_time = min(max(0.0, delivery.ended_at + ahead - delivery.available_at.timestamp()), _LONGEST)
    counts.handler_sum += handler_time
    counts.outbox_sum += outbox_time
    counts.handler_buckets[bisect_left(BOUNDS, handler_time)] += 1
    counts.outbox_buckets[bisect_left(BOUNDS, outbox_time)] += 1


def _fill(buckets: list[int], times: list[float]) -> None:
    """Count many times in their buckets. They are sorted, and the bounds looked for among them: that takes a third."""
    times.sort()
    below = 0
    for bucket, bound in enumerate(BOUNDS):
        upto = bisect_right(times, bound, below)
        buckets[bucket] += upto - below
        below = upto
    buckets[-1] += len(times) - below
