"""The deliveries of one handler in a worker: those that wait, how many run, and how many more to claim. No I/O."""

import time
from collections import deque
from collections.abc import Sequence

from holdfast.handlers import Handler
from holdfast.postgres.delivery import Delivery
from holdfast.settings import WorkerSettings
from holdfast.worker.shares import Shares

# A queue holds what its handler finishes in this time, so that a slow worker leaves the rest to others.
_BUFFER_SECONDS = 0.25
# The payloads that wait for one handler have about so many characters together.
_BUFFER_SIZE = 8 * 1024 * 1024
# A queue that will have room within this time is worth waiting for.
_SOON = 0.05


class HandlerQueue:
    """What one handler has to do in this worker. `shares` are the threads or sessions it needs, if it needs any."""

    __slots__ = (
        "_concurrency",
        "_rate",
        "_rated",
        "_rated_at",
        "_running",
        "_weight",
        "finished",
        "fresh",
        "handler",
        "shares",
        "waiting",
    )  # fmt: skip

    def __init__(self, handler: Handler, concurrency: int, shares: Shares | None) -> None:
        self.handler = handler
        self.shares = shares
        self.waiting: deque[Delivery] = deque()
        self.fresh = False  # a runner was started and has not begun
        self.finished = 0
        self._concurrency = concurrency
        self._running = 0
        self._rate = 0.0
        self._rated, self._rated_at = 0, time.monotonic()
        self._weight = 1.0  # characters of a payload, on average of the last claims

    def take(self) -> None:
        """Count one more runner."""
        self._running += 1
        if self.shares is not None:
            self.shares.take(self.handler.name)

    def give(self) -> None:
        self._running -= 1
        if self.shares is not None:
            self.shares.give(self.handler.name)

    @property
    def free(self) -> int:
        """How many more runners the handler may have now."""
        free = self._concurrency - self._running
        return free if self.shares is None else min(free, self.shares.free(self.handler.name))

    def weigh(self, deliveries: list[Delivery]) -> None:
        """Learn the size of payloads from a claim."""
        size = sum(len(each.payload or "") for each in deliveries) / len(deliveries)
        self._weight = max(self._weight / 2, 1.0, size)

    def room(self, batch: int) -> int:
        """How many rows to claim: for the idle runners, and for those that will be idle a moment later."""
        now = time.monotonic()
        elapsed = now - self._rated_at
        if elapsed > 0.05:
            self._rate += 0.5 * ((self.finished - self._rated) / elapsed - self._rate)
            self._rated_at, self._rated = now, self.finished
        most = int(_BUFFER_SIZE / self._weight) + 1
        ahead = min(int(self._rate * _BUFFER_SECONDS), 2 * batch)
        target = min(self.free + ahead, most)
        wanted = target - len(self.waiting)
        # No small claims while there still is plenty: whole batches, if more than one of them is kept ready.
        least = batch if target >= 2 * batch else max(1, min(batch, target) // 2)
        if self.waiting and wanted < least:
            return 0
        return min(wanted, batch)

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

    return {handler.name: HandlerQueue(handler, settings.concurrency, shares(handler)) for handler in handlers}
