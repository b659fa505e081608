"""A runner: the task that runs deliveries of one handler, one after the other."""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence

from holdfast.handlers import Handler
from holdfast.handling.application.handler_thread import HandlerThread
from holdfast.postgres.delivery import Delivery
from holdfast.telemetry import Notice
from holdfast.worker.queues import HandlerQueue


class Runner:
    """One runner of a handler: its task, and the deliveries it has taken: one, or those of a batch."""

    __slots__ = (
        "called",
        "cause",
        "deadline",
        "deliveries",
        "ended",
        "failed",
        "lingers",
        "lost",
        "overrun",
        "queue",
        "since",
        "task",
        "thread",
        "threaded",
    )

    def __init__(self, queue: HandlerQueue) -> None:
        self.queue = queue
        self.task: asyncio.Task[None] | None = None
        self.deliveries: Sequence[Delivery] = ()  # not settled yet
        self.called: Sequence[Delivery] = ()  # of a batch: those that the handler has now
        self.lost: set[Delivery] = set()  # of a batch: those whose lease is lost
        self.since = 0.0  # when the deliveries were taken from the queue
        self.failed = False  # no delivery has succeeded
        self.lingers = False  # it holds a thread or a session for long
        self.deadline = 0.0
        self.cause = ""  # why the handler is being cancelled: timeout, lost or stopping
        self.overrun = False  # its thread is past the time limit, and cannot be cancelled
        self.ended = False
        self.threaded = False  # the last start was in a thread
        self.thread: HandlerThread | None = None  # of a handler that has a transaction there

    def start(self, in_thread: bool = False, thread: HandlerThread | None = None) -> None:
        """Start the handler's own time."""
        self.threaded = in_thread
        self.thread = thread
        now = time.monotonic() if thread is None else thread.started_at
        for delivery in self.deliveries:
            delivery.started_at = now
            if delivery.began_at is None:
                delivery.began_at = now
        if self.deliveries:
            self.deadline = now + self.queue.handler.timeout

    def cancel(self, cause: str) -> None:
        if self.task is not None and not self.cause:
            self.cause = cause
            self.task.cancel()

    def cut(self) -> None:
        """Cut the connection of a handler in a thread, if it has one: the transaction ends, and what waits for it."""
        if self.thread is not None:
            self.thread.sever()

    def forbid(self) -> None:
        """Keep a handler in a thread from committing, if it has a transaction; its row stays locked while it runs."""
        if self.thread is not None:
            self.thread.forbid()

    @property
    def in_thread(self) -> bool:
        """Whether a thread runs the handler: it goes on until it ends by itself."""
        return self.threaded and bool(self.deliveries) and self.deliveries[0].started_at is not None

    @property
    def has_returned(self) -> bool:
        """Whether the handler has returned from its last call, and what is left is to settle."""
        called = self.called or self.deliveries
        return any(each.started_at is not None and each.ended_at >= each.started_at for each in called)

    def take(self, deliveries: Sequence[Delivery]) -> None:
        """Begin with deliveries of the queue."""
        self.deliveries, self.deadline = deliveries, math.inf

    def lose(self, gone: set[Delivery]) -> None:
        """Stop the handler if the lease of its delivery is lost; of a batch, go on with the others.

        A thread cannot be stopped. What it returns for a delivery of a batch whose lease is lost settles nothing.
        A handler that has returned is not stopped: the settlement that is on its way may be what ended the lease.
        """
        lost = gone.intersection(self.deliveries)
        if not lost:
            return
        if self.called:
            self.lost |= lost
            if not lost.intersection(self.called) or self.in_thread:
                return
        if not self.has_returned:
            self.cancel("lost")

    async def forget_cancellation(self) -> None:
        """Clear a cancellation that the handler swallowed, or caused itself: it must not hit what follows."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # where one that has not been raised yet is raised
        self.cause = ""
        while self.task is not None and self.task.cancelling():
            self.task.uncancel()


def overrun_notice(delivery: Delivery, *, in_thread: bool) -> Notice:
    """Say that a handler is past its time limit and cannot be ended: it is in a thread, or was cancelled in vain."""
    remedy = (
        "its thread cannot be stopped, and the event is not retried before it ends: give what the handler waits for a "
        "time limit of its own, or restart the worker"
        if in_thread
        else "it was cancelled and runs on, and the event is not retried before it ends: let the handler raise "
        "asyncio.CancelledError again, or restart the worker"
    )
    details: dict[str, object] = {
        "handler_name": delivery.handler.name,
        "delivery_id": str(delivery.id),
        "limit_s": delivery.handler.timeout,
        "remedy": remedy,
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
