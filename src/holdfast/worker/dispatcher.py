"""Runs handlers with bounded concurrency and turns what they did into settlements.

Runners take deliveries from one buffer; there is no task per event. One attempt reads like this: skip what is
already handled, expired or over its budget; decode; run; classify; settle.
"""

import asyncio
import contextlib
import contextvars
import math
import time
from collections import deque
from collections.abc import Iterable
from functools import partial

import asyncpg

from holdfast.context import HandlerContext, current_context
from holdfast.deprecation import warn_if_deprecated
from holdfast.envelope import EventEnvelope
from holdfast.failure import Redactor, bound, describe, signature
from holdfast.handlers import Handler
from holdfast.handling.sessions import NoSession
from holdfast.handling.threads import NoThread, Threads
from holdfast.outcome import Done, Outcome, Reject, Retry, Snooze
from holdfast.postgres.deliveries import Delivery
from holdfast.retry import classify
from holdfast.telemetry import Counters, Failed, Notice, Observer, Retried
from holdfast.worker.decoding import decode, facts
from holdfast.worker.in_flight import InFlight
from holdfast.worker.settler import Dead, GivenBack, Postponed, Settlement, Settler
from holdfast.worker.transactions import LeaseLost, Setback, Transactions

# Handlers that never wait would otherwise keep the loop from claiming and settling.
_YIELD_EVERY = 20
_LONGEST_TICK = 0.5
_CANCEL_PATIENCE = 1.0
# How long one of two copies of a key waits for the other: then the claim sees in the inbox what became of it.
_TWIN_DELAY = 0.5
# What waited in vain for a thread or a connection is for another worker, or for us when something has become free.
_OVERDUE_DELAY = 1.0
_WARN_INTERVAL = 60.0


class _Runner:
    """One slot of the concurrency: its task, and what it is doing."""

    __slots__ = ("cause", "deadline", "delivery", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.delivery: Delivery | None = None
        self.deadline = 0.0
        self.cause = ""  # why the handler is being cancelled: timeout, lost or stopping

    def start(self) -> None:
        """From now on the handler's own time runs."""
        if self.delivery is not None:
            self.delivery.started_at = now = time.monotonic()
            self.deadline = now + self.delivery.handler.timeout

    def cancel(self, cause: str) -> None:
        if self.task is not None and not self.cause:
            self.cause = cause
            self.task.cancel()


class Dispatcher:
    """`feed` it claimed deliveries; it hands settlements to the settler."""

    def __init__(
        self,
        settler: Settler,
        in_flight: InFlight,
        transactions: Transactions,
        counters: Counters,
        observe: Observer,
        *,
        concurrency: int,
        threads: int,
        lease: float,
        shortest_timeout: float,
        redact: Redactor | None = None,
    ) -> None:
        self._settler = settler
        self._in_flight = in_flight
        self._transactions = transactions
        self._counters = counters
        self._observe = observe
        self._redact = redact
        self._tick = min(max(shortest_timeout / 10, 0.01), _LONGEST_TICK)
        self._buffer: deque[Delivery] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._runners = [_Runner() for _ in range(concurrency)]
        self._most_threads = threads
        self._threads = Threads(threads)
        self._lease = lease  # and how long a delivery may wait to be run
        self._warned_at: dict[str, float] = {}
        self._stopping = False
        self._ending = False
        self._drained = asyncio.Event()
        self._quiet = asyncio.Event()
        self.finished = 0  # attempts that ended, for the claimer's sense of pace
        self.beat = time.monotonic()  # when the loop last turned, for the heartbeat thread

    # --- for the claimer ------------------------------------------------------------------------------

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def running(self) -> list[Delivery]:
        return [runner.delivery for runner in self._runners if runner.delivery is not None]

    async def wait_for_room(self) -> None:
        """Until the buffer has run low."""
        self._drained.clear()
        await self._drained.wait()

    def nudge(self) -> None:
        """Let a claimer that waits for room look again."""
        self._drained.set()

    def feed(self, deliveries: Iterable[Delivery]) -> None:
        self._buffer.extend(deliveries)
        self._rouse()

    def _rouse(self) -> None:
        """Wake a runner, who wakes the next one. Handlers that never wait need but a few of them."""
        while self._buffer and self._idle:
            future = self._idle.popleft()
            if not future.done():
                future.set_result(None)
                return

    async def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """Settle deliveries as if they had not been claimed."""
        for delivery in deliveries:
            self._settler.add(GivenBack(delivery))
        await self._settler.flush()

    def cancel(self, lost: Iterable[Delivery]) -> None:
        """Stop handlers whose lease is lost or whose event was cancelled; whatever they return is ignored."""
        gone = set(lost)
        for runner in self._runners:
            if runner.delivery in gone:
                runner.cancel("lost")
        for delivery in [each for each in self._buffer if each in gone]:
            self._buffer.remove(delivery)
            self._in_flight.drop(delivery)
            self._counters.lost_leases += 1

    # --- life -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """The watch over time limits; the runners are started with it and end with it."""
        self._ending = False
        self._threads = Threads(self._most_threads)
        for runner in self._runners:
            runner.task = asyncio.create_task(self._run(runner))
        try:
            while True:
                self.beat = now = time.monotonic()
                self._give_up_waiting(now)
                for runner in self._runners:
                    if runner.delivery is not None and now >= runner.deadline:
                        runner.cancel("timeout")
                    elif runner.task is not None and runner.task.done():
                        self._replace(runner, runner.task)
                await asyncio.sleep(self._tick)
        finally:
            self._ending = True
            for runner in self._runners:
                if runner.task is not None:
                    runner.task.cancel()
            await asyncio.gather(*(r.task for r in self._runners if r.task), return_exceptions=True)
            self._threads.close()

    async def stop(self, grace: float) -> None:
        """Give back what has not started, let the rest finish within the grace, give back what has not."""
        self._stopping = True
        while self._buffer:
            self._settler.add(GivenBack(self._buffer.popleft()))
        await self._settler.flush()
        await self._quiet_within(grace)
        for runner in self._runners:
            if runner.delivery is not None:
                runner.cancel("stopping")
        await self._quiet_within(_CANCEL_PATIENCE)
        for delivery in self.running():  # threads, and handlers that refuse to be cancelled
            self._settler.add(GivenBack(delivery))
        await self._settler.flush()

    def _give_up_waiting(self, now: float) -> None:
        """What no runner has taken for a lease may be had by another worker."""
        while self._buffer and now - self._buffer[0].claimed_at > self._lease:
            self._settler.add(GivenBack(self._buffer.popleft(), _OVERDUE_DELAY))

    async def _quiet_within(self, seconds: float) -> None:
        if self.running():
            self._quiet.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._quiet.wait()

    async def _run(self, runner: _Runner) -> None:
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
            runner.delivery, runner.deadline = delivery, math.inf
            try:
                if not self._passed_over(delivery):
                    await self._handle(runner, delivery)
            except BaseException:
                self._in_flight.drop(delivery)  # its lease gives it back
                raise
            finally:
                runner.delivery = None
                if self._stopping and not self.running():
                    self._quiet.set()
            if runner.task is not None and runner.task.cancelling():
                await self._forget_cancellation(runner, runner.task)
            self.finished += 1
            streak += 1
            if streak % _YIELD_EVERY == 0:
                self._drained.set()
                await asyncio.sleep(0)

    def _replace(self, runner: _Runner, ended: asyncio.Task[None]) -> None:
        """Nothing that a handler does should end its runner. If something does, that costs one event."""
        error = None if ended.cancelled() else ended.exception()
        details: dict[str, object] = {"error": describe(error or asyncio.CancelledError()).text}
        self._observe(Notice("error", "runner_failed", details))
        runner.cause = ""
        runner.task = asyncio.create_task(self._run(runner))

    async def _forget_cancellation(self, runner: _Runner, task: asyncio.Task[None]) -> None:
        """A handler may swallow its cancellation, or cancel itself: the next one must not be hit by it."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # where one that has not been raised yet is raised
        if self._ending:
            raise asyncio.CancelledError
        runner.cause = ""
        while task.cancelling():
            task.uncancel()

    # --- one attempt ----------------------------------------------------------------------------------

    def _passed_over(self, delivery: Delivery) -> bool:
        """Settle what must not run."""
        if delivery.handled:
            self._settler.duplicate(delivery)
        elif delivery.twin:
            self._settler.add(GivenBack(delivery, _TWIN_DELAY))
        elif delivery.stopped:
            self._fail(delivery, "cancelled", "cancelled while its handler was running")
        elif delivery.expired:
            self._fail(delivery, "expired", "expired before it could be delivered")
        elif delivery.attempts > 1 and delivery.attempts > delivery.allowance:
            self._fail(delivery, "max_deliveries", None)
        else:
            return False
        return True

    async def _handle(self, runner: _Runner, delivery: Delivery) -> None:
        result: Outcome | BaseException | None
        try:
            event, context = decode(delivery)
            warn_if_deprecated(event.event_type, self._observe)
            token = current_context.set(context)
            try:
                if delivery.handler.plain:
                    runner.start()
                    result = delivery.handler.outcome_of(await delivery.handler.function(event))
                else:
                    result = await self._invoke(runner, delivery, event, context)
            finally:
                current_context.reset(token)
        except (NoThread, NoSession) as missing:
            self._settler.add(GivenBack(delivery, _OVERDUE_DELAY))
            self._warn("threads" if isinstance(missing, NoThread) else "connections", delivery.handler)
            return
        except LeaseLost:
            self._lose(delivery)
            return
        except BaseException as error:
            result = error
        if result is None:
            self._in_flight.drop(delivery)  # settled in its transaction
        elif isinstance(result, Done):
            self._settler.delivered(delivery)
        else:
            settlement = self._judge(runner, delivery, result)
            if settlement is None:
                self._lose(delivery)
            else:
                self._settler.add(settlement)

    def _lose(self, delivery: Delivery) -> None:
        self._counters.lost_leases += 1
        self._in_flight.drop(delivery)

    async def _invoke(
        self, runner: _Runner, delivery: Delivery, event: EventEnvelope, context: HandlerContext
    ) -> Outcome | None:
        """Run a handler that wants more than the event. None: the transaction has settled the delivery already."""
        handler = delivery.handler
        # Waiting for one of few connections or threads is not the handler's time.
        if handler.transactional:

            async def within(tx: asyncpg.Connection) -> Outcome:
                return handler.outcome_of(await handler.function(event, **handler.extras(event, context, tx)))

            judge = partial(self._judge, runner, delivery)
            return await self._transactions.run(delivery, within, runner.start, judge)
        extras = handler.extras(event, context, None)
        if handler.asynchronous:
            runner.start()
            result = await handler.function(event, **extras)
        else:
            call = partial(contextvars.copy_context().run, handler.function, event, **extras)
            result = await self._threads.call(call, runner.start, patience=self._lease)
        return handler.outcome_of(result)

    # --- what becomes of it ---------------------------------------------------------------------------

    def _judge(self, runner: _Runner, delivery: Delivery, result: Setback) -> Settlement | None:
        """How to settle an attempt that did not end well; None when that is not ours to do."""
        match result:
            case Snooze():
                return GivenBack(delivery, result.seconds)
            case Reject():
                text = None if result.reason is None else bound(str(result.reason), self._redact)
                return self._dead(delivery, "rejected", text)
            case Retry():
                text = bound(str(result.reason or "the handler asked for a retry"), self._redact)
                return self._postponed(delivery, text, "Retry", result.seconds)
            case asyncio.CancelledError():
                if self._ending:
                    raise result
                if runner.cause == "lost":
                    return None
                if runner.cause == "stopping":
                    return GivenBack(delivery)
                if runner.cause == "timeout":
                    limit = delivery.handler.timeout
                    result = TimeoutError(f"the handler ran longer than its limit of {limit:g} s")
        return self._faulted(delivery, result)

    def _faulted(self, delivery: Delivery, error: BaseException) -> Settlement:
        handler = delivery.handler
        report = describe(error, self._redact)
        if handler.on_error == "reject":
            return self._dead(delivery, "rejected", report.text, report.signature)
        verdict = classify(error, handler.retry)
        if verdict.terminal:
            return self._dead(delivery, "retry_terminal", report.text, report.signature)
        return self._postponed(delivery, report.text, report.type_name, verdict.retry_after, report.signature)

    def _postponed(
        self, delivery: Delivery, text: str, type_name: str, wait: float | None, group: str | None = None
    ) -> Settlement:
        """Within the policy's budget; past it the delivery has failed."""
        policy = delivery.handler.retry
        if policy.exhausted(delivery.attempts, delivery.failing_for or 0.0):
            return self._dead(delivery, "retry_terminal", text, group or signature(text, type_name))
        # What the other side asked for is the least; jitter comes on top, so that not all return together.
        delay = policy.delay(delivery.attempts) if wait is None else wait + policy.delay(1)
        fact = Retried(*facts(delivery), last_error=text, retry_in=delay)
        return Postponed(delivery, delay, text, fact)

    def _dead(self, delivery: Delivery, reason: str, text: str | None, group: str | None = None) -> Dead:
        if group is None:
            group = signature(text, reason) if text else reason
        fact = Failed(*facts(delivery), failure_reason=reason, last_error=text, error_signature=group)
        return Dead(delivery, reason, text, group, fact)

    def _fail(self, delivery: Delivery, reason: str, text: str | None) -> None:
        self._settler.add(self._dead(delivery, reason, text))

    def _warn(self, scarce: str, handler: Handler) -> None:
        now = time.monotonic()
        if now - self._warned_at.get(scarce, -_WARN_INTERVAL) < _WARN_INTERVAL:
            return
        self._warned_at[scarce] = now
        details: dict[str, object] = {
            "handler_name": handler.name,
            "waited_s": round(self._lease, 1),
            "running": sorted({each.handler.name for each in self.running() if each.started_at is not None}),
            "remedy": f"find the handlers that hang, or raise WorkerSettings.{scarce}; the events were given back",
        }
        self._observe(Notice("warning", f"{scarce}_exhausted", details))
