"""How the handlers of one worker share what there is little of: threads, or database sessions. Pure: no I/O.

Quick handlers share `size` of them, and slow ones as many of their own: a slow handler can use all that there is, and
takes nothing that its quick neighbours need. A handler is slow while it holds most of what it has for long, or did so
of late. Before its first delivery has ended it holds one at a time. So does one that mostly fails, while others hold
some, and it rests after each failure: what all of those cost together, in processor time too, is a small part of what
there is.
"""

import time
from dataclasses import dataclass

# Held for longer than this is long; where even the quickest handler needs a while, because the database commits slowly,
# a few times as long as that one, within bounds.
_LONG, _AT_MOST = 0.1, 0.5
_TIMES = 3
# The longest time that counts, and the weight of the latest delivery in the averages of a handler.
_LONGEST = 1.0
_WEIGHT = 0.25
# A handler that mostly fails rests for so many times as long as it held one, within bounds, and the longer the more
# handlers fail.
_RESTS = 3
# After the server has refused a session beyond `size`, none is asked for during this time.
_REFUSED = 60.0


@dataclass(slots=True)
class _Share:
    """What one handler holds."""

    held: int = 0
    long: int = 0  # of those
    average: float | None = None  # seconds; None before the first delivery has ended
    failures: float = 0.0  # of late, as a part of all its deliveries
    slow: bool = False
    fails: bool = False
    rests_until: float = 0.0
    counted: int = 0  # among what the slow hold
    wasted: int = 0  # among what is held by quick handlers that fail
    unknown: int = 0  # among what is held by handlers of which no delivery has ended


class Shares:
    """Counts who holds how many of `size`, and of as many again if `handlers` share them.

    With `overflow` a handler that holds none may always have one.
    """

    def __init__(self, size: int, *, handlers: int = 2, overflow: bool = False) -> None:
        self._size = size
        self._several = handlers > 1
        self._overflow = overflow
        self._kept = 0 if overflow or size == 1 or not self._several else 1  # for handlers that hold none
        self._shares: dict[str, _Share] = {}
        self._taken = 0
        self._slow = 0  # held by slow handlers, or for long
        self._wasted = 0  # held by quick handlers that fail
        self._failing = 0  # handlers that fail
        self._unknown = 0  # held by handlers of which no delivery has ended: they may turn out to be slow
        self._overrun = 0
        self._refused_until = 0.0
        self.long = _LONG  # seconds
        self.changed_at = time.monotonic()

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def spent(self) -> bool:
        """Whether slow handlers hold all that they may."""
        return self._slow >= self._slow_size - self._kept

    @property
    def _slow_size(self) -> int:
        # As many again take the place of those that hang.
        return self._size + min(self._overrun, self._size)

    def held(self, handler: str) -> int:
        return self._share(handler).held

    def free(self, handler: str) -> int:
        """How many more the handler may take now."""
        share, size = self._share(handler), self._slow_size
        if not self._several:
            free = size - self._taken
        else:
            kept = self._kept if share.held else 0
            beyond = size + max(self._size // 2, 1)  # for slow handlers that hold none, from what is for the quick
            if share.slow:
                free = (size - kept - self._unknown if share.held else beyond) - self._slow
            else:
                free = self._size - kept - (self._taken - self._slow)
                if share.average is None:
                    free = min(free, 1 - share.held, beyond - self._slow)
                elif share.fails and self._taken - self._slow - self._wasted:
                    free = min(free, 0 if _rests(share) else 1 - share.held)
            free = min(free, size - share.held, size + self._extra - kept - self._taken)
        return max(free, 1 if self._overflow and not share.held else 0)

    def rivals(self, handler: str, other: str) -> bool:
        """Whether what the handler gives back may be what the other one waits for."""
        waits = self._share(other)
        return self._share(handler).slow == waits.slow and not (waits.fails and (waits.held or _rests(waits)))

    def take(self, handler: str) -> None:
        share = self._share(handler)
        share.held += 1
        self._taken += 1
        self._count(share)
        self.changed_at = time.monotonic()

    def give(self, handler: str) -> None:
        share = self._share(handler)
        share.held -= 1
        self._taken -= 1
        self._count(share)
        self.changed_at = time.monotonic()

    def linger(self, handler: str) -> None:
        """Note that the handler holds one more for long."""
        share = self._share(handler)
        share.long += 1
        if 2 * share.long > share.held:
            # It stays slow when it takes more, until some deliveries have ended quickly.
            share.average = _LONGEST
        self._count(share)

    def ended(self, handler: str, seconds: float, lingered: bool, failed: bool) -> None:
        """Note how long a delivery of the handler held one, whether that was noted before, and whether it failed."""
        share = self._share(handler)
        share.long -= lingered
        seconds = min(seconds, _LONGEST)
        share.average = seconds if share.average is None else share.average + _WEIGHT * (seconds - share.average)
        share.failures += _WEIGHT * (failed - share.failures)
        self._count(share)
        if share.fails:
            share.rests_until = time.monotonic() + min(min(_RESTS * seconds, _LONG) * self._failing, _LONGEST)

    def learn(self) -> None:
        """Learn from the quickest handler how long is long."""
        quickest = min((share.average for share in self._shares.values() if share.average is not None), default=0.0)
        self.long = min(max(_LONG, _TIMES * quickest), _AT_MOST)
        for share in self._shares.values():
            self._count(share)

    def overrun(self, change: int) -> None:
        """Note that so many more, or fewer, are held by handlers that are past their time limit."""
        self._overrun += change

    def refused(self) -> None:
        """Note that there cannot be more than `size` now."""
        self._refused_until = time.monotonic() + _REFUSED

    @property
    def _extra(self) -> int:
        """How many there may be beside those of the quick, or of the slow."""
        return 0 if self._refused_until and time.monotonic() < self._refused_until else self._size

    def _share(self, handler: str) -> _Share:
        share = self._shares.get(handler)
        if share is None:
            share = self._shares[handler] = _Share()
        return share

    def _count(self, share: _Share) -> None:
        share.slow = (share.average or 0.0) > self.long
        counted = share.held if share.slow else share.long
        self._slow += counted - share.counted
        share.counted = counted
        fails = share.failures > 0.5
        self._failing += fails - share.fails
        share.fails = fails
        wasted = share.held - counted if share.fails else 0
        self._wasted += wasted - share.wasted
        share.wasted = wasted
        unknown = share.held if share.average is None else 0
        self._unknown += unknown - share.unknown
        share.unknown = unknown


def _rests(share: _Share) -> bool:
    return time.monotonic() < share.rests_until
