"""Finds how many events a handler should run at once, from readings of the worker. No I/O and no clock."""

from dataclasses import dataclass
from typing import Final

START: Final = 100
LEAST: Final = 10
# The loop is late when it keeps a timer waiting for longer than this.
LATE: Final = 0.1
# An event loop that computes for more than this share of the time has no use for more events at once.
BUSY: Final = 0.9
_GROWTH: Final = 2
# A higher limit must raise the rate by this factor, or it was in vain: what the handlers wait for is scarce.
_GAIN: Final = 1.1
_SHRINKAGE: Final = 0.75
# A rate is judged when each runner has handled about so many events.
_TURNS: Final = 3
# At the start fewer are enough to grow, so that the first backlog does not wait for a verdict.
_FIRST_TURNS: Final = 1
# Seconds after a shrinkage in which the limit neither shrinks again nor grows.
_RECOVERY: Final = 1.0
_FIRST_REST: Final = 1.0
_LONGEST_REST: Final = 60.0
# A measurement that paused for longer than this many seconds begins anew.
_OLD: Final = 10.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What a worker has measured of one handler, and of itself, since the last reading."""

    seconds: float
    handled: int  # events that were handled with success
    full: bool  # the handler runs as many events as its limit allows
    busy: float = 0.0  # share of the time in which the event loop has computed
    late: float = 0.0  # seconds for which the event loop has kept a timer waiting
    slow_settle: bool = False  # the database takes long to settle
    little_memory: bool = False


class AutoConcurrency:
    """The limit of one handler: it grows while that raises the rate, and shrinks when something is overloaded.

    It grows only while the handler is full and the event loop has time left. `limit` is at most `most`, and at least
    LEAST or `most`, whichever is less. Short memory alone does not take it below START.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._least = min(LEAST, most)
        self.limit = min(START, most)
        self.cause = ""  # of the last change
        self.starting = True  # the limit has only grown so far, and is below `most`
        self._recovering = 0.0  # seconds
        self._resting = 0.0  # seconds
        self._rest = _FIRST_REST
        self._age = 0.0  # seconds since a rate was last measured
        self._begin()

    def observe(self, reading: Reading) -> None:
        """Adjust the limit to a reading."""
        self._recovering = max(0.0, self._recovering - reading.seconds)
        self._resting = max(0.0, self._resting - reading.seconds)
        self._age += reading.seconds
        if reading.late > LATE:
            self._shrink("the event loop was blocked", self._least)
        elif reading.slow_settle:
            self._shrink("the database answers slowly", self._least)
        elif reading.little_memory:
            self._shrink("memory is short", min(START, self._most))
        elif reading.full and reading.busy <= BUSY and not self._recovering:
            self._measure(reading)

    def _shrink(self, cause: str, least: int) -> None:
        self.starting = False
        self._begin()
        if self._recovering:
            return
        self._recovering = _RECOVERY
        if self.limit > least:
            self._change(max(least, int(self.limit * _SHRINKAGE)), cause)

    def _measure(self, reading: Reading) -> None:
        if self._age > _OLD:
            self._begin()
        self._age = 0.0
        self._seconds += reading.seconds
        self._handled += reading.handled
        if self._handled >= (_FIRST_TURNS if self.starting else _TURNS) * self.limit:
            self._judge(self._handled / self._seconds)

    def _judge(self, rate: float) -> None:
        """Grow if the last growth has raised the rate; else take it back, and try again later."""
        before = self._before
        if before is not None and rate < before[1] * _GAIN:
            if self._handled < _TURNS * self.limit:
                return  # too early to say that the growth was in vain
            self.starting = False
            self._resting = self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
            self._change(before[0], "more at once did not handle more")
            self._begin()
            return
        if before is not None:
            self._rest = _FIRST_REST
        grown = min(self._most, self.limit * _GROWTH)
        if grown == self.limit:
            self.starting = False
        if self._resting or grown == self.limit:
            self._begin()
            return
        self._begin((self.limit, rate))
        self._change(grown, "events waited for a place")

    def _begin(self, before: tuple[int, float] | None = None) -> None:
        """Begin to measure a rate; `before` is an earlier limit with its rate, to compare with."""
        self._seconds, self._handled, self._before = 0.0, 0, before

    def _change(self, limit: int, cause: str) -> None:
        self.limit, self.cause = limit, cause
