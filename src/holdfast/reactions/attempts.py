"""One run of a reaction: as a worker would run the handler, without a delivery to settle."""

import asyncio
import contextvars
from collections.abc import Mapping
from functools import partial

import asyncpg

from holdfast.context import HandlerContext, current_context
from holdfast.envelope import EventEnvelope
from holdfast.handlers import Handler
from holdfast.handling.sessions import SILENCE, Sessions, ended_by_hand, terminate
from holdfast.handling.threads import Threads
from holdfast.outcome import Done, Outcome
from holdfast.postgres.reactions import ReactionStatements

# What became of a reaction; None: the event was handled before.
Result = Outcome | BaseException | None


class _Undone(Exception):
    """Rolls the transaction of a reaction back that did not end in Done."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Attempts:
    """Runs handlers on the loop, in threads, or in a transaction of their own."""

    def __init__(self, statements: ReactionStatements, sessions: Sessions, threads: Threads) -> None:
        self._statements = statements
        self._sessions = sessions
        self._threads = threads

    async def run(self, handler: Handler, event: EventEnvelope, headers: Mapping[str, str]) -> Result:
        """In a task of its own. Raises nothing but the cancellation of that task."""
        context = HandlerContext(event.event_id, event.event_id, handler.name, 1, headers, event.trace_context)
        current_context.set(context)
        try:
            if handler.transactional:
                return await self._in_transaction(handler, event, context)
            return await self._call(handler, event, context, None)
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return error  # the handler's own doing
        except BaseException as error:
            return error

    async def _call(
        self, handler: Handler, event: EventEnvelope, context: HandlerContext, tx: asyncpg.Connection | None
    ) -> Outcome:
        extras = handler.extras(event, context, tx)
        try:
            async with asyncio.timeout(handler.timeout) as limit:
                if handler.asynchronous:
                    return handler.outcome_of(await handler.function(event, **extras))
                call = partial(contextvars.copy_context().run, handler.function, event, **extras)
                return handler.outcome_of(await self._threads.call(call, lambda: None, patience=handler.timeout))
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"the handler ran longer than its limit of {handler.timeout:g} s") from None

    async def _in_transaction(self, handler: Handler, event: EventEnvelope, context: HandlerContext) -> Outcome | None:
        await self._sessions.take_turn()
        session = None
        try:
            session = await self._sessions.take()
            session.ended = ""
            async with session.transaction(isolation="read_committed"):
                idle = handler.timeout + SILENCE
                if not await self._statements.enter(session, handler.name, event, idle):
                    return None
                session.lent = True
                try:
                    outcome = await self._call(handler, event, context, session)
                finally:
                    session.lent = False
                if not isinstance(outcome, Done):
                    raise _Undone(outcome)
                if not session.is_in_transaction():
                    raise ended_by_hand()
            if session.ended != "COMMIT":
                raise asyncpg.InFailedSQLTransactionError(
                    f"{handler.name} went on after a statement had failed, and nothing could be committed; use "
                    "tx.transaction() for a part that may fail"
                )
            return outcome
        except _Undone as undone:
            return undone.outcome
        except BaseException:
            terminate(session)  # in what state, nobody knows
            raise
        finally:
            self._sessions.release(session)
