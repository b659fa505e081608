"""Reads the roll-up: what handlers did in the last minutes, one handler's series, and whether the counts add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from holdfast.handler_tally import BUCKETS, OUTCOMES, HandlerTally, Histogram
from holdfast.postgres.operations.excerpt import Excerpt

if TYPE_CHECKING:
    from holdfast.postgres.operations.connection import Statements

# Lines of the roll-up that one series is made of: two weeks of hours and a day of minutes, of several generations.
_MOST_LINES = 20_000


@dataclass(frozen=True, slots=True)
class HandlerRates:
    """What one handler did within the last seconds."""

    handler_name: str
    seconds: float
    tally: HandlerTally

    @property
    def handled(self) -> float:
        """Deliveries handled with success in a second."""
        return self.tally.counts["delivered"] / self.seconds


@dataclass(frozen=True, slots=True)
class Period:
    """What one handler did in a minute, or in an hour of a day ago or before."""

    start: datetime
    seconds: int
    tally: HandlerTally


@dataclass(frozen=True, slots=True)
class Flow:
    """What all handlers did in one step of time, and how long after they were due their attempts had ended."""

    start: datetime
    delivered: int
    failed_attempts: int
    failed: int  # of them, for good
    within_100_ms: int
    within_1_s: int
    within_10_s: int
    longer: int


@dataclass(frozen=True, slots=True)
class Balance:
    """Everything that is counted and kept. Of what was begun, each delivery is open or was closed by one outcome."""

    begun: int
    delivered: int
    duplicate: int
    failed: int
    expired: int
    cancelled: int
    open: int  # rows that have been claimed and are not settled

    @property
    def difference(self) -> int:
        """How many were begun and are neither closed nor open; below zero: were closed without having been begun."""
        closed = self.delivered + self.duplicate + self.failed + self.expired + self.cancelled
        return self.begun - closed - self.open


@dataclass(frozen=True, slots=True)
class Signals:
    """Signs that an installation outgrows its shape."""

    outbox_rows: int | None  # as the server's statistics estimate it; None: not known yet
    failures: int  # within the last seven days
    outbox_p99: float | None  # seconds, of a week; None: not known for a week
    partitioned: bool = False  # whether the outbox is, by time


@dataclass(frozen=True, slots=True)
class RollupLag:
    """How far folding the journal into the roll-up is behind. Of a large journal it has the beginning."""

    lines: int  # of the journal; 100000: or more
    seconds: float  # the age of the oldest line
    bytes: int

    @property
    def is_behind(self) -> bool:
        """Whether rates are incomplete: workers fold every ten seconds."""
        return self.seconds > 300 or self.lines >= 100_000


async def rates(statements: Statements, minutes: int, most: int, handler: str | None = None) -> Excerpt[HandlerRates]:
    """Return what handlers did in so many whole minutes and the current one: those that did most."""
    rows = await statements.fetch("read_rates", minutes=timedelta(minutes=minutes), most=most, handler=handler)
    found = (HandlerRates(row["handler_name"], row["seconds"], _tally(row)) for row in rows)
    return Excerpt(found, rows[0]["total"] if rows else 0)


async def series(statements: Statements, handler: str, since: timedelta) -> list[Period]:
    """Return one handler's periods, the oldest first. What it did nothing in is left out."""
    rows = await statements.fetch("read_series", handler=handler, since=since, most=_MOST_LINES)
    periods: dict[tuple[datetime, bool], HandlerTally] = {}
    for row in rows:
        key = row["period_start"], row["hourly"]
        periods[key] = periods[key] + _tally(row) if key in periods else _tally(row)
    return [Period(start, 3600 if hourly else 60, tally) for (start, hourly), tally in periods.items()]


async def flow(statements: Statements, since: timedelta, step: timedelta) -> list[Flow]:
    """Return what all handlers did in each step, the oldest first. Steps without anything are left out."""
    return [Flow(**row) for row in await statements.fetch("read_flow", since=since, step=step)]


async def failing(statements: Statements, most: int) -> dict[str, dict[datetime, int]]:
    """Return how many deliveries have failed in each hour of a day, for the handlers that failed most."""
    found: dict[str, dict[datetime, int]] = {}
    for row in await statements.fetch("read_failing", most=most):
        found.setdefault(row["handler_name"], {})[row["start"]] = row["failed"]
    return found


async def balance(statements: Statements) -> Balance:
    """Return the sums of everything."""
    return Balance(**await statements.row("read_balance"))


async def signals(statements: Statements) -> Signals:
    """Return the signals of growth."""
    return signals_of(await statements.row("read_signals"))


def signals_of(row: Mapping[str, Any]) -> Signals:
    """Return the signals that `read_signals` has found."""
    week = _histogram(row["outbox_buckets"], 0.0) if row["is_a_week"] else Histogram()
    return Signals(row["outbox_rows"], row["failures"], week.quantile(0.99), bool(row["partitioned"]))


def _tally(row: Mapping[str, Any]) -> HandlerTally:
    return HandlerTally(
        {outcome: row[outcome] for outcome in OUTCOMES},
        row["archived"],
        _histogram(row["handler_buckets"], row["handler_seconds"]),
        _histogram(row["outbox_buckets"], row["outbox_seconds"]),
    )


def _histogram(buckets: list[int], seconds: float) -> Histogram:
    return Histogram(tuple(buckets), seconds) if len(buckets) == BUCKETS else Histogram()
