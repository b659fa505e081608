"""One attempt: skip what is already handled, expired or over its budget; decode; run; judge; settle."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from holdfast.context import current_context
from holdfast.deprecation import warn_if_deprecated
from holdfast.failure import ErrorReport
from holdfast.handler_tally import DeliveryOutcome
from holdfast.handlers import Handler
from holdfast.handling.calls import EventCall
from holdfast.handling.django_connections import close_connections, renew_after
from holdfast.handling.runner import HandlerRunner, overran
from holdfast.handling.sessions import NoConnection, NoSession
from holdfast.handling.threads import NoThread, Threads
from holdfast.outcome import Done, Outcome
from holdfast.postgres.delivery import Delivery
from holdfast.tracing import LEASE_LOST, HandleSpan, Tracing
from holdfast.worker.decoding import decode
from holdfast.worker.runners import Runner
from holdfast.worker.settlements import Fail, Falter, Judge, Release, Retry, Setback, Settlement, Snooze
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
        self.transactions = Transactions(shared, settler)
        self._in_flight = shared.in_flight
        self._held = shared.held
        self._breakers = shared.breakers
        self._reports = shared.reports
        self._observe = shared.observe
        self._sessions = shared.connections.sessions
        self._sources = shared.connections.sources
        self._states = shared.states
        self._tracing = shared.tracing
        # One function or the other, so that what does not trace does not ask for each event whether to.
        self.run: Callable[[Runner, Delivery], Awaitable[None]] = (
            self.run_and_settle if shared.tracing is None else partial(self._run_traced, shared.tracing)
        )
        self._lease = shared.settings.lease  # and how long a delivery may wait for a thread
        # The dispatcher decides who gets a thread. There may be as many for slow handlers as for quick ones, as many
        # again in place of those that hang, and one more for each handler.
        self._transaction_threads = shared.settings.sessions_at_most(sum(handler.transactional for handler in handlers))
        self._most_threads = 3 * shared.settings.threads + sum(not handler.asynchronous for handler in handlers)
        self.open()

    def open(self) -> None:
        """Let attempts begin, with new threads."""
        self.ending = False  # an attempt that is cancelled from now on raises, and is not settled
        self.stopping = False  # what has not been called is given back
        threads = Threads(self._most_threads, at_end=close_connections)
        self.handlers = HandlerRunner(
            self._sessions,
            self._sources,
            threads,
            self._states,
            self._observe,
            transaction_threads=self._transaction_threads,
            patience=self._lease,
        )

    def end(self) -> None:
        """Settle nothing of what is cancelled from now on."""
        self.ending = True

    def close(self) -> None:
        """Let the threads end."""
        self.handlers.close()

    def pass_over(self, delivery: Delivery) -> bool:
        """Settle a delivery that must not run; false when it must."""
        if delivery.handled:
            self._conclude(delivery, "duplicate")
            self._settler.duplicate(delivery)
        elif delivery.twin:
            self._conclude(delivery, "snoozed")
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
        settlement = self._judge.fail(delivery, reason, text)
        self._conclude(delivery, *_conclusion(settlement))
        self._settler.add(settlement)

    def _conclude(self, delivery: Delivery, outcome: DeliveryOutcome, report: ErrorReport | None = None) -> None:
        """Trace a delivery that does not run."""
        if self._tracing is not None and (begun := self._tracing.handle(delivery)) is not None:
            with begun as span:
                if span.recording:
                    span.conclude(outcome, report)
                    delivery.span = span

    def _run_traced(self, tracing: Tracing, runner: Runner, delivery: Delivery) -> Awaitable[None]:
        span = tracing.handle(delivery)
        # Where few are sampled nearly every event is run without a span, and without a call around it.
        if span is None:
            return self.run_and_settle(runner, delivery)
        run = self._run_recorded if span.recording else self.run_and_settle
        return run(runner, delivery, span)

    async def _run_recorded(self, runner: Runner, delivery: Delivery, span: HandleSpan) -> None:
        with span:
            delivery.span = span
            try:
                await self.run_and_settle(runner, delivery)
            except (NoThread, NoSession):
                span.conclude("snoozed")
                raise

    async def run_and_settle(self, runner: Runner, delivery: Delivery, unrecorded: HandleSpan | None = None) -> None:
        """Run the handler, and settle the delivery. Raises NoThread or NoSession when the handler could not begin.

        A span that is not recorded is the current one while the handler runs.
        """
        handler = delivery.handler
        result: Outcome | BaseException | None
        try:
            event, context = decode(delivery)
            warn_if_deprecated(event.event_type, self._observe)
            if unrecorded is not None:
                unrecorded.__enter__()
            token = current_context.set(context)
            try:
                if handler.plain:
                    # As HandlerRunner would do it, without the calls in between: nearly every event comes here.
                    runner.start()
                    result = handler.outcome_of(await handler.function(event))
                elif handler.transactional:
                    lend = partial(self.handlers.transact, EventCall(handler, event, context), runner.start)
                    result = await self.transactions.run(delivery, partial(self._decide, runner, delivery), lend)
                else:
                    result = await self.handlers.run(EventCall(handler, event, context), runner.start)
            finally:
                current_context.reset(token)
                if unrecorded is not None:
                    unrecorded.__exit__(None, None, None)
        except (NoThread, NoSession):
            raise
        except NoConnection as missing:
            # The handler has not begun: this counts no attempt.
            if delivery.span is not None:
                delivery.span.conclude("snoozed")
            self._settler.add(Snooze(delivery, self.transactions.outage.begin(missing.fault)))
            return
        except LeaseLost:
            self.lose(delivery)
            return
        except BaseException as error:
            result = error
            if handler.plain:
                renew_after(error)
        if runner.overrun:
            result = self.back(runner, result)
        if result is None:
            self._in_flight.drop(delivery)  # settled in its transaction
            self._held.freed((delivery,))
            return
        delivery.ended_at = time.monotonic()
        if isinstance(result, Done):
            runner.queue.handled += 1
            if handler.breaker is not None:
                self._settler.succeeded(delivery)
            self._settler.deliver(delivery)
        else:
            settlement = self._decide(runner, delivery, result)
            # The error refers to this frame by its traceback: without this, only the garbage collector frees both.
            result = None
            if settlement is None:
                self.lose(delivery)
            else:
                self._settler.add(settlement)

    def back(self, runner: Runner, result: Outcome | BaseException | None) -> Outcome | BaseException | None:
        """Return what counts when a thread past the time limit has come back: the limit, unless it was cancelled."""
        runner.overrun = False
        if runner.queue.shares is not None:
            runner.queue.shares.overrun(-1)
        if result is None:
            return None  # committed at the last moment
        return result if runner.cause or self.ending else overran(runner.queue.handler, result)

    def lose(self, delivery: Delivery) -> None:
        """Leave a delivery to the worker that has its lease, or will have it."""
        if delivery.span is not None:
            delivery.span.conclude("lost_lease", LEASE_LOST)
        self._reports.lost((delivery,))
        self._in_flight.drop(delivery)

    def _decide(self, runner: Runner, delivery: Delivery, setback: Setback) -> Settlement | None:
        """How to settle an attempt that did not succeed; None when its lease is lost."""
        runner.failed = not isinstance(setback, PutOff)
        if isinstance(setback, asyncio.CancelledError):
            if self.ending:
                raise setback
            if runner.cause == "lost":
                return None
            if runner.cause == "stopping":
                if delivery.span is not None:
                    delivery.span.conclude("released")
                return Release(delivery)
            if runner.cause == "timeout":
                setback = overran(delivery.handler, setback)
        return self.judged(delivery, setback)

    def judged(self, delivery: Delivery, setback: Setback) -> Settlement:
        """How to settle an attempt that ended with such an outcome or error."""
        settlement = self._judge.settlement(delivery, setback)
        if isinstance(settlement, Falter):
            settlement.after_success = self._breakers.failed(delivery)
        conclude(settlement)
        return settlement


def conclude(settlement: Settlement) -> None:
    """Say in the span of a delivery, if it has one, how the attempt has ended."""
    if settlement.delivery.span is not None:
        settlement.delivery.span.conclude(*_conclusion(settlement))


def _conclusion(settlement: Settlement) -> tuple[DeliveryOutcome, ErrorReport | None]:
    """Return what a settlement makes of an attempt, and the error, if it is one."""
    match settlement:
        case Retry() | Falter():
            return "retried", settlement.report
        case Snooze():
            return "snoozed", None
        case Release():
            return "released", None
        case Fail(reason="expired"):
            return "expired", None
        case Fail(reason="cancelled"):
            return "cancelled", None
    return "failed", settlement.report or ErrorReport(settlement.reason, settlement.reason, "")
