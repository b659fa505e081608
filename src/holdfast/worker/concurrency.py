"""Watches the handlers whose concurrency is "auto", and gives their queues the limits that AutoConcurrency finds."""

import asyncio
import time
from collections.abc import Callable

from holdfast.settings import WorkerSettings
from holdfast.telemetry import Notice, Observer
from holdfast.worker.auto_concurrency import START, AutoConcurrency, Reading
from holdfast.worker.memory import share_left
from holdfast.worker.queues import HandlerQueue
from holdfast.worker.settler import Settler

# Seconds between two looks; shorter while a handler starts, so that its limit is found within a tenth of a second.
_INTERVAL = 0.02
_FIRST_INTERVAL = 0.01
# With more handlers than this a look costs too much for the shorter interval.
_FEW = 100
# Seconds. A statement that settles takes milliseconds: a database that needs longer than this is overloaded.
_SLOW_SETTLE = 1.0
_MEMORY_INTERVAL = 1.0
_LITTLE_MEMORY = 0.05
# Seconds between two reports of one handler, and of any two handlers.
_REPORT_INTERVAL = 60.0
_ANY_REPORT_INTERVAL = 1.0


class _Watched:
    """A handler whose concurrency is "auto": its queue, its limit, and when that was last reported."""

    def __init__(self, queue: HandlerQueue) -> None:
        self.queue = queue
        self.auto = AutoConcurrency(queue.most)
        self.handled = queue.handled
        self.full = True  # at the last look
        self.reported, self.reported_at = self.auto.limit, -_REPORT_INTERVAL

    @property
    def starts(self) -> bool:
        """Whether the next look should come soon: the handler is full, and its limit has only grown so far."""
        return self.full and self.auto.starting

    @property
    def worth_reporting(self) -> bool:
        """Whether the limit has doubled or halved since it was last reported."""
        return 2 * self.auto.limit <= self.reported or self.auto.limit >= 2 * self.reported


class Concurrency:
    """Adjusts how many events each handler of a worker runs at once; it does nothing while no handler runs.

    `when_grown` is called with each queue whose limit has grown.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        settler: Settler,
        observe: Observer,
        when_grown: Callable[[HandlerQueue], None],
    ) -> None:
        self._settings = settings
        self._settler = settler
        self._observe = observe
        self._when_grown = when_grown
        self._known: dict[str, _Watched] = {}
        self._running: dict[str, _Watched] = {}
        self._at = self._computed = 0.0
        self._interval = _INTERVAL
        self._memory_at = self._reported_at = -_REPORT_INTERVAL
        self._little_memory = False

    @property
    def limit(self) -> int:
        """How many events a handler without a limit of its own may run at once: with "auto" the highest number."""
        if self._settings.concurrency != "auto":
            return self._settings.concurrency
        start = min(START, self._settings.most_at_once)
        return max((each.auto.limit for each in self._known.values()), default=start)

    def watch(self, queue: HandlerQueue) -> None:
        """Begin to watch a handler that runs; it is watched until its queue has nothing running."""
        name = queue.handler.name
        if name in self._running:
            return
        watched = self._known.get(name)
        if watched is None:
            watched = self._known[name] = _Watched(queue)
        watched.handled = queue.handled
        self._running[name] = watched
        if len(self._running) == 1:
            self._begin()

    def _begin(self) -> None:
        self._at, self._computed = time.monotonic(), time.thread_time()
        starting = len(self._running) <= _FEW and any(each.starts for each in self._running.values())
        self._interval = _FIRST_INTERVAL if starting else _INTERVAL
        asyncio.get_running_loop().call_later(self._interval, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        seconds = now - self._at
        busy = (time.thread_time() - self._computed) / seconds
        slow_settle, little_memory = self._settler.asking_for > _SLOW_SETTLE, self._is_short_of_memory(now)
        for name, each in tuple(self._running.items()):
            queue, auto = each.queue, each.auto
            before, handled = auto.limit, queue.handled - each.handled
            each.handled = queue.handled
            each.full = queue.is_full(before) and not self._settler.full
            late = seconds - self._interval
            auto.observe(Reading(seconds, handled, each.full, busy, late, slow_settle, little_memory))
            if auto.limit != before:
                queue.adjust(auto.limit)
            if auto.limit > before:
                self._when_grown(queue)
            if each.worth_reporting:
                self._report(each, now)
            if not queue.running:
                del self._running[name]
        if self._running:
            self._begin()

    def _is_short_of_memory(self, now: float) -> bool:
        if now - self._memory_at >= _MEMORY_INTERVAL:
            self._memory_at = now
            left = share_left()
            self._little_memory = left is not None and left < _LITTLE_MEMORY
        return self._little_memory

    def _report(self, watched: _Watched, now: float) -> None:
        """Report the limit of a handler, at most once a minute."""
        if now - watched.reported_at < _REPORT_INTERVAL or now - self._reported_at < _ANY_REPORT_INTERVAL:
            return
        limit = watched.auto.limit
        details: dict[str, object] = {
            "handler_name": watched.queue.handler.name,
            "concurrency": limit,
            "before": watched.reported,
            "because": watched.auto.cause,
        }
        watched.reported, watched.reported_at, self._reported_at = limit, now, now
        self._observe(
            Notice("warning" if limit < min(START, watched.queue.most) else "info", "concurrency_changed", details)
        )
