"""Deadlines of blocks that wait for the database, for applications on an event loop: many, and hardly ever reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from math import inf
from types import coroutine
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class Deadline:
    """A block that may take so many seconds, after which `cut` is called. A generator would cost each request more."""

    __slots__ = ("_seconds", "_watch", "at", "cut")

    def __init__(self, seconds: float, cut: Callable[[], None]) -> None:
        self._seconds = seconds
        self.cut = cut

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        watch = _WATCHES.get(loop)
        if watch is None:
            watch = _WATCHES[loop] = _Watch()
        self.at = loop.time() + self._seconds
        self._watch = watch
        watch.add(self, loop)

    def __exit__(self, *error: object) -> None:
        self._watch.running.discard(self)


class _Watch:
    """The deadlines that run on one event loop, with one timer for all.

    To set and cancel a timer costs a request more than the timer itself: for each that was cancelled uvloop asks the
    system once more what there is to do. The timer is never cancelled: a deadline that has ended is not there any more
    when it rings, and it is set again for those that are.
    """

    __slots__ = ("__weakref__", "_rings_at", "running")

    def __init__(self) -> None:
        self.running: set[Deadline] = set()
        self._rings_at = inf

    def add(self, deadline: Deadline, loop: asyncio.AbstractEventLoop) -> None:
        self.running.add(deadline)
        if deadline.at < self._rings_at:
            self._set_timer(deadline.at, loop)

    def _set_timer(self, at: float, loop: asyncio.AbstractEventLoop) -> None:
        self._rings_at = at
        loop.call_at(at, self._ring, at)

    def _ring(self, at: float) -> None:
        if at != self._rings_at:
            return  # an earlier one was set in its place
        self._rings_at = inf
        for deadline in [each for each in self.running if each.at <= at]:
            self.running.discard(deadline)
            deadline.cut()
        if self.running:
            self._set_timer(min(each.at for each in self.running), asyncio.get_running_loop())


_WATCHES: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Await the work for at most so many seconds. Work that ends without a pause, as a pool's that has a connection at
    hand, is spared the timer.
    """
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    async with asyncio.timeout(seconds):
        return await _continued(steps, waits_for)


@coroutine
def _continued(steps: Generator[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Go on with work that waits for the first time."""
    while True:
        try:
            try:
                answer = yield waits_for
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
