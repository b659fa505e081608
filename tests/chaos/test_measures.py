"""What is measured in a run: a worker that never notices must not look like one that was never asked."""

from __future__ import annotations

from chaos.measures import noticed
from chaos.world import Strike

LONG, SHORT = Strike("half_open", 100.0, 116.0), Strike("half_open", 140.0, 145.0)


def test_the_time_until_each_worker_says_so() -> None:
    """B3."""
    assert noticed([LONG], [[103.0], [90.0, 107.5]]) == [3.0, 7.5]


def test_a_worker_that_says_nothing_counts_with_the_whole_silence() -> None:
    """B3: which is past the limit of 15 s, and fails the run."""
    assert noticed([LONG], [[103.0], []]) == [3.0, 16.0]
    assert noticed([LONG], [[90.0]]) == [16.0]


def test_short_and_later_silences_are_not_held_against_anybody() -> None:
    """B3: an outage that is still told is not told again."""
    assert noticed([SHORT], [[]]) == []
    assert noticed([LONG, Strike("blackhole", 120.0, 138.0)], [[104.0]]) == [4.0]
