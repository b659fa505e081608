"""Runs one handler: on the event loop, in a thread, or in a transaction. Workers and reactions run handlers this way.

A run ends with the handler's outcome, or raises its error. Who asked for the run decides what becomes of either.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from functools import partial

import asyncpg

from holdfast.chain import traceback_of
from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.handlers import Handler
from holdfast.handling.middleware import run_through
from holdfast.handling.sessions import Session, Sessions, ended_by_hand, terminate
from holdfast.handling.threads import Threads
from holdfast.lifespan import States
from holdfast.outcome import Outcome
from holdfast.telemetry import Notice, Observer

# Called on the event loop when the handler's own time begins; True when it does so in a thread.
Start = Callable[[bool], None]
HandlerCall = Callable[[], Awaitable[Outcome]]
# Begins and ends the transaction around the call, and returns what is left to settle: None for nothing.
HandlerTransaction = Callable[[Session, HandlerCall], Awaitable[Outcome | None]]


class HandlerRunner:
    """Runs handlers with the threads and database sessions of one process.

    `states` has what the lifespans of handlers yielded. `patience` is how long a handler may wait for a thread; by
    default, its own time limit.
    """

    def __init__(
        self, sessions: Sessions, threads: Threads, states: States, observe: Observer, *, patience: float | None = None
    ) -> None:
        self._states = states
        self._sessions = sessions
        self._threads = threads
        self._observe = observe
        self._patience = patience

    async def run(
        self,
        handler: Handler,
        event: EventEnvelope,
        context: HandlerContext,
        start: Start,
        transact: HandlerTransaction,
    ) -> Outcome | None:
        """Return the outcome of the handler, or for one that takes `tx`, what `transact` returns.

        `start` is called when the handler's own time begins: waiting for a thread or a session is not part of it.
        """
        if not handler.transactional:
            call = self._call_within if handler.middleware else self._call
            return await call(handler, context, start, None, event)
        session = await self._sessions.take()
        try:
            return await transact(session, partial(self._lend, session, handler, event, context, start))
        except BaseException:
            terminate(session)  # its state is unknown
            raise
        finally:
            self._sessions.release(session)

    async def _lend(
        self,
        session: Session,
        handler: Handler,
        event: EventEnvelope,
        context: HandlerContext,
        start: Start,
    ) -> Outcome:
        """Call the handler with the session, whose transaction must still be open afterwards."""
        session.lent = True
        try:
            call = self._call_within if handler.middleware else self._call
            outcome = await call(handler, context, start, session, event)
        finally:
            session.lent = False
        if session.is_in_transaction():
            return outcome
        # Some ways to end a transaction cannot be intercepted. If it was a commit, the event counts as handled, and
        # what the handler did after it was not part of the transaction.
        details: dict[str, object] = {
            "handler_name": handler.name,
            "delivery_id": str(context.delivery_id),
            "remedy": "let the handler return or raise; use tx.transaction() for a part that may fail",
        }
        self._observe(Notice("error", "transaction_ended_by_hand", details))
        raise ended_by_hand()

    async def _call(
        self,
        handler: Handler,
        context: HandlerContext,
        start: Start,
        tx: asyncpg.Connection | None,
        event: EventEnvelope,
    ) -> Outcome:
        state = self._states[handler.lifespans[-1]] if handler.wants_state else None
        extras, given = handler.extras(event, context, tx, state), handler.received(event)
        if handler.asynchronous:
            start(False)
            return handler.outcome_of(await handler.function(given, **extras))
        call = partial(contextvars.copy_context().run, handler.function, given, **extras)
        patience = handler.timeout if self._patience is None else self._patience
        return handler.outcome_of(await self._threads.call(call, partial(start, True), patience=patience))

    async def _call_within(
        self,
        handler: Handler,
        context: HandlerContext,
        start: Start,
        tx: asyncpg.Connection | None,
        event: EventEnvelope,
    ) -> Outcome:
        """Call the handler within its middlewares, which share its time limit."""

        async def innermost(event: EventEnvelope) -> Outcome:
            try:
                return await self._call(handler, context, start, tx, event)
            finally:
                start(False)  # what follows runs on the event loop, and can be cancelled

        start(False)
        return await run_through(handler.middleware, innermost, event, context, self._states)

    def close(self) -> None:
        """Let the threads end. The sessions belong to who made them."""
        self._threads.close()


def overran(handler: Handler, cancelled: object = None) -> TimeoutError:
    """The error of a handler that was cancelled at its time limit, with the traceback of where it stood then."""
    error = TimeoutError(f"the handler ran longer than its limit of {handler.timeout:g} s")
    return error.with_traceback(traceback_of(cancelled) if isinstance(cancelled, BaseException) else None)


async def limited(handler: Handler, run: Awaitable[Outcome | None]) -> Outcome | None:
    """Cancel the run at the handler's time limit."""
    try:
        async with asyncio.timeout(handler.timeout) as limit:
            return await run
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise overran(handler, error.__cause__) from None


async def commit(session: Session, transaction: asyncpg.transaction.Transaction, handler: Handler) -> None:
    """Commit the transaction of a handler; an error when a failed statement has made the server roll it back."""
    session.ended = ""
    await transaction.commit()
    if session.ended != "COMMIT":
        raise asyncpg.InFailedSQLTransactionError(
            f"{handler.name} went on after a statement had failed, and nothing could be committed; use "
            "tx.transaction() for a part that may fail"
        )
