"""How the handlers of one worker share what there is little of: threads, or database sessions. Pure: no I/O.

A handler that holds none is never kept waiting by one that holds many: of the sessions the last one is kept for such
handlers, and threads, which are cheap, exceed their number by one for each of them.
"""

import time
from collections import Counter


class Shares:
    """Counts who holds how many of `size`.

    `reserve` of them are only for handlers that hold none; with `overflow` each of those may have one beyond the size.
    """

    def __init__(self, size: int, *, reserve: int = 0, overflow: bool = False) -> None:
        self._size = size
        self._reserve = reserve
        self._overflow = overflow
        self._held: Counter[str] = Counter()
        self._taken = 0
        self._overrun = 0
        self.changed_at = time.monotonic()

    @property
    def spent(self) -> bool:
        """Whether a handler that holds some cannot have more."""
        return self._left <= self._reserve

    @property
    def _left(self) -> int:
        # As many again take the place of those that hang.
        return self._size + min(self._overrun, self._size) - self._taken

    def held(self, handler: str) -> int:
        return self._held[handler]

    def free(self, handler: str) -> int:
        """How many more the handler may take now."""
        if self._held[handler]:
            return max(self._left - self._reserve, 0)
        return max(self._left, 1 if self._overflow else 0)

    def take(self, handler: str) -> None:
        self._held[handler] += 1
        self._taken += 1
        self.changed_at = time.monotonic()

    def give(self, handler: str) -> None:
        self._held[handler] -= 1
        self._taken -= 1
        self.changed_at = time.monotonic()

    def overrun(self, change: int) -> None:
        """Note that so many more, or fewer, are held by handlers that are past their time limit."""
        self._overrun += change
