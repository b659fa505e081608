"""What another session keeps from being settled: the rows that wait for it, and the handlers that they are owed to.

Any producer can block a row: an inbox row that it has written and not committed has the key of the row's event.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from holdfast.postgres.delivery import Delivery
from holdfast.telemetry import Notice, Observer
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.in_flight import InFlight
from holdfast.worker.settle_queues import SettleQueue
from holdfast.worker.settlements import delivery_of

# For so long after a blocked row its handler's rows are settled, and entered, without waiting for locks.
_WARY = 10.0
# Rows of one handler that could not be entered are due again after so long, and no more than so many a second.
_LEAST_DELAY = 2.0
_MOST_DELAY = 300.0
_PACE = 1 / 100


class BlockedHandlers:
    """The handlers that had a blocked row a moment ago. Who blocks one row blocks many, whatever their sources are."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self._until: dict[str, float] = {}
        self._put_off: dict[str, float] = {}  # when the last of a handler's rows is due again
        self._reports = HourlyLimit()

    def __bool__(self) -> bool:
        return any([name in self for name in tuple(self._until)])

    def __contains__(self, handler: str) -> bool:
        until = self._until.get(handler)
        if until is not None and until < time.monotonic():
            del self._until[handler]
            return False
        return until is not None

    def note(self, delivery: Delivery) -> None:
        """Remember that a row is blocked, and report it."""
        self._until[delivery.handler.name] = time.monotonic() + _WARY
        if self._reports.due("settle_blocked", delivery.handler.name):
            details: dict[str, object] = {
                "delivery_id": str(delivery.id),
                "handler_name": delivery.handler.name,
                "cause": "another session has locked the row, or has written its inbox row and not committed",
                "remedy": "it is settled when that session's transaction ends; holdfast doctor names the session",
            }
            self._observe(Notice("warning", "settle_blocked", details))

    def beware(self, handler: str) -> None:
        """Let rows of a handler be entered without waiting for locks."""
        self._until[handler] = time.monotonic() + _WARY

    def put_off(self, delivery: Delivery) -> float:
        """Remember a row that could not be entered; in how many seconds to try it again."""
        name, now = delivery.handler.name, time.monotonic()
        # Once may be the other copy of a key that was published twice.
        if name in self:
            self.note(delivery)
        self._until[name] = now + _WARY
        due = max(now + _LEAST_DELAY, self._put_off.get(name, 0.0) + _PACE)
        if due > now + _MOST_DELAY:
            due = now + _LEAST_DELAY
        self._put_off[name] = due
        return due - now


class BlockedRows:
    """Rows that are handled and blocked. They keep their leases, each in the queue that would have settled it."""

    def __init__(self, in_flight: InFlight, handlers: BlockedHandlers) -> None:
        self._in_flight = in_flight
        self._handlers = handlers
        self._waiting: deque[tuple[SettleQueue[Any], Any]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, queue: SettleQueue[Any], some: Iterable[Any]) -> None:
        """Let rows wait under their leases, behind the others."""
        for each in some:
            delivery = delivery_of(each)
            self._in_flight.block(delivery)
            self._handlers.note(delivery)
            self._waiting.append((queue, each))

    def take(self, most: int) -> tuple[SettleQueue[Any], list[Any]]:
        """Take the first rows, as many as belong to one queue."""
        queue = self._waiting[0][0]
        some: list[Any] = []
        while self._waiting and self._waiting[0][0] is queue and len(some) < most:
            some.append(self._waiting.popleft()[1])
        return queue, some

    def take_excess(self, most: int) -> list[tuple[SettleQueue[Any], list[Any]]]:
        """Take the first of those that can be settled otherwise, so that at most so many of them wait on."""
        excess = sum(queue.otherwise is not None for queue, _ in self._waiting) - most
        if excess <= 0:
            return []
        taken: dict[SettleQueue[Any], list[Any]] = {}
        kept: deque[tuple[SettleQueue[Any], Any]] = deque()
        for queue, each in self._waiting:
            if queue.otherwise is not None and excess > 0:
                taken.setdefault(queue, []).append(each)
                excess -= 1
            else:
                kept.append((queue, each))
        self._waiting = kept
        return list(taken.items())
