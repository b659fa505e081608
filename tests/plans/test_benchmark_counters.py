"""What an event costs beside time, from small runs of the benchmarks: counters are no matter of the machine.

A bound here is close to what is measured. Who goes beyond one has added a round trip, a statement, an index write or a
row version to every event, and should know it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import databases, runner
from benchmarks.benchmark import Arm
from benchmarks.databases import Databases
from holdfast.embedded import EmbeddedPostgres

pytestmark = pytest.mark.slow

EVENTS = 3_000
# What a worker asks once, when it starts and stops, on each of its connections: not a cost of an event.
ONCE = 140


@pytest.fixture(scope="module")
def stock() -> Iterator[Databases]:
    # A page's first change after a checkpoint is written in full, which is no cost of an event.
    with EmbeddedPostgres(settings=databases.settings() | {"fsync": "off", "full_page_writes": "off"}) as server:
        yield Databases(server)


def costs(stock: Databases, verb: str, system: str = "holdfast", **options: Any) -> dict[str, Any]:
    return runner.run(stock, Arm(verb, system, verb, options))


def test_delivering(stock: Databases) -> None:
    """Hundreds of events share a claim and a settle; the claim is a heap-only update (LSN-1, LSN-6)."""
    found = costs(stock, "drain", count=EVENTS)
    assert found["events"] == EVENTS
    assert found["round_trips"] <= 0.006 + ONCE / EVENTS
    assert found["statements"] <= 0.03 + 2 * ONCE / EVENTS
    assert found["commits"] <= 0.006 + ONCE / EVENTS
    assert found["hot_share"] >= 0.45
    # The settle: the row's new version in the primary key and for retention, and the inbox row in its own.
    assert found["index_writes"] <= 3.1
    assert found["wal_bytes"] <= 2_000


def test_delivering_costs_what_the_control_costs(stock: Databases) -> None:
    """The same rows and the same index entries as the shortest program with these guarantees writes."""
    ours, control = costs(stock, "drain", count=EVENTS), costs(stock, "drain", "raw", count=EVENTS)
    assert ours["index_writes"] <= control["index_writes"] + 0.02
    assert ours["hot_share"] >= control["hot_share"] - 0.02
    # The inbox row also names the source, for the keys of sources that have an owner.
    assert ours["wal_bytes"] <= 1.15 * control["wal_bytes"]


def test_publishing(stock: Databases) -> None:
    """Publishing adds one round trip to a transaction, which has BEGIN, the business row and COMMIT (PUB-1)."""
    found = costs(stock, "publish", seconds=0.5, connections=2)
    once = 40 / found["events"]
    assert found["round_trips"] <= 4 + once
    assert found["statements"] <= 4 + once
    # The primary key and the lane; and the business row's own key.
    assert found["index_writes"] <= 3.1 + once
    assert found["commits"] <= 1 + once


def test_publishing_in_bulk(stock: Databases) -> None:
    """Thousands of events in one statement, and no statement of a trigger for each (PUB-2)."""
    found = costs(stock, "publish_many", count=10_000)
    assert found["statements"] * 10_000 <= 20
    assert found["index_writes"] <= 2.1
    assert found["wal_bytes"] <= 1_000


def test_fanning_out(stock: Databases) -> None:
    """Three handlers cost three deliveries and a third of a split each (LSN-7)."""
    found = costs(stock, "fanout", count=1_000, handlers=3)
    assert found["events"] == 3_000
    # The slower the machine, the more splits find less than a batch.
    assert found["round_trips"] <= 0.03 + ONCE / EVENTS
    assert found["index_writes"] <= 5.9


def test_in_a_transaction(stock: Databases) -> None:
    """Lock, inbox row, handler, settle, and the transaction around them (LSN-5)."""
    found = costs(stock, "transactional", count=1_000)  # the first 500 are not counted
    # Counted as statements: the eight that reset the session travel in the message of the BEGIN.
    assert found["round_trips"] <= 13 + ONCE / 500
    assert found["commits"] <= 1 + ONCE / 500
    assert found["index_writes"] <= 4.2


def test_two_processes_handle_each_event_once(stock: Databases) -> None:
    """What one has claimed the other leaves alone; the run itself checks the number of calls (LSN-3)."""
    found = costs(stock, "drain_together", count=EVENTS, processes=2)
    # The slower the machine, the more often one finds less than a batch, because the other has the rest.
    assert found["round_trips"] <= 0.06 + 2 * ONCE / EVENTS
    assert found["index_writes"] <= 3.1
