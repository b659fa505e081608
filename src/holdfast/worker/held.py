"""Remembers which handlers the database holds back, and until when a worker need not ask for their events. No I/O."""

import math
import random
import time
from collections.abc import Callable, Iterable

from holdfast.postgres.delivery import Delivery
from holdfast.postgres.flow import Wait

# A place may come free at any moment in this worker; in others, when the time is over.
_FREED = ("concurrency", "ramp")
# A limit that held a handler back within this time is one that binds.
_BINDS = 5.0
# What is held back for longer, or without anything coming in between, is nothing that a drain waits for.
_PASSING = 5.0
_PATIENCE = 10.0
# Workers that wait for the same thing do not come back together.
_JITTER = 0.2


class Held:
    """The handlers that are held back, and until when. The claimer adds them; settling frees a place."""

    def __init__(self) -> None:
        self.limited: frozenset[str] = frozenset()  # handlers that have a limit or a breaker, or are paused
        self._waits: dict[str, tuple[Wait, float]] = {}  # and when they are over
        self._bound_at: dict[str, float] = {}
        self._since: dict[str, float] = {}  # when they were first held back, since something came of them
        self._on_free: Callable[[], None] = lambda: None
        self.spends_time = True  # a drain waits for what a rate allows before long; a test moves the clock instead

    def when_free(self, call: Callable[[], None]) -> None:
        """Register a function to call when a handler that was held back has a free place in this worker."""
        self._on_free = call

    def note(self, waits: Iterable[Wait]) -> None:
        """Hold handlers back for as long as the database says."""
        now = time.monotonic()
        for wait in waits:
            seconds = math.inf if wait.seconds is None else wait.seconds * (1 + random.uniform(0, _JITTER))
            self._waits[wait.handler] = wait, now + seconds
            self._bound_at[wait.handler] = now
            self._since.setdefault(wait.handler, now)

    def came(self, handlers: Iterable[str]) -> None:
        """Note that events of the handlers were claimed."""
        if self._since:
            for handler in handlers:
                self._since.pop(handler, None)

    def clear(self) -> None:
        """Forget all handlers that are held back, so that the next claim asks for all."""
        self._waits.clear()

    def holds(self, handler: str) -> bool:
        """Return whether a handler is held back now."""
        if not self._waits or handler not in self._waits:
            return False
        if self._waits[handler][1] > time.monotonic():
            return True
        del self._waits[handler]
        return False

    def binds(self, handler: str) -> bool:
        """Return whether a handler was held back lately; nothing is claimed ahead for such a handler."""
        bound_at = self._bound_at.get(handler) if self._bound_at else None
        return bound_at is not None and time.monotonic() - bound_at < _BINDS

    def is_open(self, handler: str) -> bool:
        """Return whether the breaker of a handler was open when the database was last asked."""
        found = self._waits.get(handler)
        return found is not None and found[0].cause == "open"

    def freed(self, settled: Iterable[Delivery]) -> None:
        """Note that deliveries are in flight no longer."""
        if not self._waits:
            return
        for name in {each.handler.name for each in settled}:
            if name in self._waits and self._waits[name][0].cause in _FREED:
                del self._waits[name]
                self._on_free()

    @property
    def passing(self) -> bool:
        """Return whether a handler is held back that goes on soon by itself: not by a pause or an outage."""
        now = time.monotonic()
        lasting = ("paused", "open") if self.spends_time else ("paused", "open", "rate")
        return any(
            until > now
            and wait.cause not in lasting
            and (wait.seconds or 0.0) <= _PASSING
            and now - self._since.get(name, now) < _PATIENCE
            for name, (wait, until) in self._waits.items()
        )

    def timed(self) -> dict[str, float]:
        """Return the handlers that only time holds back, with the seconds by the database's clock."""
        return {
            name: wait.seconds
            for name, (wait, _) in self._waits.items()
            if wait.cause in ("rate", "open") and wait.seconds is not None
        }

    def timeout(self, most: float) -> float:
        """Seconds until the first of them may be asked for again, at most so many."""
        if not self._waits:
            return most
        first = min(until for _, until in self._waits.values())
        return min(most, max(first - time.monotonic(), 0.001))
