"""Runs handlers with bounded concurrency and turns what they did into settlements.

Runners take deliveries from one buffer; there is no task per event. One attempt reads like this: skip what is
already handled, expired or over its budget; decode; run; judge; settle.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable
from functools import partial

from holdfast.context import current_context
from holdfast.deprecation import warn_if_deprecated
from holdfast.failure import describe
from holdfast.handlers import Handler
from holdfast.handling.runner import HandlerRunner, overran
from holdfast.handling.sessions import NoConnection, NoSession
from holdfast.handling.threads import NoThread, Threads
from holdfast.outcome import Done, Outcome
from holdfast.postgres.deliveries import Delivery
from holdfast.telemetry import Notice
from holdfast.worker.decoding import decode
from holdfast.worker.settlements import Judge, Release, Setback, Settlement, Snooze
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared
from holdfast.worker.transactions import LeaseLost, Transactions

# Handlers that never wait would otherwise keep the loop from claiming and settling.
_YIELD_EVERY = 20
_LONGEST_TICK = 0.5
_CANCEL_PATIENCE = 1.0
# How long one of two copies of a key waits for the other: then the claim finds in the inbox what became of it.
_TWIN_DELAY = 0.5
# A delivery that waited in vain for a thread or a connection is left to another worker for so long.
_OVERDUE_DELAY = 1.0
_WARN_INTERVAL = 60.0


class _Slot:
    """One slot of the concurrency: its task, the runner, and the delivery it runs."""

    __slots__ = ("cause", "deadline", "delivery", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.delivery: Delivery | None = None
        self.deadline = 0.0
        self.cause = ""  # why the handler is being cancelled: timeout, lost or stopping

    def start(self) -> None:
        """Start the handler's own time."""
        if self.delivery is not None:
            self.delivery.started_at = now = time.monotonic()
            self.deadline = now + self.delivery.handler.timeout

    def cancel(self, cause: str) -> None:
        if self.task is not None and not self.cause:
            self.cause = cause
            self.task.cancel()


class Dispatcher:
    """The claimer feeds it deliveries; it hands their settlements to the settler."""

    def __init__(self, shared: Shared, settler: Settler, judge: Judge, *, shortest_timeout: float) -> None:
        self._settler = settler
        self._judge = judge
        self._transactions = Transactions(shared, settler)
        self._in_flight = shared.in_flight
        self._counters = shared.counters
        self._observe = shared.observe
        self._sessions = shared.connections.sessions
        self._most_threads = shared.settings.threads
        self._lease = shared.settings.lease  # and how long a delivery may wait to be run
        self._handlers = self._handler_runner()
        self._tick = min(max(shortest_timeout / 10, 0.01), _LONGEST_TICK)
        self._buffer: deque[Delivery] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._slots = [_Slot() for _ in range(shared.settings.concurrency)]
        self._warned_at: dict[str, float] = {}
        self._stopping = False
        self._ending = False
        self._drained = asyncio.Event()
        self._quiet = asyncio.Event()
        self.finished = 0  # attempts that ended, for the claimer's sense of pace
        self.beat = time.monotonic()  # when the loop last turned, for the heartbeat thread

    def _handler_runner(self) -> HandlerRunner:
        return HandlerRunner(self._sessions, Threads(self._most_threads), self._observe, patience=self._lease)

    # --- for the claimer ------------------------------------------------------------------------------

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def running(self) -> list[Delivery]:
        """The deliveries whose handlers run, or wait for a thread or a session."""
        return [slot.delivery for slot in self._slots if slot.delivery is not None]

    async def wait_for_room(self) -> None:
        """Wait until the buffer has run low."""
        self._drained.clear()
        await self._drained.wait()

    def nudge(self) -> None:
        """End the claimer's wait for room."""
        self._drained.set()

    def feed(self, deliveries: Iterable[Delivery]) -> None:
        self._buffer.extend(deliveries)
        self._rouse()

    def _rouse(self) -> None:
        """Wake a runner, which wakes the next one. Handlers that never wait need but a few of them."""
        while self._buffer and self._idle:
            future = self._idle.popleft()
            if not future.done():
                future.set_result(None)
                return

    async def release(self, deliveries: Iterable[Delivery]) -> None:
        """Settle deliveries as if they had not been claimed."""
        for delivery in deliveries:
            self._settler.add(Release(delivery))
        await self._settler.flush()

    def cancel(self, lost: Iterable[Delivery]) -> None:
        """Stop handlers whose lease is lost or whose event was cancelled; their results are ignored."""
        gone = set(lost)
        for slot in self._slots:
            if slot.delivery in gone:
                slot.cancel("lost")
        for delivery in [each for each in self._buffer if each in gone]:
            self._buffer.remove(delivery)
            self._in_flight.drop(delivery)
            self._counters.lost_leases += 1

    # --- life -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch over time limits; the runners start and end with it."""
        self._ending = False
        self._handlers = self._handler_runner()
        for slot in self._slots:
            slot.task = asyncio.create_task(self._run(slot))
        try:
            while True:
                self.beat = now = time.monotonic()
                self._give_up_waiting(now)
                for slot in self._slots:
                    if slot.delivery is not None and now >= slot.deadline:
                        slot.cancel("timeout")
                    elif slot.task is not None and slot.task.done():
                        self._replace(slot, slot.task)
                await asyncio.sleep(self._tick)
        finally:
            self._ending = True
            for slot in self._slots:
                if slot.task is not None:
                    slot.task.cancel()
            await asyncio.gather(*(slot.task for slot in self._slots if slot.task), return_exceptions=True)
            self._handlers.close()

    async def stop(self, grace: float) -> None:
        """Release what has not started, let the rest finish within the grace, release what has not finished."""
        self._stopping = True
        while self._buffer:
            self._settler.add(Release(self._buffer.popleft()))
        await self._settler.flush()
        await self._quiet_within(grace)
        for slot in self._slots:
            if slot.delivery is not None:
                slot.cancel("stopping")
        await self._quiet_within(_CANCEL_PATIENCE)
        for delivery in self.running():  # threads, and handlers that refuse to be cancelled
            self._settler.add(Release(delivery))
        await self._settler.flush()

    def _give_up_waiting(self, now: float) -> None:
        """Leave to another worker what has waited for a runner longer than a lease."""
        while self._buffer and now - self._buffer[0].claimed_at > self._lease:
            self._settler.add(Snooze(self._buffer.popleft(), _OVERDUE_DELAY))

    async def _quiet_within(self, seconds: float) -> None:
        if self.running():
            self._quiet.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._quiet.wait()

    async def _run(self, slot: _Slot) -> None:
        streak = 0
        while True:
            if not self._buffer:
                streak = 0
                self._drained.set()
                future = asyncio.get_running_loop().create_future()
                self._idle.append(future)
                await future
                self._rouse()
                continue
            delivery = self._buffer.popleft()
            slot.delivery, slot.deadline = delivery, math.inf
            try:
                if not self._passed_over(delivery):
                    await self._handle(slot, delivery)
            except BaseException:
                self._in_flight.drop(delivery)  # it is claimed again when its lease ends
                raise
            finally:
                slot.delivery = None
                if self._stopping and not self.running():
                    self._quiet.set()
            if slot.task is not None and slot.task.cancelling():
                await self._forget_cancellation(slot, slot.task)
            self.finished += 1
            streak += 1
            if streak % _YIELD_EVERY == 0:
                self._drained.set()
                await asyncio.sleep(0)

    def _replace(self, slot: _Slot, ended: asyncio.Task[None]) -> None:
        """Start a new runner in place of one that has ended. No handler should cause that; it costs one event."""
        error = None if ended.cancelled() else ended.exception()
        details: dict[str, object] = {"error": describe(error or asyncio.CancelledError()).text}
        self._observe(Notice("error", "runner_failed", details))
        slot.cause = ""
        slot.task = asyncio.create_task(self._run(slot))

    async def _forget_cancellation(self, slot: _Slot, task: asyncio.Task[None]) -> None:
        """Clear a cancellation that the handler swallowed, or caused itself: it must not hit the next handler."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # where one that has not been raised yet is raised
        if self._ending:
            raise asyncio.CancelledError
        slot.cause = ""
        while task.cancelling():
            task.uncancel()

    # --- one attempt ----------------------------------------------------------------------------------

    def _passed_over(self, delivery: Delivery) -> bool:
        """Settle a delivery that must not run; false when it must."""
        if delivery.handled:
            self._settler.duplicate(delivery)
        elif delivery.twin:
            self._settler.add(Snooze(delivery, _TWIN_DELAY))
        elif delivery.stopped:
            self._fail(delivery, "cancelled", "cancelled while its handler was running")
        elif delivery.expired:
            self._fail(delivery, "expired", "expired before it could be delivered")
        elif delivery.attempts > 1 and delivery.attempts > delivery.allowance:
            self._fail(delivery, "max_deliveries", None)
        else:
            return False
        return True

    def _fail(self, delivery: Delivery, reason: str, text: str | None) -> None:
        self._settler.add(self._judge.fail(delivery, reason, text))

    async def _handle(self, slot: _Slot, delivery: Delivery) -> None:
        handler = delivery.handler
        result: Outcome | BaseException | None
        try:
            event, context = decode(delivery)
            warn_if_deprecated(event.event_type, self._observe)
            token = current_context.set(context)
            try:
                if handler.plain:
                    # As HandlerRunner would do it, without the calls in between: nearly every event comes here.
                    slot.start()
                    result = handler.outcome_of(await handler.function(event))
                else:
                    transact = partial(self._transactions.run, delivery, partial(self._settlement, slot, delivery))
                    result = await self._handlers.run(handler, event, context, slot.start, transact)
            finally:
                current_context.reset(token)
        except (NoThread, NoSession) as missing:
            self._settler.add(Snooze(delivery, _OVERDUE_DELAY))
            self._warn("threads" if isinstance(missing, NoThread) else "connections", handler)
            return
        except NoConnection as missing:
            # The handler has not begun: this counts no attempt.
            self._settler.add(Snooze(delivery, self._transactions.outage.begin(missing.fault)))
            return
        except LeaseLost:
            self._lose(delivery)
            return
        except BaseException as error:
            result = error
        if result is None:
            self._in_flight.drop(delivery)  # settled in its transaction
        elif isinstance(result, Done):
            self._settler.deliver(delivery)
        else:
            settlement = self._settlement(slot, delivery, result)
            if settlement is None:
                self._lose(delivery)
            else:
                self._settler.add(settlement)

    def _lose(self, delivery: Delivery) -> None:
        self._counters.lost_leases += 1
        self._in_flight.drop(delivery)

    def _settlement(self, slot: _Slot, delivery: Delivery, setback: Setback) -> Settlement | None:
        """How to settle an attempt that did not succeed; None when its lease is lost."""
        if isinstance(setback, asyncio.CancelledError):
            if self._ending:
                raise setback
            if slot.cause == "lost":
                return None
            if slot.cause == "stopping":
                return Release(delivery)
            if slot.cause == "timeout":
                setback = overran(delivery.handler)
        return self._judge.settlement(delivery, setback)

    def _warn(self, scarce: str, handler: Handler) -> None:
        """Report that threads or connections were not free in time, once a minute."""
        now = time.monotonic()
        if now - self._warned_at.get(scarce, -_WARN_INTERVAL) < _WARN_INTERVAL:
            return
        self._warned_at[scarce] = now
        details: dict[str, object] = {
            "handler_name": handler.name,
            "waited_s": round(self._lease, 1),
            "running": sorted({each.handler.name for each in self.running() if each.started_at is not None}),
            "remedy": f"find the handlers that hang, or raise WorkerSettings.{scarce}; the events were snoozed",
        }
        self._observe(Notice("warning", f"{scarce}_exhausted", details))
