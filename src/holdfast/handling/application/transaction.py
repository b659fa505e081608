"""What the transactions of all libraries have in common, on a connection of the application's pool.

With a synchronous library the coroutines here never suspend: the thread of the handler runs them to their end.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from holdfast.errors import TransientHandlerError
from holdfast.handlers import Handler
from holdfast.handling.handler_transaction import Entry, HandlerTransaction
from holdfast.handling.sessions import EndedByHand
from holdfast.postgres.driver_connection import DriverConnection, driver_connection
from holdfast.postgres.faults import is_conflict, is_from_driver, is_unavailable
from holdfast.postgres.queries import Queries
from holdfast.postgres.statements import ApplicationConnection
from holdfast.retry import LOCK_NOT_AVAILABLE, sqlstate_of

T = TypeVar("T")

# Under REPEATABLE READ, entering fails if the lease was extended in the same moment.
_ENTRIES = 5
# How long a server has to end a statement after it was asked to cancel it.
_CANCELLED_WITHIN = 5.0
# Seconds without a statement for which a thread past its time limit may keep its row locked.
_OVERRUN_PATIENCE = 600.0
_FAILED = "25P02"
_NO_SAVEPOINT = ("3B001", "25P01")


class ApplicationTransaction(HandlerTransaction, ApplicationConnection):
    """One transaction of the application's library, from `open` to `give_back`."""

    def __init__(self, queries: Queries) -> None:
        self.connection = self
        self.after_commit_error: Exception | None = None  # of a function of the application's
        self.opened_at = time.monotonic()
        self.deadline = math.inf  # of the current step; the watcher cuts the connection then
        self._queries = queries
        self._driver: DriverConnection | None = None
        self._marked = False
        self._severed = False
        self._refused = False
        self._let_go = False
        self._lock = threading.Lock()  # for the end: the watcher may be in another thread
        self._interrupting = threading.Lock()

    # --- for each library ---------------------------------------------------------------------------------

    @abstractmethod
    async def open(self) -> None:
        """Take a connection from the application's pool or session."""

    @abstractmethod
    async def give_back(self) -> None:
        """Give the connection back to its pool, which drops one that was cut."""

    @abstractmethod
    async def _begin(self) -> None:
        """Begin; the server may learn of it only with the first statement."""

    @abstractmethod
    async def _commit(self) -> None: ...

    @abstractmethod
    async def _rollback(self) -> None: ...

    @abstractmethod
    def _lent(self) -> Any:
        """Return the object whose methods could end the transaction."""

    _ending: tuple[str, ...] = ()  # the names of those methods

    # --- statements ---------------------------------------------------------------------------------------

    def _use(self, connection: Any) -> None:
        self._driver = driver_connection(connection, self._queries)

    async def rows(self, name: str, values: Mapping[str, object]) -> Sequence[Sequence[Any]]:
        return await self._connected().rows(name, values)

    async def _command(self, name: str) -> None:
        await self._connected().command(name)

    def _connected(self) -> DriverConnection:
        if self._driver is None or not self.is_held():
            raise ConnectionAbortedError("the transaction has ended, and its connection is no longer held")
        return self._driver

    # --- the transaction ----------------------------------------------------------------------------------

    async def enter_at_once(self, statement: Callable[[bool], str], patience: float) -> bool:
        driver = self._driver
        if driver is None or driver.begin is None:
            return False
        async with self.within(patience):
            return await self._enter_at_once(driver, statement)

    async def _enter_at_once(self, driver: DriverConnection, statement: Callable[[bool], str]) -> bool:
        mark = self._queries.asyncpg("mark_handler").sql
        try:
            await driver.script(f"{driver.begin}{statement(False)}; {mark}")
        except Exception as error:
            if self.is_fault(error):
                raise
            await driver.command("rollback_handler")
            if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                raise
            return False
        self._marked = True
        return True

    async def enter(self, first: Entry[T]) -> T:
        for left in reversed(range(_ENTRIES)):
            await self._begin()
            try:
                result = await first(self, False)
            except Exception as error:
                if is_conflict(error) and left:
                    await self.rollback()
                    continue
                if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                    await self.rollback()
                raise
            if result is not None:
                return result
        raise AssertionError("the statement that enters has no result")

    async def set_savepoint(self) -> None:
        await self._command("mark_handler")
        self._marked = True

    def lend(self) -> None:
        lent = self._lent()
        for name in self._ending:
            setattr(lent, name, self._refuse)

    def take_back(self) -> bool:
        lent = self._lent()
        for name in self._ending:
            vars(lent).pop(name, None)
        return self._is_open()

    def _refuse(self, *_arguments: object, **_options: object) -> None:
        self._refused = True
        raise EndedByHand(self.savepoint)

    @property
    def refused(self) -> bool:
        return self._refused

    def _is_open(self) -> bool:
        """Return whether the transaction is still open; a lost connection shows only at the next statement."""
        return self._driver is None or self._driver.status != "idle"

    async def finish(self) -> None:
        """Nothing: what is left to write is written with the commit."""

    async def commit(self, handler: Handler) -> None:
        if self._driver is not None and self._driver.status == "failed":
            raise self._went_on(handler)
        if self._marked:
            await self._release(handler)
        await self._commit()

    async def _release(self, handler: Handler) -> None:
        """Require that this is the transaction that was entered, and that no statement in it has failed."""
        try:
            await self._release_savepoint()
        except Exception as error:
            state = sqlstate_of(error)
            if state == _FAILED:
                raise self._went_on(handler) from error
            if state in _NO_SAVEPOINT:
                raise EndedByHand(self.savepoint, has_ended=True) from error
            raise

    async def _release_savepoint(self) -> None:
        await self._command("release_handler")

    def _went_on(self, handler: Handler) -> Exception:
        return TransientHandlerError(
            f"{handler.name} went on after a statement had failed, and nothing could be committed; use "
            f"{self.savepoint} for a part that may fail"
        )

    async def undo(self) -> None:
        await self._command("undo_handler")

    async def commit_undone(self) -> None:
        await self._command("commit_handler")

    async def rollback(self) -> None:
        self._marked = False
        await self._rollback()

    # --- the connection -----------------------------------------------------------------------------------

    def forbid(self) -> None:
        """Never commit what the handler writes, and cancel its current statement. Any thread may call it.

        The transaction stays open while the handler runs: its row is locked, or the next attempt would begin.
        """
        self.forbidden = True
        # In a thread: cancelling opens a connection, and the watcher has other transactions to watch.
        threading.Thread(target=self._interrupt, name="holdfast-cancel", daemon=True).start()

    def _interrupt(self) -> None:
        with self._interrupting:
            if self._let_go or self._driver is None or not self.is_held():
                return
            self._driver.interrupt()
            # A server that does not answer would keep the statement waiting for ever, so the connection is cut.
            cutting = threading.Timer(_CANCELLED_WITHIN, self.terminate)
            cutting.start()
            try:
                self._driver.keep_open(_OVERRUN_PATIENCE)
            finally:
                cutting.cancel()

    def terminate(self) -> None:
        with self._lock:
            if self._let_go:
                return
            self._severed = True
            if self._driver is not None and self.is_held():
                self._driver.sever()

    def let_go(self) -> None:
        """Leave the connection alone from now on: the pool may lend it to others."""
        with self._interrupting, self._lock:
            self._let_go = True

    def is_held(self) -> bool:
        """Return whether the library has not given the connection back to its pool by itself."""
        return True

    def is_over(self) -> bool:
        """Return whether nothing is left that giving back would have to wait for."""
        return False

    def within(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return _Deadline(self, seconds)

    def is_fault(self, error: BaseException) -> bool:
        return isinstance(error, OSError) or is_unavailable(error) or self._is_lost()

    def _is_lost(self) -> bool:
        return self._severed or (self._driver is not None and self._driver.status == "closed")

    def is_unanswered(self, error: BaseException) -> bool:
        if isinstance(error, asyncio.CancelledError) or self.is_fault(error):
            return True
        if sqlstate_of(error) is not None:
            return False
        # An error of the library's, or of a function that it calls with the commit: it came before or after that.
        return is_from_driver(error) or self._driver is None or not self.is_held() or self._driver.status == "idle"


class _Deadline:
    """Sets the deadline at which the watcher cuts the connection of a transaction."""

    def __init__(self, transaction: ApplicationTransaction, seconds: float) -> None:
        self._transaction = transaction
        self._seconds = seconds

    async def __aenter__(self) -> None:
        self._transaction.deadline = time.monotonic() + self._seconds

    async def __aexit__(self, *_error: object) -> None:
        self._transaction.deadline = math.inf


async def awaited(function: Callable[..., Any], *arguments: Any, asynchronous: bool) -> Any:
    """Call a method that an asynchronous library has as a coroutine, and a synchronous one as a function."""
    result = function(*arguments)
    return await result if asynchronous else result
