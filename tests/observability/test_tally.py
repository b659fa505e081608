"""The tally: what becomes of deliveries, counted once for the summary, the roll-up and the metrics."""

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from holdfast.handler_tally import BOUNDS, BUCKETS, OUTCOMES, Histogram
from holdfast.postgres.clock import DatabaseClock, steady
from holdfast.telemetry import Counters
from holdfast.worker.tally import Tally


class Attempt:
    """As much of a delivery as is counted."""

    def __init__(self, name: str, took: float | None = None, due: datetime | None = None) -> None:
        self.handler = self
        self.name = name
        self.ended_at = time.monotonic()
        self.began_at = None if took is None else self.ended_at - took
        self.available_at = due or datetime.now(UTC)


def tally(counters: Counters | None = None, clock: DatabaseClock | None = None) -> Tally:
    return Tally(counters or Counters(), clock or DatabaseClock(15.0), lambda _: None)


def test_each_outcome_is_counted_for_its_handler_and_for_the_worker() -> None:
    """OBS-2."""
    counters = Counters()
    counted = tally(counters)
    one, two = [Attempt("shop.one", 0.1)], [Attempt("shop.two", 0.1), Attempt("shop.two", 0.1)]
    counted.handled(one + two)  # type: ignore[arg-type]
    counted.duplicates(one)  # type: ignore[arg-type]
    counted.retried(two)  # type: ignore[arg-type]
    counted.snoozed(one)  # type: ignore[arg-type]
    counted.released(one)  # type: ignore[arg-type]
    counted.lost(two)  # type: ignore[arg-type]
    counted.failed(one + two, ["rejected", "expired", "cancelled"], archived=False)  # type: ignore[arg-type]
    counted.failed(one, ["retry_terminal"], archived=True)  # type: ignore[arg-type]
    seen = counted.snapshot()
    assert list(seen["shop.one"].counts) == list(OUTCOMES)
    assert {outcome: count for outcome, count in seen["shop.one"].counts.items() if count} == {
        "delivered": 1, "duplicate": 1, "snoozed": 1, "released": 1, "failed": 2,
    }  # fmt: skip
    assert {outcome: count for outcome, count in seen["shop.two"].counts.items() if count} == {
        "delivered": 2, "retried": 2, "lost_lease": 2, "expired": 1, "cancelled": 1,
    }  # fmt: skip
    assert (seen["shop.one"].archived, seen["shop.two"].archived) == (1, 0)
    assert (counters.delivered, counters.duplicates, counters.retried, counters.snoozed, counters.released) == (
        3, 1, 2, 1, 1,
    )  # fmt: skip
    assert (counters.failed, counters.archived, counters.expired, counters.lost_leases) == (3, 1, 1, 2)


def test_attempts_fall_into_buckets_by_their_time() -> None:
    """Both histograms count every attempt, and none of what was never run (OBS-2)."""
    clock = DatabaseClock(15.0)
    there = datetime.now(UTC) + timedelta(hours=3)  # the database's clock may say anything
    clock.observe(there, steady(), steady())
    counted = tally(clock=clock)
    attempts = [Attempt("shop.one", took, there - timedelta(seconds=7)) for took in (0.0005, 0.2, 0.2, 5000.0)]
    counted.handled(attempts[:2])  # type: ignore[arg-type]
    counted.retried(attempts[2:3])  # type: ignore[arg-type]
    counted.failed(attempts[3:], ["rejected"], archived=False)  # type: ignore[arg-type]
    counted.failed([Attempt("shop.one")], ["max_deliveries"], archived=False)  # type: ignore[list-item]
    seen = counted.snapshot()["shop.one"]
    assert seen.handler_time.counts[0] == 1 and seen.handler_time.counts[BOUNDS.index(0.25)] == 2
    assert seen.handler_time.counts[-1] == 1 and seen.handler_time.count == 4
    assert seen.handler_time.sum == pytest.approx(5000.4, abs=0.1)
    assert seen.outbox_time.counts[BOUNDS.index(10.0)] == 4
    assert seen.outbox_time.sum == pytest.approx(28, abs=2)
    assert seen.handler_time.cumulative[-1] == 4 and len(seen.handler_time.cumulative) == BUCKETS


def test_times_that_a_clock_has_spoilt_stay_within_bounds() -> None:
    """A row that is due ahead of the clock, or since the year 1, does not spoil the sums (OBS-2)."""
    counted = tally()
    counted.handled([Attempt("shop.one", 0.1, datetime.now(UTC) + timedelta(hours=1))])  # type: ignore[list-item]
    counted.handled([Attempt("shop.one", 0.1, datetime(1, 1, 2, tzinfo=UTC))])  # type: ignore[list-item]
    seen = counted.snapshot()["shop.one"].outbox_time
    assert (seen.counts[0], seen.counts[-1], seen.sum) == (1, 1, 30 * 86_400.0)


def test_a_snapshot_of_another_thread_is_consistent() -> None:
    """An exporter reads in its own thread while the worker counts (OBS-2)."""
    counted = tally()
    batch = [Attempt("shop.one", 0.1) for _ in range(7)]
    ended = threading.Event()

    def count() -> None:
        while not ended.is_set():
            counted.handled(batch)  # type: ignore[arg-type]

    counting = threading.Thread(target=count)
    counting.start()
    try:
        for _ in range(500):
            for seen in counted.snapshot().values():
                assert seen.counts["delivered"] == seen.handler_time.count == seen.outbox_time.count
                assert seen.counts["delivered"] % 7 == 0
    finally:
        ended.set()
        counting.join()


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({}, 0.5, None),
        ({0: 10}, 0.5, 0.0005),
        ({7: 100}, 0.99, 0.1 + 0.99 * 0.15),
        ({0: 99, 8: 1}, 0.99, 0.001),
        ({0: 98, 8: 2}, 0.995, 0.25 + 0.25 * 0.75),
        ({20: 1}, 0.5, 3600.0),
    ],
)
def test_a_quantile_lies_within_its_bucket(counts: dict[int, int], share: float, expected: float | None) -> None:
    """OBS-2."""
    histogram = Histogram(tuple(counts.get(number, 0) for number in range(BUCKETS)))
    assert histogram.quantile(share) == (None if expected is None else pytest.approx(expected))
