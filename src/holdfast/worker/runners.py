"""A runner: the task that runs deliveries of one handler, one after the other."""

import asyncio
import time

from holdfast.postgres.deliveries import Delivery
from holdfast.worker.queues import HandlerQueue


class Runner:
    """One runner of a handler: its task, and the delivery it runs."""

    __slots__ = ("cause", "deadline", "delivery", "ended", "overrun", "queue", "task")

    def __init__(self, queue: HandlerQueue) -> None:
        self.queue = queue
        self.task: asyncio.Task[None] | None = None
        self.delivery: Delivery | None = None
        self.deadline = 0.0
        self.cause = ""  # why the handler is being cancelled: timeout, lost or stopping
        self.overrun = False  # its thread is past the time limit, and cannot be cancelled
        self.ended = False

    def start(self) -> None:
        """Start the handler's own time."""
        if self.delivery is not None:
            self.delivery.started_at = now = time.monotonic()
            self.deadline = now + self.delivery.handler.timeout

    def cancel(self, cause: str) -> None:
        if self.task is not None and not self.cause:
            self.cause = cause
            self.task.cancel()

    @property
    def in_thread(self) -> bool:
        """Whether a thread runs the handler: it goes on until it ends by itself."""
        delivery = self.delivery
        return delivery is not None and delivery.started_at is not None and not delivery.handler.asynchronous
