"""Time limits of steps that wait for the database: many at once, and hardly ever reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from math import inf
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """A block that may take so many seconds, after which `cut` is called. A generator would cost each request more."""

    __slots__ = ("_context", "_cut", "_seconds", "_watch", "at")

    def __init__(self, seconds: float, cut: Callable[[], None]) -> None:
        self._seconds = seconds
        self._cut = cut

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        watch = _WATCHES.get(loop) or _watch_of(loop)
        self._context = copy_context()
        self.at = loop.time() + self._seconds
        self._watch = watch
        watch.add(self, loop)

    def __exit__(self, *error: object) -> None:
        self._watch.running.discard(self)

    def cut(self) -> None:
        """Cut the block, with the context variables that it has: the timer is everybody's."""
        self._context.run(self._cut)


class _Watch:
    """One timer for all deadlines of a loop.

    A timer for each would cost more than the deadline: for every timer that is cancelled, uvloop asks the system once
    more. So it is never cancelled: it rings, cuts what is overdue, and is set again for what still runs.
    """

    __slots__ = ("_nobodys", "_rings_at", "running")

    def __init__(self) -> None:
        self.running: set[Deadline] = set()
        self._nobodys = Context()  # the timer must neither know nor keep anything of the request that sets it
        self._rings_at = inf

    def add(self, deadline: Deadline, loop: asyncio.AbstractEventLoop) -> None:
        self.running.add(deadline)
        if deadline.at < self._rings_at:
            self._set_timer(deadline.at, loop)

    def _set_timer(self, at: float, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_at(at, self._ring, at, context=self._nobodys)
        self._rings_at = at

    def _ring(self, at: float) -> None:
        if at != self._rings_at:
            return  # an earlier one was set in its place
        self._rings_at = inf
        loop = asyncio.get_running_loop()
        over = [each for each in self.running if each.at <= at]
        self.running.difference_update(over)
        if self.running:
            self._set_timer(min(each.at for each in self.running), loop)
        for deadline in over:
            try:
                deadline.cut()
            except Exception as error:
                loop.call_exception_handler({"message": "a connection could not be cut", "exception": error})


_WATCHES: dict[asyncio.AbstractEventLoop, _Watch] = {}


def _watch_of(loop: asyncio.AbstractEventLoop) -> _Watch:
    for each in [each for each in tuple(_WATCHES) if each.is_closed()]:
        _WATCHES.pop(each, None)
    return _WATCHES.setdefault(loop, _Watch())


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Await the work for at most so many seconds, without a timer of its own."""
    async with asyncio.timeout(None) as limit:
        with Deadline(seconds, lambda: limit.reschedule(0)):  # a moment that is over: at once
            return await work
