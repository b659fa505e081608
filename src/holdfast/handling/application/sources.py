"""Where the transactions of handlers come from: the application's session factories, engines and pools.

They are recognised by their classes, so that none of the libraries has to be installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import asyncpg

from holdfast.errors import ConfigurationError
from holdfast.handlers import Handler
from holdfast.handling.application.django import DjangoTransaction, close_connections, configured_alias
from holdfast.handling.application.psycopg import PsycopgTransaction
from holdfast.handling.application.sqlalchemy import SqlalchemyTransaction
from holdfast.handling.application.transaction import ApplicationTransaction
from holdfast.handling.sessions import NoConnection, NoSession
from holdfast.postgres.faults import TransactionsAway, is_unavailable
from holdfast.postgres.queries import Queries
from holdfast.transaction_kinds import (
    ASYNCPG,
    DJANGO,
    PSYCOPG,
    PSYCOPG_ASYNC,
    SQLALCHEMY_ASYNC_CONNECTION,
    SQLALCHEMY_ASYNC_SESSION,
    SQLALCHEMY_CONNECTION,
    SQLALCHEMY_SESSION,
    TransactionKind,
)

R = TypeVar("R")
T = TypeVar("T")

# The argument `transactions`: one source, or several of different kinds.
Transactions = object | Sequence[object] | None

_SOURCES: Mapping[tuple[str, str], TransactionKind] = {
    ("sqlalchemy", "async_sessionmaker"): SQLALCHEMY_ASYNC_SESSION,
    ("sqlalchemy", "sessionmaker"): SQLALCHEMY_SESSION,
    ("sqlalchemy", "AsyncEngine"): SQLALCHEMY_ASYNC_CONNECTION,
    ("sqlalchemy", "Engine"): SQLALCHEMY_CONNECTION,
    ("psycopg_pool", "AsyncConnectionPool"): PSYCOPG_ASYNC,
    ("psycopg_pool", "ConnectionPool"): PSYCOPG,
    ("django", "BaseDatabaseWrapper"): DJANGO,
    ("django", "ConnectionProxy"): DJANGO,
}
# Names of the errors that pools raise when all their connections are in use.
_NOT_FREE = ("TimeoutError", "PoolTimeout", "TooManyRequests")
_ACCEPTED = "a sessionmaker or an engine of SQLAlchemy, a pool of psycopg_pool, or a connection of Django"
# Remedies for objects that are passed by mistake.
_MISTAKES: Mapping[tuple[str, str], str] = {
    ("sqlalchemy", "scoped_session"): "pass its session_factory: each event gets a session of its own",
    ("sqlalchemy", "async_scoped_session"): "pass its session_factory: each event gets a session of its own",
    ("sqlalchemy", "AsyncSession"): "pass the async_sessionmaker that makes sessions",
    ("sqlalchemy", "Session"): "pass the sessionmaker that makes sessions",
    ("sqlalchemy", "AsyncConnection"): "pass the engine that connects",
    ("sqlalchemy", "Connection"): "pass the engine that connects",
    ("psycopg", "AsyncConnection"): "pass a psycopg_pool.AsyncConnectionPool",
    ("psycopg", "Connection"): "pass a psycopg_pool.ConnectionPool",
    ("asyncpg", "Pool"): "leave it out: the worker opens the connections of handlers that take asyncpg.Connection",
}


@dataclass(eq=False, slots=True)
class Source:
    """One source of transactions, and the transactions of it that are open now."""

    kind: TransactionKind
    given: Any
    queries: Queries
    open: set[ApplicationTransaction] = field(default_factory=set)
    releasing: set[asyncio.Task[None]] = field(default_factory=set)  # their connections are given back now
    opened: bool = False  # the pool, by us

    def transaction(self) -> ApplicationTransaction:
        """Return a new transaction, which has no connection yet."""
        match self.kind.package:
            case "psycopg":
                return PsycopgTransaction(self.queries, self.given, asynchronous=self.kind.asynchronous)
            case "django":
                return DjangoTransaction(self.queries, self.given or configured_alias())
        return SqlalchemyTransaction(self.queries, self._make, asynchronous=self.kind.asynchronous)

    @property
    def _make(self) -> Callable[[], Any]:
        engine = self.kind in (SQLALCHEMY_ASYNC_CONNECTION, SQLALCHEMY_CONNECTION)
        make: Callable[[], Any] = self.given.connect if engine else self.given
        return make

    async def lend(
        self,
        transaction: ApplicationTransaction,
        conduct: Callable[[ApplicationTransaction, Callable[[], Awaitable[R]]], Awaitable[T]],
        call: Callable[[], Awaitable[R]],
        patience: float | None = None,
        answer: Callable[[T], None] = lambda _result: None,
    ) -> T:
        """Open the transaction, let `conduct` begin and end it around the call of the handler, and give it back.

        `answer` gets the result before that is done.

        Raises NoSession or NoConnection when the connection does not come, on an event loop after `patience` seconds.
        """
        try:
            if self.kind.asynchronous:
                async with asyncio.timeout(patience):
                    await transaction.open()
            else:
                await transaction.open()
        except Exception as fault:
            await self._release(transaction)
            if type(fault).__name__ in _NOT_FREE:
                raise NoSession from fault
            raise NoConnection(fault) from fault
        except BaseException:
            await self._release(transaction)
            raise
        self.open.add(transaction)
        try:
            result = await conduct(transaction, call)
            answer(result)
            return result
        except BaseException:
            transaction.terminate()  # its state is unknown
            raise
        finally:
            self.open.discard(transaction)
            await self._release(transaction)

    async def _release(self, transaction: ApplicationTransaction) -> None:
        """Give the connection back, in the background: a commit has to be reported before its lease expires."""
        transaction.let_go()
        if not self.kind.asynchronous or transaction.is_over():
            await _give_back(transaction)
        else:
            releasing = asyncio.create_task(_give_back(transaction))
            self.releasing.add(releasing)
            releasing.add_done_callback(self.releasing.discard)

    async def start(self) -> None:
        """Open a pool that is not open: a module cannot open its own, because that needs the event loop."""
        if self.kind.package == "psycopg" and self.given.closed:
            if self.kind.asynchronous:
                await self.given.open()
            else:
                await asyncio.to_thread(self.given.open)
            self.opened = True

    async def stop(self) -> None:
        """Wait until connections are given back, and close the pool if `start` opened it."""
        await asyncio.gather(*self.releasing)
        if self.opened:
            self.opened = False
            if self.kind.asynchronous:
                await self.given.close()
            else:
                await asyncio.to_thread(self.given.close)


class Sources:
    """The sources of one worker, by the kind of their transactions."""

    def __init__(self, given: Transactions, schema: str) -> None:
        queries = Queries(schema)
        every = (
            given if isinstance(given, Sequence) and not isinstance(given, str) else () if given is None else (given,)
        )
        self._sources: dict[TransactionKind, Source] = {}
        for each in every:
            kind = _kind_of(each)
            if kind in self._sources:
                raise ConfigurationError(
                    "transactions", f"has two sources of {kind}", "pass one for each kind of tx that handlers take"
                )
            self._sources[kind] = Source(kind, _alias_of(each) if kind is DJANGO else each, queries)
        # Django's connections are known from its settings, which may not be set up yet.
        self._sources.setdefault(DJANGO, Source(DJANGO, None, queries))
        self._used: list[Source] = []

    def serve(self, handlers: Iterable[Handler]) -> None:
        """Refuse a handler whose `tx` none of the sources can make."""
        kinds: dict[TransactionKind, None] = {}
        for handler in handlers:
            kind = handler.parameters.transaction
            if kind is None or kind is ASYNCPG:
                continue
            if kind not in self._sources:
                raise _no_source(handler.name, kind, [each for each in self._sources if each is not DJANGO])
            kinds[kind] = None
        self._used = [self._sources[kind] for kind in kinds]

    def of(self, kind: TransactionKind) -> Source:
        """Return the source for a kind of transactions."""
        return self._sources[kind]

    @property
    def in_threads(self) -> bool:
        """Whether some of the handlers run in threads."""
        return any(not source.kind.asynchronous for source in self._used)

    def leave_thread(self) -> None:
        """Close the connections that a thread of handlers has opened, at its end."""
        if any(source.kind is DJANGO for source in self._used):
            close_connections()

    # --- while the worker runs ----------------------------------------------------------------------------

    async def start(self, connection: asyncpg.Connection) -> None:
        """Open the pools, and require that every source leads to the database of the worker's own connection.

        Raises OSError when the application's connections do not come: that may pass.
        """
        for source in self._used:
            await source.start()
            await self._require_same(source, connection)

    async def _require_same(self, source: Source, connection: asyncpg.Connection) -> None:
        statement = source.queries.asyncpg("describe_application").sql
        own = await connection.fetchrow(statement)
        try:
            if source.kind.asynchronous:
                ((database, started, login, denied),) = await _look(source.transaction())
            else:
                ((database, started, login, denied),) = await asyncio.to_thread(self._look_here, source)
        except Exception as error:
            if isinstance(error, OSError) or is_unavailable(error):
                raise TransactionsAway(f"the connections of {source.kind} do not come: {error}") from error
            raise ConfigurationError(
                "transactions",
                f"cannot be used for {source.kind}: {type(error).__name__}: {error}",
                "pass what the application itself makes its transactions with",
            ) from error
        if (database, started) != (own["database"], own["started"]):
            raise ConfigurationError(
                "transactions",
                f"for {source.kind} lead to the database {database}, and the worker to {own['database']}, or to "
                "another server: what a handler writes and its event could not commit together",
                'name the one with the outbox in the settings: HOLDFAST = {"USING": "..."}'
                if source.kind is DJANGO
                else "give both the address of one database",
            )
        if denied:
            raise ConfigurationError(
                "transactions",
                f"for {source.kind} log in as {login}, which may not call {denied}",
                f"as an administrator: GRANT holdfast_worker TO {login}",
            )

    def _look_here(self, source: Source) -> Sequence[Sequence[Any]]:
        try:
            return finished(_look(source.transaction()))
        finally:
            self.leave_thread()

    async def stop(self) -> None:
        for source in self._used:
            with contextlib.suppress(Exception):
                await source.stop()

    def cut_overdue(self) -> None:
        """Cut the connections of transactions with a step that is past its time limit."""
        now = time.monotonic()
        for source in self._used:
            for transaction in tuple(source.open):
                if now > transaction.deadline:
                    transaction.terminate()

    def drop(self, silence: float) -> None:
        """Cut connections that are older than `silence`, the time without an answer from the server."""
        for source in self._used:
            for transaction in tuple(source.open):
                if time.monotonic() - transaction.opened_at > silence:
                    transaction.terminate()


async def _give_back(transaction: ApplicationTransaction) -> None:
    with contextlib.suppress(Exception):  # of a connection that is lost
        await transaction.give_back()


async def _look(transaction: ApplicationTransaction) -> Sequence[Sequence[Any]]:
    try:
        await transaction.open()

        async def first(connection: Any, _look: bool) -> Sequence[Sequence[Any]]:
            rows: Sequence[Sequence[Any]] = await connection.rows("describe_application", {})
            return rows

        found = await transaction.enter(first)
        await transaction.rollback()
        return found
    finally:
        await transaction.give_back()


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a synchronous library, which never suspends, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise AssertionError("a coroutine of a synchronous library waits for an event loop")


def _no_source(handler: str, kind: TransactionKind, given: Iterable[TransactionKind]) -> ConfigurationError:
    """Return the error for a handler whose `tx` none of the worker's sources can make."""
    found = " and ".join(f"{each.source}, which makes {each}" for each in given) or "nothing that makes one"
    return ConfigurationError(
        f"{handler}.tx",
        f"is annotated with {kind}, and the worker was given {found}",
        f"pass {kind.source} of the application: Worker(dsn, registry, transactions={kind.example}), or "
        f"holdfast worker --transactions MODULE:{kind.example}",
    )


def _kind_of(given: object) -> TransactionKind:
    for cls in type(given).__mro__:
        name = cls.__module__.partition(".")[0], cls.__name__
        if name in _MISTAKES:
            raise _refused(given, _MISTAKES[name])
        kind = _SOURCES.get(name)
        if kind is not None:
            return kind
    raise _refused(given, f"pass {_ACCEPTED}")


def _refused(given: object, remedy: str) -> ConfigurationError:
    cls = type(given)
    return ConfigurationError("transactions", f"has an object of {cls.__module__}.{cls.__qualname__}", remedy)


def _alias_of(connection: Any) -> str:
    return str(connection.alias)
