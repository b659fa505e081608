"""Hands facts to observers without waiting for them."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import partial

from holdfast.observability.background import Background
from holdfast.observability.logging import log_fact
from holdfast.observing import ObserverGroup, facts_of, finish_of
from holdfast.telemetry import Fact, Failed, Notice, Observer

# Together with everything else that a stop may wait for, less than five seconds.
_FLUSH_PATIENCE = 0.5


class Observers(ObserverGroup):
    """One observer that hands each fact to all that want it, each in a thread of its own.

    An observer that blocks or raises costs facts, not deliveries: those are counted in `dropped`, and a notice
    `facts_dropped` tells the observer how many once it takes facts again. Failures are dropped last. A notice
    `observer_failed` tells the others of one that raises.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._all: list[Background[Fact]] = []
        super().__init__(observers, self._in_background, log_fact)

    def _in_background(self, observer: Observer) -> Callable[[Fact], object]:
        def consume(fact: Fact) -> None:
            try:
                observer(fact)
            except BaseException as error:
                self.report_failure(observer, type(fact).__name__, error)
                raise

        put_off = finish_of(observer)
        finish = put_off and partial(self._finish, observer, put_off)
        # One thread for each.
        background = Background("holdfast-observer", consume, partial(_tell, observer), finish)
        self._all.append(background)

        def take(fact: Fact) -> None:
            background.put(fact, urgent=isinstance(fact, Failed))

        return take

    def _finish(self, observer: Observer, finish: Callable[[], object]) -> None:
        try:
            finish()
        except BaseException as error:
            self.report_failure(observer, "finish", error)
            raise

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
    if Notice in facts_of(observer):
        observer(Notice("warning", "facts_dropped", {"count": count, "remedy": "make the observer faster, or mend it"}))
