"""The database's clock, compared with a clock of this machine that is never set."""

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

# A smaller difference is drift, or a server that took its time to answer.
SMALLEST_STEP = 1.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def steady() -> float:
    """Seconds on a clock that is never set, and that goes on while the machine is suspended where it can."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class DatabaseClock:
    """Reckons the time of the database, and notices when it is set. Threads share it.

    `steps` has the steps that are still to be reported.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._lock = threading.Lock()
        self._offset: tuple[float, float] | None = None  # the database's time at steady() = 0: earliest, latest
        self._observed_at = float("-inf")
        self._before: tuple[float, float] | None = None  # the offset before a step forward, and until when it counts
        self.steps: deque[float] = deque(maxlen=100)
        self._on_step: Callable[[], object] = lambda: None

    def when_set(self, call: Callable[[], object]) -> None:
        """Have this called for each step, in the thread that observes it."""
        self._on_step = call

    def observe(self, there: datetime, asked: float, answered: float, longest_lease: float = 0.0) -> None:
        """Compare with what the database answered between two moments of `steady`."""
        time_there = (there - _EPOCH).total_seconds()
        earliest, latest = time_there - answered, time_there - asked
        with self._lock:
            if asked < self._observed_at:
                return  # another loop has looked since
            self._observed_at = answered
            known, self._offset = self._offset, (earliest, latest)
            if known is None or (earliest - SMALLEST_STEP <= known[1] and known[0] <= latest + SMALLEST_STEP):
                return
            if earliest > known[1]:
                lowest = known[0] if self._before is None else min(known[0], self._before[0])
                self._before = lowest, answered + max(self._lease, longest_lease)
            self.steps.append((earliest + latest) / 2 - sum(known) / 2)
        self._on_step()

    def now(self) -> float:
        """The database's time, in seconds since 1970, to within a round trip; while it is unknown, this machine's."""
        offset = self._offset
        return time.time() if offset is None else sum(offset) / 2 + steady()

    def ended_before(self) -> datetime | None:
        """The time before which a lease must end to count as expired; None while nothing is known.

        Within a lease time after a step forward it is reckoned from before the step: living holders, who extend their
        leases several times in it, must not lose them.
        """
        now = steady()
        with self._lock:
            if self._offset is None:
                return None
            offset, _ = self._offset
            if self._before is not None:
                before, until = self._before
                if now < until:
                    offset = min(offset, before)
                else:
                    self._before = None
        return _EPOCH + timedelta(seconds=offset + now)
