"""Runs one handler: on the event loop, in a thread, or in a transaction. Workers and reactions run handlers this way.

A run ends with the handler's outcome, or for a batch with the result of each event, or raises the handler's error. Who
asked for the run decides what becomes of it.
"""

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from holdfast.chain import traceback_of
from holdfast.failure import describe
from holdfast.handlers import Handler
from holdfast.handling.application.handler_thread import HandlerThread
from holdfast.handling.application.sources import Source, Sources, finished
from holdfast.handling.calls import Call
from holdfast.handling.django_connections import renew_after, renew_connections
from holdfast.handling.handler_transaction import HandlerTransaction, OwnTransaction
from holdfast.handling.sessions import EndedByHand, Sessions, terminate
from holdfast.handling.threads import Threads
from holdfast.lifespan import States
from holdfast.telemetry import Notice, Observer
from holdfast.transaction_kinds import ASYNCPG

R = TypeVar("R")
T = TypeVar("T")

HandlerCall = Callable[[], Awaitable[R]]
# Begins and ends the transaction around the call, and returns its result.
Conduct = Callable[[HandlerTransaction, HandlerCall[R]], Awaitable[T]]


class Start(Protocol):
    """Called on the event loop when the handler's own time begins; with True when it does so in a thread.

    `thread` is that thread, if it has a transaction.
    """

    def __call__(self, in_thread: bool, thread: HandlerThread | None = None, /) -> None: ...


class HandlerRunner:
    """Runs handlers with the threads and database sessions of one process.

    Those that take a transaction of the application's get it from `sources`, and one of `transaction_threads` for it.
    `states` has what the lifespans of handlers yielded. `patience` is how long a handler may wait for a thread; by
    default, its own time limit.
    """

    def __init__(
        self,
        sessions: Sessions,
        sources: Sources,
        threads: Threads,
        states: States,
        observe: Observer,
        *,
        transaction_threads: int = 1,
        patience: float | None = None,
    ) -> None:
        self._states = states
        self._sessions = sessions
        self._sources = sources
        self._threads = threads
        # Handlers that take a transaction have threads of their own: Django keeps a connection for each thread.
        self._transaction_threads = Threads(transaction_threads, at_end=sources.leave_thread)
        self._observe = observe
        self._patience = patience

    async def run(self, call: Call[R], start: Start) -> R:
        """Return the outcome of a handler that takes no `tx`.

        `start` is called when the handler's own time begins: waiting for a thread or a session is not part of it.
        """
        run = self._call_within if call.handler.middleware else self._call
        return await run(call, start, None)

    async def transact(self, call: Call[R], start: Start, conduct: Conduct[R, T]) -> T:
        """Run a handler that takes `tx` in a transaction, and return what `conduct` returns."""
        kind = call.handler.parameters.transaction
        if kind is not None and kind is not ASYNCPG:
            return await self._transact_in_application(self._sources.of(kind), call, start, conduct)
        session = await self._sessions.take()
        try:
            transaction = OwnTransaction(session)
            run = self._call_within if call.handler.middleware else self._call
            return await conduct(transaction, partial(self._lend, transaction, call, start, run))
        except BaseException:
            terminate(session)  # its state is unknown
            raise
        finally:
            self._sessions.release(session)

    async def _transact_in_application(self, source: Source, call: Call[R], start: Start, conduct: Conduct[R, T]) -> T:
        """Run the handler in a transaction of the application's library: on the event loop, or wholly in one thread."""
        handler = call.handler
        transaction = source.transaction()
        lend = partial(self._lend, transaction, call, start)
        patience = handler.timeout if self._patience is None else self._patience
        try:
            if source.kind.asynchronous:
                run = self._call_within if handler.middleware else self._call
                return await source.lend(transaction, conduct, partial(lend, run), patience)
            thread = HandlerThread(asyncio.get_running_loop(), transaction)

            def work(answer: Callable[[object], None]) -> None:
                here = partial(lend, partial(self._call_here, thread))
                finished(source.lend(transaction, conduct, here, answer=answer))

            variables = contextvars.copy_context()

            def entering(answer: Callable[[object], None]) -> None:
                variables.run(work, answer)

            try:
                return cast(T, await self._transaction_threads.call(entering, _entering, patience=patience, early=True))
            except asyncio.CancelledError:
                thread.sever()  # it goes on until it ends by itself, and must not commit
                raise
        finally:
            if transaction.after_commit_error is not None:
                self._observe(_after_commit_failed(call, transaction.after_commit_error))

    async def _lend(
        self,
        transaction: HandlerTransaction,
        call: Call[R],
        start: Start,
        run: Callable[[Call[R], Start, object], Awaitable[R]],
    ) -> R:
        """Call the handler with its transaction, which must still be open afterwards."""
        transaction.lend()
        try:
            outcome = await run(call, start, transaction.tx)
        finally:
            still_open = transaction.take_back()
        if still_open and transaction.refused:
            raise EndedByHand(transaction.savepoint)  # which the handler has caught
        if still_open:
            return outcome
        # Some ways to end a transaction cannot be intercepted. If it was a commit, the event counts as handled, and
        # what the handler did after it was not part of the transaction.
        details: dict[str, object] = {
            "handler_name": call.handler.name,
            "delivery_id": str(call.delivery_id),
            "remedy": f"let the handler return or raise; use {transaction.savepoint} for a part that may fail",
        }
        self._observe(Notice("error", "transaction_ended_by_hand", details))
        raise EndedByHand(transaction.savepoint, has_ended=True)

    async def _call(self, call: Call[R], start: Start, tx: object) -> R:
        handler = call.handler
        function = call.prepared(tx, self._state(handler))
        if handler.asynchronous:
            start(False)
            try:
                return call.result_of(await function())
            except Exception as error:
                renew_after(error)
                raise
        in_context = partial(contextvars.copy_context().run, _in_thread, function)
        patience = handler.timeout if self._patience is None else self._patience
        return call.result_of(await self._threads.call(in_context, partial(start, True), patience=patience))

    async def _call_within(self, call: Call[R], start: Start, tx: object) -> R:
        """Call the handler within its middlewares, which share its time limit."""

        async def innermost(call: Call[R]) -> R:
            try:
                return await self._call(call, start, tx)
            finally:
                start(False)  # what follows runs on the event loop, and can be cancelled

        start(False)
        return await call.through(self._states, innermost)

    async def _call_here(self, thread: HandlerThread, call: Call[R], start: Start, tx: object) -> R:
        """Call the handler in this thread, which has its transaction. It never suspends."""
        thread.started_at = time.monotonic()
        thread.post(start, True, thread)
        if not call.handler.middleware:
            return self._outcome(tx, call)
        return thread.run_through(call, partial(self._outcome, tx), self._states)

    def _outcome(self, tx: object, call: Call[R]) -> R:
        return call.result_of(call.prepared(tx, self._state(call.handler))())

    def _state(self, handler: Handler) -> object:
        return self._states[handler.lifespans[-1]] if handler.wants_state else None

    def close(self) -> None:
        """Let the threads end; the sessions are closed by whoever opened them."""
        self._threads.close()
        self._transaction_threads.close()


def _in_thread(function: Callable[[], object]) -> object:
    renew_connections()
    return function()


def _entering() -> None:
    """Do nothing: the handler's own time begins later, after its transaction has begun."""


def _after_commit_failed(call: Call[Any], error: Exception) -> Notice:
    details: dict[str, object] = {
        "handler_name": call.handler.name,
        "delivery_id": str(call.delivery_id),
        "error": describe(error).text,
        "remedy": "the event is handled and committed; what was to follow the commit is not done, or not all of it",
    }
    return Notice("error", "after_commit_failed", details)


def overran(handler: Handler, cancelled: object = None) -> TimeoutError:
    """The error of a handler that was cancelled at its time limit, with the traceback of where it stood then."""
    error = TimeoutError(f"the handler ran longer than its limit of {handler.timeout:g} s")
    return error.with_traceback(traceback_of(cancelled) if isinstance(cancelled, BaseException) else None)


async def limited(handler: Handler, run: Awaitable[T]) -> T:
    """Cancel the run at the handler's time limit."""
    try:
        async with asyncio.timeout(handler.timeout) as limit:
            return await run
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise overran(handler, error.__cause__) from None
