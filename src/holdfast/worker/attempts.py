"""One attempt: skip what is already handled, expired or over its budget; decode; run; judge; settle."""

import asyncio
from collections.abc import Sequence
from functools import partial

from holdfast.context import current_context
from holdfast.deprecation import warn_if_deprecated
from holdfast.handlers import Handler
from holdfast.handling.runner import HandlerRunner, overran
from holdfast.handling.sessions import NoConnection, NoSession
from holdfast.handling.threads import NoThread, Threads
from holdfast.outcome import Done, Outcome
from holdfast.postgres.delivery import Delivery
from holdfast.worker.decoding import decode
from holdfast.worker.runners import Runner
from holdfast.worker.settlements import Judge, Release, Setback, Settlement, Snooze
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared
from holdfast.worker.transactions import LeaseLost, PutOff, Transactions

# How long one of two copies of a key waits for the other: then the claim finds in the inbox what became of it.
_TWIN_DELAY = 0.5


class Attempts:
    """Turns what a handler does with a delivery into its settlement."""

    def __init__(self, shared: Shared, settler: Settler, judge: Judge, handlers: Sequence[Handler]) -> None:
        self._settler = settler
        self._judge = judge
        self._transactions = Transactions(shared, settler)
        self._in_flight = shared.in_flight
        self._counters = shared.counters
        self._observe = shared.observe
        self._sessions = shared.connections.sessions
        self._states = shared.states
        self._lease = shared.settings.lease  # and how long a delivery may wait for a thread
        # The dispatcher decides who gets a thread. There may be as many for slow handlers as for quick ones, as many
        # again in place of those that hang, and one more for each handler.
        self._most_threads = 3 * shared.settings.threads + sum(not handler.asynchronous for handler in handlers)
        self.open()

    def open(self) -> None:
        """Let attempts begin, with new threads."""
        self.ending = False  # an attempt that is cancelled from now on raises, and is not settled
        threads = Threads(self._most_threads)
        self._handlers = HandlerRunner(self._sessions, threads, self._states, self._observe, patience=self._lease)

    def end(self) -> None:
        """Settle nothing of what is cancelled from now on."""
        self.ending = True

    def close(self) -> None:
        """Let the threads end."""
        self._handlers.close()

    def pass_over(self, delivery: Delivery) -> bool:
        """Settle a delivery that must not run; false when it must."""
        if delivery.handled:
            self._settler.duplicate(delivery)
        elif delivery.twin:
            self._settler.add(Snooze(delivery, _TWIN_DELAY))
        elif delivery.cancelled:
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

    async def run(self, runner: Runner, delivery: Delivery) -> None:
        """Run the handler, and settle the delivery. Raises NoThread or NoSession when the handler could not begin."""
        handler = delivery.handler
        result: Outcome | BaseException | None
        try:
            event, context = decode(delivery)
            warn_if_deprecated(event.event_type, self._observe)
            token = current_context.set(context)
            try:
                if handler.plain:
                    # As HandlerRunner would do it, without the calls in between: nearly every event comes here.
                    runner.start()
                    result = handler.outcome_of(await handler.function(event))
                else:
                    transact = partial(self._transactions.run, delivery, partial(self._verdict, runner, delivery))
                    result = await self._handlers.run(handler, event, context, runner.start, transact)
            finally:
                current_context.reset(token)
        except (NoThread, NoSession):
            raise
        except NoConnection as missing:
            # The handler has not begun: this counts no attempt.
            self._settler.add(Snooze(delivery, self._transactions.outage.begin(missing.fault)))
            return
        except LeaseLost:
            self._lose(delivery)
            return
        except BaseException as error:
            result = error
        if runner.overrun:
            result = self._back(runner, result)
        if result is None:
            self._in_flight.drop(delivery)  # settled in its transaction
        elif isinstance(result, Done):
            self._settler.deliver(delivery)
        else:
            settlement = self._verdict(runner, delivery, result)
            if settlement is None:
                self._lose(delivery)
            else:
                self._settler.add(settlement)

    def _back(self, runner: Runner, result: Outcome | BaseException | None) -> Outcome | BaseException | None:
        """Return what counts when a thread past the time limit has come back: the limit, unless it was cancelled."""
        runner.overrun = False
        if runner.queue.shares is not None:
            runner.queue.shares.overrun(-1)
        return result if runner.cause or self.ending else overran(runner.queue.handler, result)

    def _lose(self, delivery: Delivery) -> None:
        self._counters.lost_leases += 1
        self._in_flight.drop(delivery)

    def _verdict(self, runner: Runner, delivery: Delivery, setback: Setback) -> Settlement | None:
        """How to settle an attempt that did not succeed; None when its lease is lost."""
        runner.failed = not isinstance(setback, PutOff)
        if isinstance(setback, asyncio.CancelledError):
            if self.ending:
                raise setback
            if runner.cause == "lost":
                return None
            if runner.cause == "stopping":
                return Release(delivery)
            if runner.cause == "timeout":
                setback = overran(delivery.handler, setback)
        return self._judge.settlement(delivery, setback)
