"""A transaction that the library opens for somebody else's code: begun, marked, and ended here and nowhere else.

The application says how to get a connection or a session: a function that returns a context manager, such as
`pool.acquire` (asyncpg), `pool.connection` (psycopg) or a `sessionmaker` (SQLAlchemy, asynchronous or not). What comes
out of it is recognised by its class. Synchronous ones are used in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from holdfast.errors import ConfigurationError, FieldError
from holdfast.postgres.drivers import Driver, Values, driver_of
from holdfast.postgres.queries import Queries

T = TypeVar("T")
Connect = Callable[[], Any]

# Threads for synchronous connections. Whoever waits for a connection or for another transaction must not take the
# thread that its holder needs to come to its end; and none must take those in which the application runs.
_CONNECTING = ThreadPoolExecutor(32, "holdfast-connecting")
_WAITING = ThreadPoolExecutor(32, "holdfast-waiting")
_WORKING = ThreadPoolExecutor(32, "holdfast-working")


async def uninterrupted(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Let the work end, whatever happens to whoever waits for it: a commit must not be cancelled half-way."""
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
            task.exception()  # nobody else will look at it
        raise


async def _in_thread(executor: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    # To its end: a thread cannot be cancelled, and nobody else may use the connection while it does.
    work = asyncio.get_running_loop().run_in_executor(executor, copy_context().run, function, *arguments)
    return await uninterrupted(work)


async def _connected(holder: Any, within: float) -> Any:
    """Enter a synchronous context manager. Its thread cannot be cancelled: what comes too late is given back."""
    coming = _CONNECTING.submit(copy_context().run, holder.__enter__)

    def unwanted(late: Future[Any]) -> None:
        if not late.cancelled() and late.exception() is None:
            _WORKING.submit(holder.__exit__, None, None, None)

    try:
        async with asyncio.timeout(within):
            return await asyncio.wrap_future(coming)
    except BaseException:
        coming.add_done_callback(unwanted)
        raise


async def _give_back(holder: Any) -> None:
    if hasattr(holder, "__aexit__"):
        await holder.__aexit__(None, None, None)
    else:
        await _in_thread(_WORKING, holder.__exit__, None, None, None)


class ManagedTransaction(ABC):
    """One transaction on one connection, which goes back to where it came from when the transaction has ended."""

    def __init__(self, queries: Queries, holder: Any, tx: Any, driver: Driver) -> None:
        self.tx = tx
        self._queries = queries
        self._holder = holder
        self._driver = driver
        self.ended = False  # by a commit or a rollback, whatever came of it
        self._given_back = False  # it is somebody else's now

    def run(self, name: str, values: Values, *, waits: bool = False) -> Awaitable[Any]:
        """A statement of ours, in the way that suits the connection; `waits` if it may wait for others."""
        return self.call(self._driver.run, self.tx, self._queries, name, values, waits=waits)

    def call(self, function: Callable[..., Any], *arguments: Any, waits: bool = False) -> Awaitable[Any]:
        """Anything else that is done with the connection."""
        self._require_connection()
        if self._driver.asynchronous:
            return function(*arguments)  # type: ignore[no-any-return]
        return _in_thread(_WAITING if waits else _WORKING, function, *arguments)

    def _require_connection(self) -> None:
        if self._given_back:
            raise ConnectionAbortedError("the transaction has ended, and its connection is somebody else's")

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """A server that does not answer in this time fails like one that is gone."""
        cutting = asyncio.get_running_loop().call_later(seconds, self._sever)
        try:
            yield
        finally:
            cutting.cancel()

    def _sever(self) -> None:
        """Cut the connection under whoever waits for it."""
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
        """Whether the connection has gone, whatever the error says that somebody got of it."""
        with contextlib.suppress(AttributeError, LookupError, ValueError):  # a session that has none yet
            connection = self._driver_connection()
            return bool(connection.is_closed() if hasattr(connection, "is_closed") else connection.closed)
        return False

    def _driver_connection(self) -> Any:
        return self.tx

    async def begin(self) -> None:  # noqa: B027  (most have nothing to do here)
        """Nothing, where the first statement does it."""

    async def mark(self) -> None:
        """From here on everything can be undone."""
        await self.run("mark_request", {})

    async def undo(self) -> None:
        """Back to the mark."""
        await self.run("undo_request", {})

    async def restart(self) -> None:
        """A new transaction on the same connection, whatever has become of this one."""
        self._require_connection()
        with contextlib.suppress(Exception):
            await self._rollback()
        await self.begin()

    async def confirm(self) -> None:
        """Fail if the transaction has failed: Postgres answers the COMMIT of one with a silent rollback."""
        await self.run("confirm_request", {})

    async def commit(self) -> None:
        self.ended = True
        try:
            await self._commit()
        finally:
            await self._give_back()

    async def rollback(self) -> None:
        """Never raises: a connection that cannot roll back is lost, and its transaction with it. Once is enough."""
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
        except Exception:  # the pool takes back what has gone, and then nobody may even ask
            return True

    async def begin(self) -> None:
        self._transaction = self.tx.transaction()
        await self._transaction.start()

    async def mark(self) -> None:
        await self.tx.execute(self._queries.asyncpg("mark_request").sql)

    async def undo(self) -> None:
        await self.tx.execute(self._queries.asyncpg("undo_request").sql)

    async def _commit(self) -> None:
        await self._transaction.commit()

    async def _rollback(self) -> None:
        await self._transaction.rollback()


class _Psycopg(ManagedTransaction):
    """Its own transaction block, in which it refuses the endpoint's commit() and rollback()."""

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
    """Once the session has begun, our statements go past it, straight to its driver: what SQLAlchemy does for each
    costs about as much as to run it, and a savepoint of its own as much as all of them together.

    A failed flush takes the session further back than the mark, to the beginning; then there is no mark any more.
    """

    _begun: Any = None  # the transaction, and the connection it is on
    _connection: Any = None
    _direct: Driver | None = None

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        if self._begun is None:
            # Now: while it commits or rolls back, a session does not say what it is connected with.
            with contextlib.suppress(Exception):
                self._connection, self._begun = self._driver_connection(), self._session.get_transaction()
        with super().within(seconds):
            yield

    async def mark(self) -> None:
        # A driver that we do not know by itself, such as psycopg2, is left to SQLAlchemy.
        with contextlib.suppress(FieldError):
            self._direct = driver_of(self._connection)
        await super().mark()

    def run(self, name: str, values: Values, *, waits: bool = False) -> Awaitable[Any]:
        if self._direct is None or not self._is_ours():
            return super().run(name, values, waits=waits)
        return self.call(self._direct.run, self._connection, self._queries, name, values, waits=waits)

    def _is_ours(self) -> bool:
        """When the endpoint has ended the transaction, the connection may be somebody else's."""
        return self._begun is not None and self._session.get_transaction() is self._begun

    async def undo(self) -> None:
        if hasattr(self.tx, "expunge_all"):
            self.tx.expunge_all()  # or the commit would flush what is left
        await super().undo()

    async def _commit(self) -> None:
        await self.call(self.tx.commit)

    async def _rollback(self) -> None:
        await self.call(self.tx.rollback)

    @property
    def _session(self) -> Any:
        """The synchronous one, of which an asynchronous one is made; or the connection, likewise."""
        return getattr(self.tx, "sync_session", None) or getattr(self.tx, "sync_connection", None) or self.tx

    def _driver_connection(self) -> Any:
        if self._is_ours():
            return self._connection
        session = self._session
        if hasattr(session, "get_bind"):
            # Its connection() would connect if it has not yet, and here nobody can wait for that.
            (session, *_), *_ = session.get_transaction()._connections.values()
        return session.connection.driver_connection


_BY_PACKAGE: dict[str, type[ManagedTransaction]] = {"asyncpg": _Asyncpg, "psycopg": _Psycopg, "sqlalchemy": _Sqlalchemy}


async def open_managed_transaction(
    connect: Connect, queries: Queries, within: float, begun_within: float
) -> ManagedTransaction:
    """A transaction on a connection of the application's, which the one comes and the other begins in such time."""
    holder = connect()
    if not hasattr(holder, "__aenter__") and not hasattr(holder, "__enter__") and inspect.isawaitable(holder):
        async with asyncio.timeout(within):
            holder = await holder
    if hasattr(holder, "__aenter__"):
        async with asyncio.timeout(within):
            tx = await holder.__aenter__()
    elif hasattr(holder, "__enter__"):
        tx = await _connected(holder, within)
    else:
        raise ConfigurationError(
            "connect",
            f"returned {type(holder).__name__}, which is no context manager",
            "pass pool.acquire, pool.connection or a sessionmaker, and do not call it",
        )
    try:
        driver = driver_of(tx)
    except BaseException:
        await _give_back(holder)
        raise
    transaction = _BY_PACKAGE[driver.package](queries, holder, tx, driver)
    with transaction.within(begun_within):
        try:
            await transaction.begin()
        except BaseException:
            await transaction.rollback()
            raise
    return transaction
