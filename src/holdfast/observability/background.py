"""A bounded queue and a daemon thread, for what must never hold up the work that it tells of.

A log that no one reads, a full disk or an observer that hangs then costs items, which are counted, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

from holdfast.observing import lost_with

T = TypeVar("T")

# Of the places in a queue the last ones are kept for urgent items.
MOST: Final = 4_000
RESERVED: Final = 1_000
# How long an item may be put off, in seconds.
FINISH_AFTER: Final = 1.0


def _nothing() -> None: ...


class Background(Generic[T]):
    """Calls `consume` with each item, in their order, in a thread of its own.

    An item that finds no room, or that `consume` raises an error for, is dropped. `resumed` is called, in the thread,
    with the number of items that were dropped, once `consume` has succeeded again and has caught up. `finish` is called
    there within a second or so of an item, and before a `flush` is done: what `consume` has put off is done then. With
    an error, either of them drops one item, or as many as FactsLost says.
    """

    def __init__(
        self,
        name: str,
        consume: Callable[[T], object],
        resumed: Callable[[int], object],
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._name = name
        self._consume = consume
        self._resumed = resumed
        self._finish = finish
        self._lock = threading.Lock()  # for the fields below; held for a moment only
        self._dropped = 0
        self._reported = 0
        self._process: int | None = None
        self._queue: SimpleQueue[tuple[T] | Callable[[], object]]

    @property
    def dropped(self) -> int:
        """How many items were dropped."""
        return self._dropped

    def put(self, item: T, *, urgent: bool = False) -> None:
        """Take an item; never wait. Urgent items are dropped last."""
        self._start()
        if self._queue.qsize() < (MOST if urgent else MOST - RESERVED):
            self._queue.put((item,))
        else:
            self._drop()

    def flush(self, done: Callable[[], object]) -> None:
        """Call `done`, in the thread, once everything taken so far is consumed or dropped."""
        self._start()
        self._queue.put(done)

    def _start(self) -> None:
        # A thread does not survive a fork, and what the parent has queued is the parent's to tell.
        if self._process == os.getpid():
            return
        with self._lock:
            if self._process != os.getpid():
                self._queue = SimpleQueue()
                self._process = os.getpid()
                threading.Thread(target=self._run, args=(self._queue,), name=self._name, daemon=True).start()

    def _run(self, queue: SimpleQueue[tuple[T] | Callable[[], object]]) -> None:
        finish_at: float | None = None  # None: nothing is put off
        while True:
            try:
                taken = queue.get(timeout=None if finish_at is None else max(0.0, finish_at - time.monotonic()))
            except Empty:
                taken = _nothing
            if isinstance(taken, tuple):
                self._take(*taken)
                if finish_at is None and self._finish is not None:
                    finish_at = time.monotonic() + FINISH_AFTER
                if finish_at is None or time.monotonic() < finish_at:
                    continue
            if finish_at is not None and self._finish is not None:
                self._succeeds(self._finish)
                finish_at = None
            if not isinstance(taken, tuple):
                with contextlib.suppress(BaseException):
                    taken()

    def _take(self, item: T) -> None:
        if self._succeeds(partial(self._consume, item)):
            self._report()

    def _succeeds(self, function: Callable[[], object]) -> bool:
        try:
            function()
        except BaseException as error:  # a thread that ends would drop everything after it
            self._drop(lost_with(error))
            return False
        return True

    def _drop(self, count: int = 1) -> None:
        with self._lock:
            self._dropped += count

    def _report(self) -> None:
        # With half of the queue free again the report, which may come through the queue, is not dropped in turn.
        if self._reported == self._dropped or self._queue.qsize() > MOST // 2:
            return
        with self._lock:
            count, self._reported = self._dropped - self._reported, self._dropped
        with contextlib.suppress(BaseException):
            self._resumed(count)
