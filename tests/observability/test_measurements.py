"""What processes report and exporters add up (OBS-2): sums, one line for a report, bounded labels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric

from holdfast.handler_tally import BUCKETS, OUTCOMES, HandlerTally, Histogram
from holdfast.measurements import MOST_FAILURES, BoundedCounter, FailureKind, Measurements, failure_counter
from holdfast.observability.prometheus import MOST_HANDLERS, MOST_SAMPLES, ProcessFamilies, exposition
from holdfast.telemetry import Counters
from holdfast.worker.process_reports import LONGEST, ProcessReports
from tests.observability.scraping import OPENMETRICS, Scrape, read, read_openmetrics

COUNT = st.integers(0, 2**40)
TEXT = st.text(max_size=20)
HISTOGRAM = st.builds(
    Histogram, st.lists(COUNT, min_size=BUCKETS, max_size=BUCKETS).map(tuple), st.integers(0, 10**9).map(float)
)
TALLY = st.builds(HandlerTally, st.fixed_dictionaries(dict.fromkeys(OUTCOMES, COUNT)), COUNT, HISTOGRAM, HISTOGRAM)
FAILURES = st.dictionaries(st.builds(FailureKind, TEXT, TEXT, TEXT), st.integers(1, 9), max_size=3)
MEASUREMENTS = st.builds(
    Measurements,
    st.dictionaries(TEXT, TALLY, max_size=3),
    FAILURES,
    FAILURES,
    st.dictionaries(TEXT, st.integers(1, 9), max_size=3),
    st.builds(Counters, claims=COUNT, fired=COUNT),
    *[COUNT] * 6,
)


@pytest.mark.slow
@given(MEASUREMENTS)
def test_a_report_is_one_line_and_loses_nothing(found: Measurements) -> None:
    """Whatever the names are (OBS-2)."""
    line = found.dumped()
    assert "\n" not in line and Measurements.loaded(line) == found


@pytest.mark.slow
@given(MEASUREMENTS, MEASUREMENTS)
def test_sums_do_not_depend_on_the_order(one: Measurements, two: Measurements) -> None:
    """And nothing is nothing (OBS-2)."""
    assert one + two == two + one
    assert one + Measurements() == one


async def test_what_a_dead_process_has_done_is_kept() -> None:
    """A report that was cut short counts as not sent; the state goes with the process (OBS-2)."""
    reports, reader = ProcessReports(), asyncio.StreamReader(limit=LONGEST)
    for workers, claims in ((1, 5), (1, 9)):
        reader.feed_data(f"{Measurements(counters=Counters(claims=claims), workers=workers).dumped()}\n".encode())
    reader.feed_data(Measurements(counters=Counters(claims=12)).dumped().encode()[:40])
    reader.feed_eof()
    await reports.read(1, reader)
    assert (reports.measurements().counters.claims, reports.measurements().workers) == (9, 1)
    reports.end(1)
    assert (reports.measurements().counters.claims, reports.measurements().workers) == (9, 0)
    reports.end(1)
    assert reports.measurements().counters.claims == 9


def test_counters_are_bounded() -> None:
    """What comes after the limit is counted together, and what came before keeps its own (OBS-2)."""
    counter: BoundedCounter[str] = BoundedCounter(2, lambda _: "other")
    for name in ("a", "b", "c", "a", "d"):
        counter.add(name)
    assert counter.snapshot() == {"a": 2, "b": 1, "other": 2}


# --- labels ---


def scrape(families: ProcessFamilies, found: Measurements) -> Scrape:
    def collect() -> Iterator[Metric]:
        return families.of(found, deaths=3)

    text = exposition(collect)[0]
    assert read_openmetrics(exposition(collect, OPENMETRICS)[0]) == read(text)
    return read(text)


def busy(handlers: int, event_types: int, process: int = 0) -> Measurements:
    """As of a worker with many handlers, each of which has seen everything."""
    counter = failure_counter()
    for number in range(handlers):
        for reason in ("retry_terminal", "max_deliveries", "rejected"):
            for error in ("ValueError", "TimeoutError", f"Own{number}of{process}"):
                counter.add(FailureKind(f"shop.h{number}", reason, error))
    times = Histogram((1,) * BUCKETS, 2.5)
    tally = HandlerTally(dict.fromkeys(OUTCOMES, 7), 1, times, times)
    types: BoundedCounter[str] = BoundedCounter(100, lambda _: "other")
    for number in range(event_types * handlers):
        types.add(f"order.t{number}of{process}")
    return Measurements(
        {f"shop.h{number}": tally for number in range(handlers)},
        counter.snapshot(),
        counter.snapshot(),
        types.snapshot(),
    )


def test_a_thousand_handlers_and_fifty_types_each_stay_below_the_bound() -> None:
    """At most 10,000 samples, and no count is lost: the rest is `other` (OBS-2)."""
    found = scrape(ProcessFamilies(), busy(1_000, 50))
    assert len(found) <= MOST_SAMPLES == 10_000
    by_handler = found.by("handler", "holdfast_deliveries_total")
    assert len(by_handler) == MOST_HANDLERS + 1
    assert by_handler["other"] == (1_000 - MOST_HANDLERS) * 7 * len(OUTCOMES)
    assert found.of("holdfast_deliveries_total") == 1_000 * 7 * len(OUTCOMES)
    assert found.of("holdfast_time_in_outbox_seconds_count") == 1_000 * BUCKETS
    assert found.of("holdfast_dlq_written_total") == 9_000
    assert found.of("holdfast_events_published_total") == 50_000
    assert sum(name == "holdfast_dlq_written_total" for name, _ in found) <= MOST_FAILURES + 3 * (MOST_HANDLERS + 1)


def test_many_processes_stay_below_the_bound() -> None:
    """Also where each of them has seen other errors and types (OBS-2)."""
    processes = [busy(200, 50, process) for process in range(20)]
    found = scrape(ProcessFamilies(), sum(processes, Measurements()))
    assert len(found) <= MOST_SAMPLES
    assert found.of("holdfast_dlq_written_total") == 20 * 1_800
    assert found.of("holdfast_events_published_total") == 20 * 10_000


@pytest.mark.slow
def test_who_has_samples_of_its_own_keeps_them() -> None:
    """A handler that appears later takes no one's place, so that no counter goes back (OBS-2)."""
    families = ProcessFamilies()
    first = scrape(families, busy(200, 1))
    more = busy(300, 1)
    shuffled = Measurements(dict(reversed(list(more.handlers.items()))), more.nacked_terminal, more.dlq_written)
    second = scrape(families, shuffled)
    for (name, labels), value in first.items():
        if name.endswith(("_total", "_bucket", "_count", "_sum")) and "published" not in name:
            assert second[name, labels] >= value


HOSTILE = ['a"b', "a\\b", "a\nb", "a\0b", "\ud800", "é" * 200, "{}=,", " ", 'x"} 1\nholdfast_outbox_failed 0']


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_only_labels(name: str) -> None:
    """Whoever may publish or raise chooses names, and must not be able to write metrics of their own (OBS-2)."""
    kind = {FailureKind(name, "rejected", name): 2}
    tally = busy(1, 1).handlers["shop.h0"]
    found = scrape(ProcessFamilies(), Measurements({name: tally}, kind, kind, {name: 4}))
    shown = name.encode("utf-8", "backslashreplace").decode()
    assert found.by("event_type", "holdfast_events_published_total") == {shown: 4}
    assert found.by("exception_type", "holdfast_dlq_written_total") == {shown: 2}
    assert found.of("holdfast_deliveries_total", handler=shown, outcome="delivered") == 7
    assert not any(each.startswith("holdfast_outbox") for each, _ in found)
