"""Managed transactions: Holdfast opens, commits and rolls back the transaction in which application code works.

The application passes a function that returns the context manager of a connection or a session: `pool.acquire`
(asyncpg), `pool.connection` (psycopg) or a `sessionmaker` (SQLAlchemy, asynchronous or not). Its result is recognised
by its class. Synchronous connections are used in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any, TypeVar

from holdfast.errors import ConfigurationError, FieldError
from holdfast.postgres.deadlines import Deadline, within
from holdfast.postgres.drivers import Driver, Values, driver_of
from holdfast.postgres.queries import Queries

T = TypeVar("T")
Connect = Callable[[], Any]

# Threads for synchronous connections. A wait for a connection or for another transaction must not occupy the thread
# that the holder needs to finish, and none of these may occupy the threads in which the application runs.
_CONNECTING = ThreadPoolExecutor(32, "holdfast-connecting")
_WAITING = ThreadPoolExecutor(32, "holdfast-waiting")
_WORKING = ThreadPoolExecutor(32, "holdfast-working")


async def uninterrupted(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Run the work to its end even if its caller is cancelled: a commit must not be cancelled half-way."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the cancellation is raised instead
        raise


async def _in_thread(executor: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    # To its end: a thread cannot be cancelled, and until then the connection must not be used elsewhere.
    work = asyncio.get_running_loop().run_in_executor(executor, copy_context().run, function, *arguments)
    return await uninterrupted(work)


async def _enter_in_thread(holder: Any, seconds: float) -> Any:
    """Enter a synchronous context manager. Its thread cannot be cancelled: a late connection is released."""
    coming = _CONNECTING.submit(copy_context().run, holder.__enter__)

    def give_back(late: Future[Any]) -> None:
        if not late.cancelled() and late.exception() is None:
            _WORKING.submit(holder.__exit__, None, None, None)

    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(coming)
    except BaseException:
        coming.add_done_callback(give_back)
        raise


async def _give_back(holder: Any) -> None:
    if hasattr(holder, "__aexit__"):
        await holder.__aexit__(None, None, None)
    else:
        await _in_thread(_WORKING, holder.__exit__, None, None, None)


class ManagedTransaction(ABC):
    """One transaction on one connection, which is returned to its pool when the transaction has ended."""

    connects_late = False  # with the first statement, and not before

    def __init__(self, queries: Queries, holder: Any, tx: Any, driver: Driver) -> None:
        self.tx = tx
        self._queries = queries
        self._holder = holder
        self._driver = driver
        self.ended = False  # a commit or a rollback was attempted
        self._given_back = False  # the pool may have lent the connection to other code

    def run(self, name: str, values: Values, *, waits: bool = False) -> Awaitable[Any]:
        """Run a statement of Holdfast's; `waits` if it may wait for another transaction."""
        return self.call(self._driver.run, self.tx, self._queries, name, values, waits=waits)

    def call(self, function: Callable[..., Any], *arguments: Any, waits: bool = False) -> Awaitable[Any]:
        """Call a function that uses the connection, in a thread if the connection is synchronous."""
        self._require_connection()
        if self._driver.asynchronous:
            return function(*arguments)  # type: ignore[no-any-return]
        return _in_thread(_WAITING if waits else _WORKING, function, *arguments)

    def _require_connection(self) -> None:
        if self._given_back:
            raise ConnectionAbortedError("the transaction has ended and its connection was returned to the pool")

    def deadline(self, seconds: float) -> AbstractContextManager[None]:
        """Cut the connection if the block takes longer: a silent server then fails like one that is gone."""
        return Deadline(seconds, self._sever)

    def _sever(self) -> None:
        """Close the connection's socket, which fails the statement that waits for it."""
        if self._given_back:
            return
        with contextlib.suppress(Exception):
            connection = self._driver_connection()
            if hasattr(connection, "terminate"):
                connection.terminate()
            else:
                with socket.socket(fileno=os.dup(connection.fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)

    def is_lost(self) -> bool:
        """Return whether the connection is closed, which an error raised on it may not say."""
        with contextlib.suppress(AttributeError, LookupError, ValueError):  # a session that has none yet
            connection = self._driver_connection()
            return bool(connection.is_closed() if hasattr(connection, "is_closed") else connection.closed)
        return False

    def _driver_connection(self) -> Any:
        return self.tx

    async def begin(self) -> None:  # noqa: B027  (most have nothing to do here)
        """Begin the transaction; nothing, where the first statement begins it."""

    async def set_savepoint(self) -> None:
        """Let `undo` return to this point."""
        await self.run("mark_request", {})

    async def undo(self) -> None:
        """Undo everything since the savepoint."""
        await self.run("undo_request", {})

    async def restart(self) -> None:
        """Begin a new transaction on the same connection, after rolling this one back."""
        self._require_connection()
        with contextlib.suppress(Exception):
            await self._rollback()
        await self.begin()

    async def confirm(self) -> None:
        """Raise if the transaction has failed: Postgres answers its COMMIT with a silent rollback."""
        await self.run("confirm_request", {})

    async def commit(self) -> None:
        """Commit, and give the connection back."""
        self.ended = True
        try:
            await self._commit()
        finally:
            await self._give_back()

    async def rollback(self) -> None:
        """Roll back, unless the transaction has ended. It never raises: a lost connection has no transaction."""
        if self.ended:
            return
        self.ended = True
        with contextlib.suppress(Exception):
            await self._rollback()
        with contextlib.suppress(Exception):
            await self._give_back()

    async def _give_back(self) -> None:
        try:
            await _give_back(self._holder)
        finally:
            self._given_back = True

    @abstractmethod
    async def _commit(self) -> None: ...

    @abstractmethod
    async def _rollback(self) -> None: ...


class _Asyncpg(ManagedTransaction):
    def is_lost(self) -> bool:
        try:
            return super().is_lost()
        except Exception:  # the pool has taken the lost connection back, and refuses any call on it
            return True

    async def begin(self) -> None:
        self._transaction = self.tx.transaction()
        await self._transaction.start()

    async def set_savepoint(self) -> None:
        await self.tx.execute(self._queries.asyncpg("mark_request").sql)

    async def undo(self) -> None:
        await self.tx.execute(self._queries.asyncpg("undo_request").sql)

    async def _commit(self) -> None:
        await self._transaction.commit()

    async def _rollback(self) -> None:
        await self._transaction.rollback()


class _Psycopg(ManagedTransaction):
    """Uses psycopg's transaction block, in which psycopg refuses commit() and rollback() of the application."""

    async def begin(self) -> None:
        self._block = self.tx.transaction()
        await self.call(self._block.__aenter__ if self._driver.asynchronous else self._block.__enter__)

    async def _leave(self, *error: Any) -> None:
        await self.call(self._block.__aexit__ if self._driver.asynchronous else self._block.__exit__, *error)

    async def _commit(self) -> None:
        await self._leave(None, None, None)

    async def _rollback(self) -> None:
        error = ConnectionAbortedError()
        await self._leave(type(error), error, None)


class _Sqlalchemy(ManagedTransaction):
    """Sends statements straight to the driver once the session has begun: SQLAlchemy's work for a statement costs about
    as much as running it, and a savepoint of its own costs as much as all of Holdfast's statements together.

    A failed flush rolls the session back to its beginning, so the savepoint no longer exists.
    """

    connects_late = True
    _begun: Any = None  # the transaction, and the connection it is on
    _connection: Any = None
    _direct: Driver | None = None

    def deadline(self, seconds: float) -> AbstractContextManager[None]:
        if self._begun is None:
            # Now: while a session commits or rolls back, it does not tell its connection.
            with contextlib.suppress(Exception):
                self._connection, self._begun = self._driver_connection(), self._session.get_transaction()
        return super().deadline(seconds)

    async def set_savepoint(self) -> None:
        # A driver that Holdfast does not know by itself, such as psycopg2, is left to SQLAlchemy.
        with contextlib.suppress(FieldError):
            self._direct = driver_of(self._connection)
        await super().set_savepoint()

    def run(self, name: str, values: Values, *, waits: bool = False) -> Awaitable[Any]:
        if self._direct is None or not self._is_original():
            return super().run(name, values, waits=waits)
        return self.call(self._direct.run, self._connection, self._queries, name, values, waits=waits)

    def _is_original(self) -> bool:
        """Return whether the session is still in its first transaction; if not, its connection may be lent out."""
        return self._begun is not None and self._session.get_transaction() is self._begun

    async def undo(self) -> None:
        if hasattr(self.tx, "expunge_all"):
            self.tx.expunge_all()  # or the commit would flush pending objects
        await super().undo()

    async def _commit(self) -> None:
        await self.call(self.tx.commit)

    async def _rollback(self) -> None:
        await self.call(self.tx.rollback)

    @property
    def _session(self) -> Any:
        """The synchronous session or connection inside an asynchronous one."""
        return getattr(self.tx, "sync_session", None) or getattr(self.tx, "sync_connection", None) or self.tx

    def _driver_connection(self) -> Any:
        if self._is_original():
            return self._connection
        session = self._session
        if hasattr(session, "get_bind"):
            # connection() would connect if the session has not yet, and this code cannot wait.
            (session, *_), *_ = session.get_transaction()._connections.values()
        return session.connection.driver_connection


_BY_PACKAGE: dict[str, type[ManagedTransaction]] = {"asyncpg": _Asyncpg, "psycopg": _Psycopg, "sqlalchemy": _Sqlalchemy}


# What a pool of asyncpg or psycopg is known by, and what lends its connections.
_POOLS = {("acquire", "release", "terminate"): "acquire", ("getconn", "putconn"): "connection"}


async def open_managed_transaction(
    connect: Connect, queries: Queries, connect_within: float, begin_within: float
) -> ManagedTransaction:
    """Open a transaction on an application connection; both steps have a deadline, in seconds."""
    holder = connect()
    if not hasattr(holder, "__aenter__") and not hasattr(holder, "__enter__") and inspect.isawaitable(holder):
        holder = await within(connect_within, holder)
    if lends := next((lends for marks, lends in _POOLS.items() if all(hasattr(holder, mark) for mark in marks)), None):
        # Pools are context managers too: the end of one request would close the pool for all others.
        remedy = f"pass pool.{lends}, or lambda: app.state.pool.{lends}() for a pool that is opened later"
        raise ConfigurationError("connect", f"returned {type(holder).__name__}, which is no connection", remedy)
    if hasattr(holder, "__aenter__"):
        tx = await within(connect_within, holder.__aenter__())
    elif hasattr(holder, "__enter__"):
        tx = await _enter_in_thread(holder, connect_within)
    else:
        raise ConfigurationError(
            "connect",
            f"returned {type(holder).__name__}, which is not a context manager",
            "pass pool.acquire, pool.connection or a sessionmaker, and do not call it",
        )
    try:
        driver = driver_of(tx)
    except BaseException:
        await _give_back(holder)
        raise
    transaction = _BY_PACKAGE[driver.package](queries, holder, tx, driver)
    with transaction.deadline(begin_within):
        try:
            await transaction.begin()
        except BaseException:
            await transaction.rollback()
            raise
    return transaction
