"""The deliveries of one handler in a worker: those that wait, how many run, and how many more to claim. No I/O."""

import time
from collections import deque
from collections.abc import Sequence

from holdfast.handlers import Handler
from holdfast.postgres.delivery import Delivery
from holdfast.settings import WorkerSettings
from holdfast.worker.auto_concurrency import START
from holdfast.worker.shares import Shares

# A queue holds what its handler finishes in this time, so that a slow worker leaves the rest to others.
_BUFFER_SECONDS = 0.25
# The payloads that wait for one handler have about so many characters together.
_BUFFER_SIZE = 8 * 1024 * 1024
# And those of one claim: all handlers wait for it, and it is in memory several times while it is read.
_CLAIM_SIZE = 1024 * 1024
# More run at once than a worker starts with only if their payloads have at most so many characters together.
_RUNNING_SIZE = 32 * 1024 * 1024
# What a payload has before the first claim has shown it: a few rows are claimed, and then as many as fit.
_UNKNOWN_SIZE = 128 * 1024
# A queue that will have room within this time is worth waiting for.
_SOON = 0.05
_RELAYED_AT_ONCE = 2
# The pace of a handler is judged after this time; the first time, when so many deliveries have ended.
_RATED_AFTER = 0.05
_RATED_BY = 50
# Of a handler that has had nothing to do for this time, the pace is unknown.
_FORGOTTEN_AFTER = 1.0


class HandlerQueue:
    """What one handler has to do in this worker. `shares` are the threads or sessions it needs, if it needs any.

    A runner takes `size` deliveries at a time. More than one are gathered, for at most `within` seconds. An
    `adjustable` queue runs START of them at once at first, and at most `concurrency`.
    """

    __slots__ = (
        "_concurrency",
        "_idle_since",
        "_limit",
        "_portion",
        "_rate",
        "_rated",
        "_rated_at",
        "_running",
        "_weight",
        "adjustable",
        "finished",
        "fresh",
        "gathers",
        "handled",
        "handler",
        "hurried",
        "most",
        "ripening",
        "shares",
        "size",
        "waiting",
        "within",
    )  # fmt: skip

    def __init__(
        self,
        handler: Handler,
        concurrency: int,
        shares: Shares | None,
        size: int = 1,
        within: float = 0.0,
        *,
        adjustable: bool = False,
    ) -> None:
        self.handler = handler
        self.size, self.within = size, within
        self.gathers = size > 1
        self.hurried = False  # nothing is worth waiting for
        self.ripening = False  # a runner is started when the queue has gathered for long enough
        self._portion = size  # deliveries that are taken at once, of payloads that fit into memory
        self.shares = shares
        self.waiting: deque[Delivery] = deque()
        self.fresh = False  # a runner was started and has not begun
        self.finished = 0  # deliveries, however they ended
        self.handled = 0  # of those that run one by one, outside a transaction: with success
        self.adjustable, self.most = adjustable, concurrency
        self._limit = min(concurrency, START) if adjustable else concurrency
        self._concurrency = max(1, self._limit // size)  # of runners; the limit counts deliveries
        self._running = 0
        self._rate = 0.0
        self._rated, self._rated_at = 0, time.monotonic()
        self._idle_since: float | None = self._rated_at  # since when it has had nothing to do
        self._weight = 0.0  # characters of a payload, on average of the last claims; 0 before the first

    def take(self) -> None:
        """Count one more runner."""
        self._running += 1
        if self.shares is not None:
            self.shares.take(self.handler.name)

    def give(self) -> None:
        self._running -= 1
        if not self._running and not self.waiting:
            self._idle_since = time.monotonic()
        if self.shares is not None:
            self.shares.give(self.handler.name)

    @property
    def running(self) -> int:
        """How many runners there are."""
        return self._running

    @property
    def free(self) -> int:
        """How many more runners the handler may have now."""
        free = max(0, self._concurrency - self._running)
        return free if self.shares is None else min(free, self.shares.free(self.handler.name))

    @property
    def surplus(self) -> bool:
        """Whether there are more runners than there may be by now."""
        return self._running > self._concurrency

    def is_full(self, limit: int) -> bool:
        """Whether as many run as may, and that is because of this limit."""
        return self._running >= self._concurrency == limit

    def adjust(self, limit: int) -> None:
        """Run at most so many deliveries at once, from now on."""
        if self.adjustable:
            self._limit = limit
            fitting = max(START, int(_RUNNING_SIZE / self._weight)) if self._weight else START
            self._concurrency = min(limit, self.most, fitting)

    def feed(self, deliveries: list[Delivery]) -> None:
        """Add deliveries that were claimed."""
        if self._idle_since is not None:
            # The time without anything to do says nothing about the pace: a burst would be claimed in small portions.
            self._rated_at += time.monotonic() - self._idle_since
            self._idle_since = None
        self.weigh(deliveries)
        self.waiting.extend(deliveries)

    def weigh(self, deliveries: list[Delivery]) -> None:
        """Learn the size of payloads from a claim."""
        size = sum(len(each.payload or "") for each in deliveries) / len(deliveries)
        self._weight = max(self._weight / 2, 1.0, size)
        self._portion = min(self.size, int(_BUFFER_SIZE / self._weight) + 1)
        self.adjust(self._limit)

    def ripe_in(self) -> float:
        """In how many seconds a batch begins; 0 when it has gathered enough, or for long enough."""
        if self.hurried or len(self.waiting) >= self._portion:
            return 0.0
        return self.waiting[0].claimed_at + self.within - time.monotonic()

    def next(self) -> list[Delivery]:
        """Take the deliveries that a runner runs next: one, or a batch."""
        waiting = self.waiting
        if not self.gathers:
            return [waiting.popleft()]
        self.hurried = False
        return [waiting.popleft() for _ in range(min(len(waiting), self._portion))]

    def room(self, batch: int, *, ahead: bool = True) -> int:
        """How many rows to claim: for the idle runners, and, if ahead, for those that will be idle a moment later."""
        now = time.monotonic()
        if self._idle_since is None and not self._running and not self.waiting:
            self._idle_since = now  # what waited was given back, and nothing ran
        if self._idle_since is not None and now - self._idle_since > _FORGOTTEN_AFTER:
            # What comes next may be slow, and another worker may have time for it.
            self._rate, self._rated, self._rated_at = 0.0, self.finished, self._idle_since
        elapsed = (now if self._idle_since is None else self._idle_since) - self._rated_at
        finished = self.finished - self._rated
        if elapsed > _RATED_AFTER or (finished >= _RATED_BY and not self._rate):
            self._rate += 0.5 * (finished / max(elapsed, 0.001) - self._rate)
            self._rated_at += elapsed
            self._rated = self.finished
        weight = self._weight or _UNKNOWN_SIZE
        most = int(_BUFFER_SIZE / weight) + 1
        later = min(int(self._rate * _BUFFER_SECONDS), 2 * batch) if ahead else 0
        target = min(self.free * self.size + later, most)
        wanted = target - len(self.waiting)
        # No small claims while there still is plenty: whole batches, if more than one of them is kept ready.
        least = batch if target >= 2 * batch else max(1, min(batch, target) // 2)
        if self.gathers and len(self.waiting) < self._portion and self.free > 0:
            least = 1  # of a batch that is gathering, whatever is left
        if self.waiting and wanted < least:
            return 0
        return min(wanted, batch, int(_CLAIM_SIZE / weight) + 1)

    @property
    def soon(self) -> bool:
        """Whether there will be room in a moment, at the pace of late."""
        return len(self.waiting) < self._rate * _SOON * 2 + 1 if self._rate else False


def queues_of(handlers: Sequence[Handler], settings: WorkerSettings) -> dict[str, HandlerQueue]:
    """Return a queue for each handler, by its name."""
    in_threads = sum(not (handler.asynchronous or handler.transactional) for handler in handlers)
    threads = Shares(settings.threads, handlers=in_threads, overflow=True)
    sessions = Shares(settings.connections, handlers=sum(handler.transactional for handler in handlers))

    def shares(handler: Handler) -> Shares | None:
        if handler.transactional:
            return sessions
        return None if handler.asynchronous else threads

    def queue(handler: Handler) -> HandlerQueue:
        auto = settings.concurrency == "auto"
        batch, most = handler.batch, min(handler.concurrency or settings.most_at_once, settings.most_at_once)
        if handler.raw and batch is not None:
            # A relay: while a batch waits for the broker, the next is rendered.
            return HandlerQueue(
                handler, _RELAYED_AT_ONCE * batch.size, None, min(batch.size, settings.batch), batch.within
            )
        if batch is None and auto and shares(handler) is None:
            return HandlerQueue(handler, most, None, adjustable=True)
        if batch is None:
            return HandlerQueue(handler, most, shares(handler))
        if auto:
            most = min(most, START)
        # A transaction settles what it has handled. What waits to be settled otherwise is bounded.
        size = batch.size if handler.transactional else min(batch.size, settings.batch)
        return HandlerQueue(handler, most, shares(handler), min(size, handler.concurrency or size), batch.within)

    return {handler.name: queue(handler) for handler in handlers}
