"""Rows that are handled and that another session keeps from being settled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from holdfast.postgres.delivery import Delivery
from holdfast.telemetry import Notice, Observer
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.in_flight import InFlight

Queue = TypeVar("Queue")
Some = TypeVar("Some")


class Blocked(Generic[Queue, Some]):
    """They keep their leases and wait beside the others, each in the queue that would have settled it.

    Any producer can block a row: an inbox row that it has written and not committed has the key of the row's event.
    """

    def __init__(self, in_flight: InFlight, observe: Observer) -> None:
        self._in_flight = in_flight
        self._observe = observe
        self._waiting: deque[tuple[Queue, Some]] = deque()
        self._reports = HourlyLimit()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, queue: Queue, settlement: Some, delivery: Delivery) -> None:
        """Let a row wait, under its lease."""
        self._in_flight.block(delivery)
        self._waiting.append((queue, settlement))
        if self._reports.due("settle_blocked", delivery.handler.name):
            details: dict[str, object] = {
                "delivery_id": str(delivery.id),
                "handler_name": delivery.handler.name,
                "cause": "another session has locked the row, or has written its inbox row and not committed",
                "remedy": "it is settled when that session's transaction ends; holdfast doctor names the session",
            }
            self._observe(Notice("warning", "settle_blocked", details))

    def take(self, most: int) -> tuple[Queue, list[Some]]:
        """Take the first rows, as many as belong to one queue."""
        queue = self._waiting[0][0]
        some: list[Some] = []
        while self._waiting and self._waiting[0][0] is queue and len(some) < most:
            some.append(self._waiting.popleft()[1])
        return queue, some

    def put_back(self, queue: Queue, some: Iterable[Some]) -> None:
        """Let rows wait on, behind the others."""
        self._waiting.extend((queue, each) for each in some)

    def move(self, before: Queue, after: Queue) -> None:
        """Settle what waits for one queue by another."""
        self._waiting = deque((after if queue is before else queue, each) for queue, each in self._waiting)
