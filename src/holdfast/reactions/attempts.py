"""One run of a reaction. It has no delivery to settle: in a transaction, only the inbox row commits with its writes."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple
from uuid import UUID

from holdfast.context import HandlerContext, current_context
from holdfast.envelope import EventEnvelope
from holdfast.event_data import EventData
from holdfast.failure import Redactor, describe, state
from holdfast.handlers import Handler
from holdfast.handling.application.handler_thread import HandlerThread
from holdfast.handling.calls import EventCall
from holdfast.handling.handler_transaction import HandlerTransaction
from holdfast.handling.runner import HandlerCall, HandlerRunner, limited, overran
from holdfast.handling.sessions import SILENCE, NoConnection
from holdfast.outcome import Done, Outcome
from holdfast.postgres.reactions import ReactionStatements
from holdfast.tracing import HandleSpan, Tracing

# The result of a reaction; None if the event was handled before.
Result = Outcome | BaseException | None


class _Message(NamedTuple):
    """An event as the span of a reaction describes it."""

    event_id: UUID
    event_type: str
    source: str
    trace_context: str | None
    handler_name: str
    attempts: int = 1


class Attempts:
    """Runs each reaction once, within its time limit."""

    def __init__(
        self, statements: ReactionStatements, runner: HandlerRunner, tracing: Tracing | None, redact: Redactor | None
    ) -> None:
        self._statements = statements
        self._runner = runner
        self._tracing = tracing
        self._redact = redact

    async def run(self, handler: Handler, event: EventEnvelope, headers: Mapping[str, str]) -> Result:
        """Run the handler in a task of its own; raise only if that task is cancelled."""
        if self._tracing is None:
            return await self._run(handler, event, headers)
        message = _Message(event.event_id, event.event_type, event.source, event.trace_context, handler.name)
        self._tracing.hand_on()
        begun = self._tracing.handle(message)
        if begun is None:
            return await self._run(handler, event, headers)
        with begun as span:
            result = await self._run(handler, event, headers)
            if span.recording:
                self._conclude(span, result, handler, EventData.of(event, headers))
            return result

    def _conclude(self, span: HandleSpan, result: Result, handler: Handler, event: EventData) -> None:
        if result is None:
            span.conclude("duplicate")
        elif isinstance(result, BaseException):
            span.conclude("failed", describe(result, self._redact, event, handler.package))
        elif not isinstance(result, Done):
            name = type(result).__name__
            span.conclude("failed", state(str(getattr(result, "reason", None) or name), name, self._redact, event))

    async def _run(self, handler: Handler, event: EventEnvelope, headers: Mapping[str, str]) -> Result:
        context = HandlerContext(event.event_id, event.event_id, handler.name, 1, headers, event.trace_context)
        current_context.set(context)
        call, limit = EventCall(handler, event, context), _Limit(handler.timeout)
        try:
            if handler.transactional:
                conduct = partial(self._conduct, handler, event)
                result = await self._runner.transact(call, limit.start, conduct)
                return overran(handler) if limit.passed and isinstance(result, Exception) else result
            return await limited(handler, self._runner.run(call, limit.start))
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return error  # the handler has cancelled itself
        except NoConnection as missing:
            return missing.fault
        except BaseException as error:
            return overran(handler) if limit.passed else error
        finally:
            limit.end()

    async def _conduct(
        self, handler: Handler, event: EventEnvelope, transaction: HandlerTransaction, call: HandlerCall[Outcome]
    ) -> Result:
        """BEGIN; write the inbox; handler; COMMIT. Only the handler has a time limit. None: it was handled before.

        An error is returned when the transaction is rolled back, and raised when the connection cannot be used again.
        """
        result: Result = None
        unhandled = await transaction.enter(
            partial(self._statements.enter, handler=handler.name, event=event, idle=handler.timeout + SILENCE)
        )
        try:
            if unhandled:
                result = await (limited(handler, call()) if handler.asynchronous else call())
            if isinstance(result, Done):
                await transaction.finish()
                await transaction.commit(handler)
                return result
        except Exception as error:
            result = error
        try:
            await transaction.rollback()
        except Exception:  # the server does it when the session is terminated
            if isinstance(result, Exception):
                raise result from None
            raise
        return result


class _Limit:
    """The time limit of a reaction in a thread, which cannot be cancelled: its connection is cut.

    For any other reaction there is nothing to note: its limit includes the wait for a thread.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self.passed = False

    def start(self, _in_thread: bool, thread: HandlerThread | None = None) -> None:
        if thread is not None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._pass, thread)

    def _pass(self, thread: HandlerThread) -> None:
        self.passed = True
        thread.sever()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
