"""Hands facts to observers without waiting for them."""

import asyncio
import contextlib
from collections.abc import Iterable
from functools import partial

from holdfast.observability.background import Background
from holdfast.telemetry import Fact, Failed, Notice, Observer

# Together with everything else that a stop may wait for, less than five seconds.
_FLUSH_PATIENCE = 0.5


class Observers:
    """One observer that hands each fact to all of them, each in a thread of its own.

    An observer that blocks or raises costs facts, not deliveries: those are counted in `dropped`, and a notice
    `facts_dropped` tells the observer how many once it takes facts again. Failures are dropped last.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._all = [
            Background("holdfast-observer", observer, partial(_tell, observer))  # one thread for each
            for observer in observers
        ]

    def __call__(self, fact: Fact) -> None:
        urgent = isinstance(fact, Failed)
        for each in self._all:
            each.put(fact, urgent=urgent)

    @property
    def dropped(self) -> int:
        """How many facts an observer has not got, summed over the observers."""
        return sum(each.dropped for each in self._all)

    async def flush(self, timeout: float = _FLUSH_PATIENCE) -> None:
        """Wait until the observers have what they were given so far, for a short time."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for each in self._all:
                    reached = asyncio.Event()
                    each.flush(partial(loop.call_soon_threadsafe, reached.set))
                    await reached.wait()


def _tell(observer: Observer, count: int) -> None:
    observer(Notice("warning", "facts_dropped", {"count": count, "remedy": "make the observer faster, or mend it"}))
