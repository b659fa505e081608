"""A runner: the task that runs deliveries of one handler, one after the other."""

import asyncio
import time

from holdfast.handlers import Handler
from holdfast.postgres.delivery import Delivery
from holdfast.telemetry import Notice
from holdfast.worker.queues import HandlerQueue


class Runner:
    """One runner of a handler: its task, and the delivery it runs."""

    __slots__ = (
        "cause",
        "deadline",
        "delivery",
        "ended",
        "failed",
        "lingers",
        "overrun",
        "queue",
        "since",
        "task",
        "threaded",
    )

    def __init__(self, queue: HandlerQueue) -> None:
        self.queue = queue
        self.task: asyncio.Task[None] | None = None
        self.delivery: Delivery | None = None
        self.since = 0.0  # when the delivery was taken from the queue
        self.failed = False  # the delivery has not succeeded
        self.lingers = False  # the delivery holds a thread or a session for long
        self.deadline = 0.0
        self.cause = ""  # why the handler is being cancelled: timeout, lost or stopping
        self.overrun = False  # its thread is past the time limit, and cannot be cancelled
        self.ended = False
        self.threaded = False  # the last start was in a thread

    def start(self, in_thread: bool = False) -> None:
        """Start the handler's own time."""
        self.threaded = in_thread
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
        return self.threaded and self.delivery is not None and self.delivery.started_at is not None


def overrun_notice(delivery: Delivery) -> Notice:
    """Say that a handler is past its time limit and cannot be cancelled."""
    details: dict[str, object] = {
        "handler_name": delivery.handler.name,
        "delivery_id": str(delivery.id),
        "limit_s": delivery.handler.timeout,
        "remedy": "its thread cannot be stopped, and the event is not retried before it ends: give what the handler "
        "waits for a time limit of its own, or restart the worker",
    }
    return Notice("warning", "handler_overran", details)


def exhausted_notice(scarce: str, handler: Handler, waited: float, running: set[str]) -> Notice:
    """Say that no thread, or no connection, became free for so long."""
    details: dict[str, object] = {
        "handler_name": handler.name,
        "waited_s": round(waited, 1),
        "running": sorted(running),
        "remedy": f"find the handlers that hang, or raise WorkerSettings.{scarce}; other workers have the events",
    }
    name = "threads_exhausted" if scarce == "threads" else "connections_exhausted"
    return Notice("warning", name, details)
