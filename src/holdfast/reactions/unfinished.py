"""The events that reactions have accepted and not finished, and those who wait for them. Any thread may use it."""

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError


class Unfinished:
    """Numbers events as they are accepted, and says when all that were accepted before a moment are finished."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accepted = 0
        self._numbers: set[int] = set()
        self._drains: list[tuple[set[int], Future[None]]] = []  # the events each drain still waits for

    def __len__(self) -> int:
        return len(self._numbers)

    def accept(self) -> int:
        """Return the number of a new event."""
        with self._lock:
            self._accepted += 1
            self._numbers.add(self._accepted)
            return self._accepted

    def drained(self) -> Future[None]:
        """Return a future that is done when every event accepted so far is finished."""
        drained: Future[None] = Future()
        with self._lock:
            if self._numbers:
                self._drains.append((set(self._numbers), drained))
            else:
                drained.set_result(None)
        return drained

    def finish(self, number: int) -> None:
        """Note that an event is finished."""
        self._finish({number})

    def abandon(self) -> None:
        """Note that all events are finished, so that no drain waits for one that nobody runs any more."""
        self._finish(set(self._numbers))

    def _finish(self, numbers: set[int]) -> None:
        with self._lock:
            self._numbers -= numbers
            for due, _ in self._drains:
                due -= numbers
            drained = [future for due, future in self._drains if not due]
            self._drains = [each for each in self._drains if each[0]]
        for future in drained:
            with contextlib.suppress(InvalidStateError):  # it is no longer waited for
                future.set_result(None)
