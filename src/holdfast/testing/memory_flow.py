"""Rates and breakers of an outbox in memory: how many rows of a handler may begin, and how failures count.

The rules are those of `flow.sql` and `breaker.sql`, for one worker that runs one handler after the other. So there is
no ramp, and waits have no jitter: a test finds the same times whenever it runs.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from holdfast.flow import Pause
from holdfast.handlers import Handler
from holdfast.postgres.flow import FalterVerdict
from holdfast.testing.memory_rows import Row
from holdfast.worker.settlements import Falter, Retry, Settlement, Snooze

_MOST_DOUBLINGS = 20
_MOST_LAST_CHANCES = 99


class Bucket:
    """The tokens of a handler with a rate: a quarter of a second's worth, and one at least."""

    def __init__(self, rate: float, now: datetime) -> None:
        self._rate, self._size = rate, max(1.0, rate / 4)
        self._tokens, self._at = self._size, now

    def allowance(self, now: datetime) -> int:
        """Return how many may begin now."""
        self._tokens = min(self._size, self._tokens + self._rate * max(0.0, (now - self._at).total_seconds()))
        self._at = now
        return int(self._tokens + 1e-6)

    def take(self, count: int) -> None:
        """Note that so many have begun."""
        self._tokens -= count

    def ready_at(self, now: datetime) -> datetime:
        """Return when the next one may begin."""
        self.allowance(now)
        return now + timedelta(seconds=max(0.0, 1 - self._tokens) / self._rate)


class Breaker:
    """The breaker of one handler."""

    def __init__(self, pause: Pause) -> None:
        self._pause = pause
        self._failing: list[Row] = []  # in a row, the same one several times
        self._last_chances: list[Row] = []
        self._failed_probes = 0
        self._probe: Row | None = None
        self.probe_at: datetime | None = None  # while it is open

    def allowance(self, now: datetime) -> int | None:
        """Return how many may begin now: any number while it is closed."""
        return None if self.probe_at is None else int(self.probe_at <= now)

    def begin(self, row: Row, now: datetime) -> None:
        """Note which row probes. If it tells nothing, for instance if it is rejected, another may probe later."""
        if self.probe_at is not None:
            self._probe, self.probe_at = row, now + self._wait

    def succeeded(self, row: Row) -> None:
        """Close the breaker if the row was a probe; otherwise begin the count of failures anew."""
        if self.probe_at is None:
            self._failing = []
        elif row is self._probe:
            self.probe_at, self._probe, self._failed_probes = None, None, 0

    def failed(self, row: Row, now: datetime, *, last: bool) -> FalterVerdict:
        """Return how a transient failure is settled; `last` says that the row has no attempts left."""
        if self.probe_at is not None:
            if row is self._probe:
                self._failed_probes += 1
                self.probe_at, self._probe = now + self._wait, None
            return "hold"
        self._failing = [*self._failing, row][-self._pause.after :]
        others = any(each is not row for each in self._failing)
        if len(self._failing) >= self._pause.after and (others or self._pause.after == 1):
            self._open(row, now)
            return "hold"
        if not last:
            return "retry"
        if not others:
            if row in self._last_chances:
                self._last_chances.remove(row)
                return "fail"
            self._last_chances = [*self._last_chances, row][-_MOST_LAST_CHANCES:]
        return "hold"

    def _open(self, row: Row, now: datetime) -> None:
        self.probe_at = now + self._wait
        for each in self._failing:
            if each is not row and each.status == "pending":
                each.attempts = max(each.attempts - 1, 0)
                each.first_failed_at = each.first_failed_at if each.attempts else None
                each.available_at = min(each.available_at, self.probe_at)
        # The row's own last failure is given back where the row is settled.
        row.attempts = max(row.attempts - sum(each is row for each in self._failing) + 1, 1)
        self._failing = []

    @property
    def _wait(self) -> timedelta:
        doubled = self._pause.first_probe * 2.0 ** min(self._failed_probes, _MOST_DOUBLINGS)
        return timedelta(seconds=min(self._pause.longest_wait, doubled))


class MemoryFlow:
    """The rates and breakers of all handlers."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}
        self._breakers: dict[str, Breaker] = {}

    def allowance(self, handler: Handler, now: datetime) -> int:
        """Return how many rows of a handler may begin together now."""
        size = 1 if handler.batch is None else handler.batch.size
        bucket, breaker = self._bucket(handler, now), self._breaker(handler)
        limits = (
            size,
            handler.concurrency,
            handler.fleet_concurrency,
            None if bucket is None else bucket.allowance(now),
            None if breaker is None else breaker.allowance(now),
        )
        return min(each for each in limits if each is not None)

    def begin(self, handler: Handler, rows: list[Row], now: datetime) -> list[Row]:
        """Return the rows that may begin, and count them."""
        begun = rows[: self.allowance(handler, now)]
        if begun:
            if (bucket := self._bucket(handler, now)) is not None:
                bucket.take(len(begun))
            if (breaker := self._breaker(handler)) is not None:
                breaker.begin(begun[0], now)
        return begun

    def ready_at(self, handler: Handler, now: datetime) -> datetime:
        """Return when a row of a handler may begin."""
        bucket, breaker = self._bucket(handler, now), self._breaker(handler)
        moments = [now if bucket is None else bucket.ready_at(now)]
        if breaker is not None and breaker.probe_at is not None:
            moments.append(breaker.probe_at)
        return max(moments)

    def succeeded(self, handler: Handler, row: Row) -> None:
        """Note that a row was handled."""
        if (breaker := self._breaker(handler)) is not None:
            breaker.succeeded(row)

    def settlement(self, row: Row, failure: Falter, now: datetime) -> Settlement:
        """Return how the breaker of the row's handler settles a transient failure."""
        breaker = self._breaker(failure.delivery.handler)
        verdict = "retry" if breaker is None else breaker.failed(row, now, last=failure.last)
        if verdict == "fail" and failure.fail is not None:
            return failure.fail
        row.first_failed_at, row.last_error = row.first_failed_at or now, failure.report.stored
        if breaker is None or verdict == "retry":
            return Retry(failure.delivery, failure.delay, failure.report)
        if breaker.probe_at is None:
            return Snooze(failure.delivery, failure.delay)
        row.first_failed_at = row.first_failed_at if row.attempts > 1 else None
        return Snooze(failure.delivery, max(0.0, (breaker.probe_at - now).total_seconds()))

    def _breaker(self, handler: Handler) -> Breaker | None:
        if handler.breaker is None:
            return None
        return self._breakers.setdefault(handler.name, Breaker(handler.breaker))

    def _bucket(self, handler: Handler, now: datetime) -> Bucket | None:
        if handler.rate is None:
            return None
        return self._buckets.setdefault(handler.name, Bucket(handler.rate, now))
