"""Counts of one handler's deliveries by outcome, and two histograms of durations with fixed bounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

# Each delivery that a worker has claimed is closed by exactly one of these. `delivered`, `duplicate`, `failed`,
# `expired` and `cancelled` settle it for good; after the others it is open, and is claimed again.
DeliveryOutcome = Literal[
    "delivered",
    "duplicate",  # handled before, and not run again
    "retried",
    "snoozed",
    "failed",  # a dead letter, in the outbox or in the archive
    "expired",
    "cancelled",
    "released",  # given back as if it had not been claimed
    "lost_lease",  # not settled: another worker has the lease, or will have it
]
OUTCOMES: Final[tuple[DeliveryOutcome, ...]] = (
    "delivered",
    "duplicate",
    "retried",
    "snoozed",
    "failed",
    "expired",
    "cancelled",
    "released",
    "lost_lease",
)

# Upper bounds of the buckets of both histograms, in seconds; one bucket more has what is above the last. The roll-up in
# the database has them in this order: they can be changed only with a migration.
BOUNDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
)  # fmt: skip
BUCKETS: Final = len(BOUNDS) + 1


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many durations fell into each bucket: above the bound before it, and up to its own."""

    counts: Sequence[int] = (0,) * BUCKETS
    sum: float = 0.0  # of the durations, in seconds

    @property
    def count(self) -> int:
        """How many durations there were."""
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[int, ...]:
        """How many were at most the bound of each bucket, and, as the last, all of them."""
        return tuple(accumulate(self.counts))

    def quantile(self, share: float) -> float | None:
        """Return an estimate of the duration that such a share did not exceed; None if there are no durations.

        Above the last bound it is the last bound: all that is known is that it was more.
        """
        rank, below = share * self.count, 0
        if not self.count:
            return None
        for number, within in enumerate(self.counts[:-1]):
            if within and below + within >= rank:
                low = BOUNDS[number - 1] if number else 0.0
                return low + (BOUNDS[number] - low) * max(0.0, rank - below) / within
            below += within
        return BOUNDS[-1]

    def __add__(self, other: "Histogram") -> "Histogram":
        return Histogram(
            tuple(mine + its for mine, its in zip(self.counts, other.counts, strict=True)), self.sum + other.sum
        )


@dataclass(frozen=True, slots=True)
class HandlerTally:
    """The outcomes and durations of one handler's deliveries."""

    counts: Mapping[DeliveryOutcome, int]  # an entry for each of OUTCOMES
    archived: int  # of the failed, those that moved to the archive
    handler_time: Histogram  # of every attempt: how long its handler ran
    outbox_time: Histogram  # of every attempt: from when the delivery was due until the handler had ended

    def __add__(self, other: "HandlerTally") -> "HandlerTally":
        return HandlerTally(
            {outcome: self.counts[outcome] + other.counts[outcome] for outcome in OUTCOMES},
            self.archived + other.archived,
            self.handler_time + other.handler_time,
            self.outbox_time + other.outbox_time,
        )
