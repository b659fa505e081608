"""What is measured in a run: a worker that never notices must not look like one that was never asked."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from chaos.measures import Delivery, noticed, repeats
from chaos.observer import Observer, Sample, in_flight
from chaos.world import Strike
from tests.worker.support import until

LONG, SHORT = Strike("half_open", 100.0, 116.0), Strike("half_open", 140.0, 145.0)


def test_the_time_until_each_worker_says_so() -> None:
    """B3."""
    assert noticed([LONG], [[103.0], [90.0, 107.5]]) == [3.0, 7.5]


def test_a_worker_that_says_nothing_counts_with_the_whole_silence() -> None:
    """Which is past the limit of 15 s, and fails the run (B3)."""
    assert noticed([LONG], [[103.0], []]) == [3.0, 16.0]
    assert noticed([LONG], [[90.0]]) == [16.0]


def test_short_and_later_silences_are_not_held_against_anybody() -> None:
    """An outage that is still told is not told again (B3)."""
    assert noticed([SHORT], [[]]) == []
    assert noticed([LONG, Strike("blackhole", 120.0, 138.0)], [[104.0]]) == [4.0]


def run(row: str, process: int, began: float, ended: float, handler: str = "parcel.track") -> Delivery:
    return Delivery(handler, row, row, 1, began, ended, process)


def test_repeats_are_counted_for_the_process_that_had_finished() -> None:
    """Of the rows that two dead workers had handled; a handler with a transaction is not counted (LSN-16)."""
    first = [run(row, 1, 10.0, 11.0) for row in "ab"] + [run("c", 2, 10.0, 11.0), run("d", 2, 10.0, 11.0, "ledger.pay")]
    again = [run(row, 3, 20.0, 21.0) for row in "abc"] + [run("d", 3, 20.0, 21.0, "ledger.pay")]
    assert repeats(again + first) == {"repeats": 3, "repeats_of_one": 2, "overlaps": 0}


def test_overlaps_are_two_runs_of_a_row_at_once() -> None:
    """One that begins before the other ends, whoever runs it (T14)."""
    runs = [run("a", 1, 10.0, 12.0), run("a", 2, 11.9, 12.5), run("b", 1, 10.0, 12.0), run("b", 2, 12.0, 13.0)]
    assert repeats(runs)["overlaps"] == 1


def test_what_a_fault_that_lasts_can_take() -> None:
    """Connections that are frozen for seconds hold back what is handled meanwhile, too (P2)."""
    samples = [Sample(at, {"w-1": {f"r-{n}" for n in range(count)}}) for at, count in ((90, 3), (101, 4), (104, 9))]
    assert in_flight(samples, 101.0) == 4
    assert in_flight(samples, 101.0, until=105.0) == 9
    assert in_flight(samples, 100.0, until=0.0) == in_flight(samples[:1], 100.0, "w-1") == 3
    assert in_flight(samples, 100.0, "w-2") == 0


class _Server:
    """Connections of which every other one fails, each time with another error."""

    def __init__(self) -> None:
        self.errors = [TimeoutError(), asyncpg.InternalClientError("another operation is in progress")]
        self.fails = False

    async def connect(self, *_: Any, **__: Any) -> _Server:
        self.fails = not self.fails
        return self

    async def fetch(self, _sql: str) -> list[tuple[str, str]]:
        if self.fails and self.errors:
            raise self.errors.pop()
        return [("w-1", "r-1")]

    async def fetchval(self, _sql: str) -> int:
        return 1

    def terminate(self) -> None: ...


async def test_no_fault_ends_the_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without samples nothing seems to have been in flight when a fault struck (P2)."""
    server = _Server()
    monkeypatch.setattr("chaos.observer.asyncpg.connect", server.connect)
    observer = Observer("")
    watching = asyncio.create_task(observer.run())
    await until(lambda: observer.samples or watching.done(), what="a sample")
    assert not watching.done() and observer.samples[0].count() == 1
    watching.cancel()
