"""One attempt of a batch handler: several deliveries in one call, an outcome for each.

A call that raises is repeated with each half of its deliveries, and so on, until the one that fails is alone: it fails
as it would have by itself (see attempts.py), and the others are done. Nothing counts as an attempt but what failed
alone. A batch of n is called at most 2n - 1 times. When many calls in a row have failed, something else is wrong than
one event: what is left is put off, without an attempt.
"""

import asyncio
import contextvars
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from holdfast.context import HandlerContext, current_context
from holdfast.deprecation import warn_if_deprecated
from holdfast.envelope import EventEnvelope
from holdfast.failure import describe
from holdfast.handlers import Handler
from holdfast.handling.calls import BatchCall, BatchResults
from holdfast.handling.sessions import NoConnection, NoSession
from holdfast.handling.threads import NoThread
from holdfast.outcome import DONE, Done
from holdfast.postgres.delivery import Delivery
from holdfast.telemetry import Notice
from holdfast.tracing import HandleSpan
from holdfast.worker.attempts import Attempts, conclude
from holdfast.worker.batch_transactions import BatchTransactions, Committed
from holdfast.worker.decoding import decode
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.runners import Runner
from holdfast.worker.settlements import Release, Settlement, Snooze, deliveries_of
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared

# How long what is left is put off when nothing succeeds.
_PUT_OFF = 1.0


class _Item(NamedTuple):
    """One delivery of a batch, decoded."""

    delivery: Delivery
    event: EventEnvelope
    context: HandlerContext


class Batches:
    """Calls batch handlers, and settles what becomes of their deliveries."""

    def __init__(self, shared: Shared, settler: Settler, attempts: Attempts) -> None:
        self._settler = settler
        self._attempts = attempts
        self._transactions = BatchTransactions(shared, settler, attempts.transactions)
        self._in_flight = shared.in_flight
        self._held = shared.held
        self._breakers = shared.breakers
        self._reports = shared.reports
        self._observe = shared.observe
        self._tracing = shared.tracing
        self._hourly = HourlyLimit()

    async def run(self, runner: Runner, taken: Sequence[Delivery]) -> None:
        """Run a batch. Raises NoThread or NoSession when the handler could not begin with what is left."""
        runner.deliveries = [each for each in taken if not self._attempts.pass_over(each)]
        runner.lost.clear()
        with self._spans(runner.deliveries):
            try:
                await self._halve(runner, self._decoded(runner))
            except (NoThread, NoSession):
                for each in runner.deliveries:
                    conclude(Snooze(each, 0.0))
                raise
            finally:
                runner.called = ()

    def _decoded(self, runner: Runner) -> list[_Item]:
        """Return what the deliveries carry. A row that cannot be decoded fails alone."""
        items = []
        for delivery in list(runner.deliveries):
            try:
                event, context = decode(delivery)
            except Exception as error:
                self._settle(runner, [self._attempts.judged(delivery, error)])
            else:
                warn_if_deprecated(event.event_type, self._observe)
                items.append(_Item(delivery, event, context))
        return items

    async def _halve(self, runner: Runner, items: list[_Item]) -> None:
        """Call the handler with all of them, and where that fails with halves."""
        groups = [items]
        failures, most, succeeded = 0, 2 * math.ceil(math.log2(max(len(items), 2))) + 4, False
        while groups:
            group = self._without_lost(runner, groups.pop())
            if not group:
                continue
            if self._attempts.stopping or self._breakers.stops(runner.queue.handler):
                self._settle(runner, [Release(each.delivery) for each in group])
            elif failures >= most:
                self._settle(runner, [Snooze(each.delivery, _PUT_OFF) for each in group])
            else:
                runner.failed = False
                groups += await self._call(runner, group)
                failures = failures + 1 if runner.failed else 0
                succeeded |= not runner.failed
        runner.failed = not succeeded and bool(items)

    def _without_lost(self, runner: Runner, group: list[_Item]) -> list[_Item]:
        if not runner.lost:
            return group
        self._lose(runner, [each.delivery for each in group if each.delivery in runner.lost])
        return [each for each in group if each.delivery not in runner.lost]

    async def _call(self, runner: Runner, group: list[_Item]) -> list[list[_Item]]:
        """Call the handler once. Returns what is left, in groups to call it with, the first one last."""
        runner.called = [each.delivery for each in group]
        runner.threaded, runner.deadline = False, math.inf
        error: BaseException | None = None
        if len(group) == 1:
            await self._attempts.run_and_settle(runner, group[0].delivery)
            self._leave(runner, runner.called)
        else:
            error = await self._run(runner, group)
        cause = runner.cause
        if runner.task is not None and runner.task.cancelling():
            await runner.forget_cancellation()
        if error is None:
            return []
        unsettled = set(runner.deliveries)
        group = [each for each in group if each.delivery in unsettled]
        if isinstance(error, asyncio.CancelledError) and cause == "stopping":
            self._settle(runner, [Release(each.delivery) for each in group])
            return []
        if isinstance(error, asyncio.CancelledError) and cause == "lost":
            return [group]
        runner.failed = True
        self._report(runner.queue.handler, len(group), error)
        middle = (len(group) + 1) // 2
        return [group[middle:], group[:middle]]

    async def _run(self, runner: Runner, group: list[_Item]) -> BaseException | None:
        """Call the handler with several deliveries, and settle what that has decided; return its error if it failed."""
        handler = runner.queue.handler
        call = BatchCall(handler, [each.event for each in group], [each.context for each in group])
        ended: Committed | BatchResults | BaseException
        token = current_context.set(None)
        try:
            if handler.transactional:
                lend = partial(self._attempts.handlers.transact, call, runner.start)
                ended = await self._transactions.run(runner.called, call, self._attempts.judged, lend)
            else:
                ended = await self._attempts.handlers.run(call, runner.start)
        except (NoThread, NoSession):
            raise
        except NoConnection as missing:
            # The handler has not begun: this counts no attempt.
            delay = self._attempts.transactions.outage.begin(missing.fault)
            ended = Committed(again=[Snooze(each, delay) for each in runner.called])
        except BaseException as error:
            if self._attempts.ending and isinstance(error, asyncio.CancelledError):
                raise
            ended = error
        finally:
            current_context.reset(token)
        if runner.overrun:
            committed = isinstance(ended, Committed) and ended.error is None
            given = None if committed else ended if isinstance(ended, BaseException) else DONE
            late = self._attempts.back(runner, given)
            ended = late if isinstance(late, BaseException) else ended
        if isinstance(ended, Committed):
            self._committed(runner, ended)
            return ended.error
        if isinstance(ended, BaseException):
            return ended
        self._returned(runner, ended)
        return None

    def _returned(self, runner: Runner, results: BatchResults) -> None:
        """Settle what a call without a transaction has returned for its deliveries."""
        ended_at = time.monotonic()
        delivered = []
        for delivery, result in zip(runner.called, results, strict=True):
            delivery.ended_at = ended_at
            if isinstance(result, Done):
                self._settler.deliver(delivery)
                delivered.append(delivery)
            else:
                self._settler.add(self._attempts.judged(delivery, result))
        self._tell_breaker(delivered)
        self._leave(runner, runner.called)

    def _committed(self, runner: Runner, committed: Committed) -> None:
        """Count and report what a transaction has settled, and settle what it could not."""
        for each in committed.duplicates:
            if each.span is not None:
                each.span.conclude("duplicate")
        self._reports.delivered(committed.delivered)
        self._reports.duplicated(committed.duplicates)
        for settlement in committed.settlements:
            self._settler.committed(settlement)
        settled = [*committed.delivered, *committed.duplicates, *deliveries_of(committed.settlements)]
        self._in_flight.drop(*settled)
        self._held.freed(settled)
        self._tell_breaker(committed.delivered)
        self._leave(runner, settled)
        self._lose(runner, committed.lost)
        self._settle(runner, committed.again)

    def _tell_breaker(self, delivered: Sequence[Delivery]) -> None:
        """Note that a handler with a breaker has succeeded: once for a call."""
        if delivered and delivered[0].handler.breaker is not None:
            self._settler.succeeded(delivered[0])

    def _settle(self, runner: Runner, settlements: Sequence[Settlement]) -> None:
        for settlement in settlements:
            conclude(settlement)
            self._settler.add(settlement)
        self._leave(runner, deliveries_of(settlements))

    def _lose(self, runner: Runner, lost: Sequence[Delivery]) -> None:
        for delivery in lost:
            self._attempts.lose(delivery)
        self._leave(runner, lost)

    def _leave(self, runner: Runner, settled: Sequence[Delivery]) -> None:
        """Note that this runner has nothing more to do with them."""
        gone = set(settled)
        runner.deliveries = [each for each in runner.deliveries if each not in gone]

    def _report(self, handler: Handler, events: int, error: BaseException) -> None:
        """Report that a call failed for several events, once an hour: alone each of them may succeed."""
        if self._hourly.due("batch_halved", handler.name):
            details: dict[str, object] = {
                "handler_name": handler.name,
                "events": events,
                "error": describe(error).type_name,
                "action": "calling the handler with halves, until the event that fails is alone",
                "remedy": "return the exception or an outcome for the event that fails: no call is repeated then",
            }
            self._observe(Notice("warning", "batch_halved", details))

    @contextmanager
    def _spans(self, deliveries: Sequence[Delivery]) -> Iterator[None]:
        """Trace each attempt. The handler runs in none of the spans: it has several events."""
        opened: list[tuple[contextvars.Context, HandleSpan]] = []
        try:
            tracing = self._tracing
            for delivery in deliveries:
                if tracing is None:
                    break
                span = tracing.handle(delivery)
                if span is not None and span.recording:
                    variables = contextvars.copy_context()
                    variables.run(span.__enter__)
                    opened.append((variables, span))
                    delivery.span = span
            yield
        finally:
            for variables, span in opened:
                variables.run(span.__exit__, None, None, None)
