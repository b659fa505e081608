"""Runs the deliveries of a worker with bounded concurrency: each as one attempt (attempts.py), or batches (batches.py).

Every handler has a queue and runners of its own, so that a slow one fills only its own places. A runner takes a few
deliveries from its queue and ends; when it begins it starts the next one, which begins after the other handlers had
their turn.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from holdfast.failure import describe
from holdfast.handlers import Handler
from holdfast.handling.sessions import NoSession
from holdfast.handling.threads import NoThread
from holdfast.postgres.delivery import Delivery
from holdfast.telemetry import Notice
from holdfast.worker.attempts import Attempts
from holdfast.worker.batches import Batches
from holdfast.worker.concurrency import Concurrency
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.queues import HandlerQueue, queues_of
from holdfast.worker.runners import Runner, exhausted_notice, overrun_notice
from holdfast.worker.settlements import Judge, Release, Snooze
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared
from holdfast.worker.shares import Shares
from holdfast.worker.wakeups import Wakeups

# A runner ends after so many deliveries: handlers that never wait would otherwise keep the loop from everything else.
_DELIVERIES = 20
_LONGEST_TICK = 0.5
_CANCEL_PATIENCE = 1.0
# When a handler that was cancelled and runs on is reported.
_CANCEL_NOTICE = 5.0
# How often to look who holds a thread or a session for long.
_WATCH_INTERVAL = 0.05
# A delivery that waited in vain for a thread or a connection is left to another worker for so long.
_SCARCE_DELAY = 1.0
# A worker that was stopped has ended, and with it its threads, when this time is over.
_EXIT_DELAY = 5.0
_HANDLER = attrgetter("handler.name")


class Dispatcher:
    """The claimer feeds it deliveries; it hands their settlements to the settler."""

    def __init__(
        self, shared: Shared, settler: Settler, judge: Judge, handlers: Sequence[Handler], wakeups: Wakeups
    ) -> None:
        self._settler = settler
        self._wakeups = wakeups
        self._attempts = Attempts(shared, settler, judge, handlers)
        self._batches = Batches(shared, settler, self._attempts)
        self._sources = shared.connections.sources
        self._in_flight = shared.in_flight
        self._held = shared.held
        self._breakers = shared.breakers
        self._reports = shared.reports
        self._observe = shared.observe
        self._tracing = shared.tracing
        self._batch = shared.settings.batch
        self._lease = shared.settings.lease  # and how long a delivery may wait to be run
        self._queues = queues_of(handlers, shared.settings)
        self.concurrency = Concurrency(shared.settings, settler, shared.observe, self._may_run_more)
        self._sharing: dict[Shares, list[HandlerQueue]] = {}
        for queue in self._queues.values():
            if queue.shares is not None:
                self._sharing.setdefault(queue.shares, []).append(queue)
        shortest = min(handler.timeout for handler in handlers)
        self._tick = min(max(shortest / 10, 0.01), _LONGEST_TICK)
        self._watched: set[Shares] = set()
        self._runners: set[Runner] = set()
        self._fed: dict[str, HandlerQueue] = {}  # the queues that have deliveries waiting
        self._left_out: dict[str, HandlerQueue] = {}  # of the last claim, for want of room
        self._hourly = HourlyLimit()
        self._stopping = False
        self._quiet = asyncio.Event()
        settler.when_room(self._start_all)
        shared.breakers.when_answered(self._breaker_answered)

    # --- for the claimer ------------------------------------------------------------------------------

    def room(self, handler: str) -> int:
        """How many deliveries of a handler to claim. When it has none, the claimer is woken as soon as it has."""
        queue = self._queues[handler]
        room = self._room(queue)
        if room > 0:
            self._left_out.pop(handler, None)
        else:
            self._left_out[handler] = queue
        return room

    def space(self, handler: str) -> int:
        """How many deliveries of a handler have room, for who brings them from elsewhere."""
        return self._room(self._queues[handler])

    @property
    def soon(self) -> bool:
        """Whether a handler that was left out of the last claim will have room in a moment."""
        return any(queue.soon for queue in self._left_out.values())

    @property
    def left_out(self) -> bool:
        """Whether a handler was left out for want of room."""
        return bool(self._left_out)

    def running(self) -> list[Delivery]:
        """The deliveries whose handlers run."""
        return [delivery for runner in list(self._runners) for delivery in runner.deliveries]

    def feed(self, deliveries: Iterable[Delivery]) -> None:
        # The most urgent come first, so those of many handlers alternate: each queue gets all of its own at once.
        by_handler: dict[str, list[Delivery]] = {}
        for name, some in groupby(deliveries, _HANDLER):
            by_handler.setdefault(name, []).extend(some)
        for name, fed in by_handler.items():
            queue = self._queues[name]
            queue.feed(fed)
            self._fed[name] = queue
            self._start(queue)

    def hurry(self) -> None:
        """Begin with batches that still gather: nothing more is due."""
        for queue in tuple(self._fed.values()):
            if queue.gathers:
                queue.hurried = True
                self._start(queue)

    # --- runners --------------------------------------------------------------------------------------

    def _start(self, queue: HandlerQueue) -> None:
        """Start one more runner of a handler, unless one is about to begin: that one starts the next."""
        if (
            queue.waiting
            and not (queue.fresh or self._settler.full or self._attempts.ending)
            and queue.free > 0
            and (queue.handler.breaker is None or self._within_breaker(queue) > 0)
        ):
            if queue.gathers and (wait := queue.ripe_in()) > 0:
                self._start_in(wait, queue)
                return
            if queue.adjustable:
                self.concurrency.watch(queue)
            queue.fresh = True
            queue.take()
            runner = Runner(queue)
            self._runners.add(runner)
            if queue.shares is not None and queue.shares not in self._watched:
                self._watched.add(queue.shares)
                asyncio.get_running_loop().call_later(_WATCH_INTERVAL, self._watch, queue.shares)
            runner.task = task = asyncio.create_task(self._run(runner), name=f"handler {queue.handler.name}")
            task.add_done_callback(partial(self._ended, runner))

    def _room(self, queue: HandlerQueue) -> int:
        room = queue.room(self._batch, ahead=not self._held.binds(queue.handler.name))
        if queue.handler.breaker is None:
            return room
        batch = queue.handler.batch
        return min(room, self._within_breaker(queue) * (1 if batch is None else batch.size) - len(queue.waiting))

    def _within_breaker(self, queue: HandlerQueue) -> int:
        """Return how many more calls at the same time the breaker of the handler leaves."""
        if self._breakers.stops(queue.handler):
            return 0
        return self._breakers.room(queue.handler, queue.running)

    def _breaker_answered(self, handler: str, is_open: bool) -> None:
        """Give back what has not begun if the breaker is open, or go on."""
        queue = self._queues[handler]
        if is_open:
            while queue.waiting:
                self._settler.add(Release(queue.waiting.popleft()))
        self._start(queue)
        self._tell_of_room(queue)

    def _start_in(self, seconds: float, queue: HandlerQueue) -> None:
        """Start a runner when the queue has gathered for long enough, unless it is full before."""
        if not queue.ripening:
            queue.ripening = True
            asyncio.get_running_loop().call_later(seconds, self._ripen, queue)

    def _ripen(self, queue: HandlerQueue) -> None:
        queue.ripening = False
        self._start(queue)

    def _start_all(self) -> None:
        """Start runners of every handler that has deliveries waiting."""
        for queue in tuple(self._fed.values()):
            self._start(queue)

    def _may_run_more(self, queue: HandlerQueue) -> None:
        self._start(queue)
        self._tell_of_room(queue)

    def _end(self, runner: Runner) -> None:
        """Let the next one have what the runner had: of the handlers that wait, the one that holds the fewest."""
        if runner.ended:
            return
        runner.ended = True
        self._runners.discard(runner)
        queue = runner.queue
        queue.give()
        if queue.shares is None:
            self._start(queue)
        else:
            self._share(queue.shares)
        if not queue.waiting:
            self._fed.pop(queue.handler.name, None)
        self._tell_of_room(queue)

    def _share(self, shares: Shares) -> None:
        """Start runners with what has become free, of the handlers that hold the fewest first."""
        waiting = [queue for queue in self._fed.values() if queue.shares is shares]
        for queue in sorted(waiting, key=lambda queue: shares.held(queue.handler.name)):
            self._start(queue)

    def _others_wait(self, shares: Shares, queue: HandlerQueue) -> bool:
        """Return whether another handler waits for a thread or a session: each delivery may be the last before it."""
        name = queue.handler.name
        return any(
            each is not queue and each.shares is shares and shares.rivals(name, other)
            for other, each in self._fed.items()
        )

    def _watch(self, shares: Shares) -> None:
        """Find deliveries that hold a thread or a session for long, as long as any is held."""
        if not shares.taken or self._attempts.ending:
            self._watched.discard(shares)
            return
        asyncio.get_running_loop().call_later(_WATCH_INTERVAL, self._watch, shares)
        shares.learn()
        long_ago, lingering = time.monotonic() - shares.long, None
        for runner in self._runners:
            queue = runner.queue
            if queue.shares is shares and runner.deliveries and not runner.lingers and runner.since < long_ago:
                runner.lingers, lingering = True, queue
                shares.linger(queue.handler.name)
        if lingering is not None:
            self._share(shares)
            self._tell_of_room(lingering)

    def _note(self, runner: Runner, shares: Shares) -> None:
        """Note how long a delivery has held a thread or a session."""
        shares.ended(runner.queue.handler.name, time.monotonic() - runner.since, runner.lingers, runner.failed)
        runner.lingers = runner.failed = False

    def _tell_of_room(self, queue: HandlerQueue) -> None:
        """Wake the claimer if a handler that it left out has room again, now that another runner has ended."""
        for each in tuple(self._left_out.values()):
            if (each is queue or (each.shares is not None and each.shares is queue.shares)) and (self._room(each) > 0):
                del self._left_out[each.handler.name]
                self._wakeups.wake()

    def _ended(self, runner: Runner, task: asyncio.Task[None]) -> None:
        """Clean up behind a runner that never began, and report one that failed. No handler should cause that."""
        if not runner.ended:
            runner.queue.fresh = False
            self._end(runner)
        error = None if task.cancelled() else task.exception()
        if (error is not None or task.cancelled()) and not self._attempts.ending:
            details: dict[str, object] = {"error": describe(error or asyncio.CancelledError()).text}
            self._observe(Notice("error", "runner_failed", details))

    async def _run(self, runner: Runner) -> None:
        queue = runner.queue
        queue.fresh = False
        self._start(queue)
        waiting, shares = queue.waiting, queue.shares
        try:
            if self._tracing is not None:
                self._tracing.hand_on()
            for _ in range(1 if queue.gathers else _DELIVERIES):
                if not waiting or queue.surplus or self._settler.full or self._breakers.stops(queue.handler):
                    return
                taken = queue.next()
                runner.take(taken)
                if shares is not None:
                    runner.since = time.monotonic()
                try:
                    if queue.gathers:
                        await self._batches.run(runner, taken)
                    elif not self._attempts.pass_over(taken[0]):
                        await self._attempts.run(runner, taken[0])
                except (NoThread, NoSession) as missing:
                    for delivery in runner.deliveries:
                        self._settler.add(Snooze(delivery, _SCARCE_DELAY))
                    if shares is not None:
                        shares.refused()
                    self._warn("threads" if isinstance(missing, NoThread) else "connections", queue.handler)
                except BaseException:
                    # Those that `stop` has not settled are claimed again when their leases expire.
                    left = [delivery for delivery in runner.deliveries if delivery in self._in_flight]
                    self._reports.lost(left)
                    self._in_flight.drop(*left)
                    raise
                finally:
                    runner.deliveries = ()
                    if shares is not None:
                        self._note(runner, shares)
                    if self._stopping and not self.running():
                        self._quiet.set()
                if runner.task is not None and runner.task.cancelling():
                    await runner.forget_cancellation()
                    if self._attempts.ending:
                        raise asyncio.CancelledError
                queue.finished += len(taken)
                if shares is not None and self._others_wait(shares, queue):
                    return
        finally:
            self._end(runner)

    async def release(self, deliveries: Iterable[Delivery]) -> None:
        """Settle deliveries as if they had not been claimed."""
        for delivery in deliveries:
            self._settler.add(Release(delivery))
        await self._settler.flush()

    def cancel(self, lost: Iterable[Delivery]) -> None:
        """Stop handlers whose lease is lost or whose event was cancelled; their results are ignored."""
        gone = set(lost)
        for runner in tuple(self._runners):
            runner.lose(gone)
        for queue in self._fed.values():
            for delivery in [each for each in queue.waiting if each in gone]:
                queue.waiting.remove(delivery)
                self._reports.lost((delivery,))
                self._in_flight.drop(delivery)

    # --- life -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch over time limits; runners are started from here on, and end with it."""
        self._attempts.open()
        self._start_all()
        try:
            while True:
                now = time.monotonic()
                self._give_up_waiting(now)
                self._sources.cut_overdue()
                for runner in tuple(self._runners):
                    if runner.deliveries and now >= runner.deadline:
                        self._overrun(runner, runner.deliveries[0])
                await asyncio.sleep(self._tick)
        finally:
            self._attempts.end()
            tasks = [runner.task for runner in self._runners if runner.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._attempts.close()

    async def stop(self, grace: float) -> None:
        """Release what has not started, let the rest finish within the grace, release what has not finished."""
        self._stopping = self._attempts.stopping = True
        for queue in self._fed.values():
            while queue.waiting:
                self._settler.add(Release(queue.waiting.popleft()))
        await self._settler.flush()
        await self._quiet_within(grace)
        cancelled = [runner for runner in self._runners if runner.deliveries and not runner.in_thread]
        for runner in cancelled:
            runner.cancel("stopping")
        if cancelled:
            await self._quiet_within(_CANCEL_PATIENCE)
        for runner in tuple(self._runners):
            if runner.deliveries:  # threads, and handlers that refuse to be cancelled
                runner.cut()  # or the row would stay locked
            for delivery in runner.deliveries:
                # A thread ends with the process, and must not meet the next attempt before that.
                self._settler.add(Snooze(delivery, _EXIT_DELAY) if runner.in_thread else Release(delivery))
        await self._settler.finish()

    def _overrun(self, runner: Runner, delivery: Delivery) -> None:
        """End a handler that is past its time limit. One in a thread keeps its lease, or its lock, until it ends.

        Otherwise the next attempt would run beside it. Where the row is locked its lease cannot be extended, so the
        transaction is not cut: the next claim would find a lease that has expired. It is cut if the handler has
        returned: then the thread waits for a server that does not answer, and for nothing else.
        """
        if not (runner.in_thread or runner.cause):
            runner.cancel("timeout")
            runner.deadline = time.monotonic() + _CANCEL_NOTICE
            return
        runner.deadline = math.inf
        if runner.in_thread:
            if runner.has_returned:
                runner.cut()
                return
            runner.overrun = True
            runner.forbid()
            if runner.queue.shares is not None:
                runner.queue.shares.overrun(1)
                self._share(runner.queue.shares)
                self._tell_of_room(runner.queue)
        if self._hourly.due("overran", delivery.handler.name):
            self._observe(overrun_notice(delivery, in_thread=runner.in_thread))

    def _give_up_waiting(self, now: float) -> None:
        """Leave to another worker what has waited for a runner longer than a lease."""
        for queue in self._fed.values():
            waiting = queue.waiting
            while waiting and now - waiting[0].claimed_at > self._lease:
                self._settler.add(Snooze(waiting.popleft(), _SCARCE_DELAY))
        for shares, queues in self._sharing.items():
            if shares.spent and now - shares.changed_at > self._lease:
                most = max(queues, key=lambda queue: shares.held(queue.handler.name)).handler
                self._warn("connections" if most.transactional else "threads", most)

    async def _quiet_within(self, seconds: float) -> None:
        if self.running():
            self._quiet.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._quiet.wait()

    def _warn(self, scarce: str, handler: Handler) -> None:
        """Report that no thread or connection became free for a lease, once an hour."""
        if self._hourly.due(scarce):
            running = {each.handler.name for each in self.running() if each.started_at is not None}
            self._observe(exhausted_notice(scarce, handler, self._lease, running))
