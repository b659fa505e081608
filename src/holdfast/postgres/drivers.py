"""The caller's transaction, in each library that it may come from. Nothing here opens, commits or rolls back one.

A driver is recognised by the class of the connection or session that the caller passes, so none of them has to be
installed. Type checkers recognise it by its methods, for the same reason: a class of a library that is not installed
would be `Any` to them, and `Any` takes every overload.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

from holdfast.errors import FieldError
from holdfast.postgres.queries import Queries

Values = Mapping[str, object]


class _BlockingSession(Protocol):
    """psycopg.Connection, Session, scoped_session and Connection of SQLAlchemy, the connections of Django."""

    def commit(self) -> None: ...
    def rollback(self) -> None: ...


class _DjangoProxy(Protocol):
    """`django.db.connection` without type stubs: an object that looks its attributes up in the thread's connection."""

    def __getattr__(self, item: str, /) -> Any: ...
    def __contains__(self, key: str, /) -> bool: ...


class _AwaitedSession(Protocol):
    """psycopg.AsyncConnection, and AsyncSession, async_scoped_session and AsyncConnection of SQLAlchemy."""

    def commit(self) -> Coroutine[Any, Any, None]: ...
    def rollback(self) -> Coroutine[Any, Any, None]: ...


class _AsyncpgConnection(Protocol):
    """asyncpg.Connection, and with type stubs the connections of a pool."""

    def is_in_transaction(self) -> bool: ...
    def fetchval(self, query: str, /, *args: Any) -> Coroutine[Any, Any, Any]: ...


class _AsyncpgProxy(Protocol):
    """A connection of asyncpg's pool without type stubs: its methods are made at run time."""

    def __getattr__(self, attr: str, /) -> Any: ...
    def _detach(self) -> Any: ...


class _AsyncpgPool(Protocol):
    """asyncpg.Pool: for a statement that commits by itself."""

    def acquire(self) -> Any: ...
    def fetchval(self, query: str, /, *args: Any) -> Coroutine[Any, Any, Any]: ...


SyncTransaction: TypeAlias = _BlockingSession | _DjangoProxy
AsyncTransaction: TypeAlias = _AwaitedSession | _AsyncpgConnection | _AsyncpgProxy
AsyncAlone: TypeAlias = AsyncTransaction | _AsyncpgPool


@dataclass(frozen=True, slots=True)
class Driver:
    """A way to run one named statement and read the single value it returns, if it returns one."""

    asynchronous: bool
    run: Callable[[Any, Queries, str, Values], Any]
    require_transaction: Callable[[Any], None]
    package: str


def driver_of(tx: object) -> Driver:
    """Return the driver for a connection or session; the error for any other object lists what is accepted."""
    known = _KNOWN.get(type(tx))
    if known is None:
        known = _KNOWN[type(tx)] = _recognised(tx)
    return known


def _recognised(tx: object) -> Driver:
    for cls in type(tx).__mro__:
        package = cls.__module__.partition(".")[0]
        driver = _DRIVERS.get((package, cls.__name__))
        if driver is not None:
            return driver
    raise FieldError(
        "tx",
        f"is {type(tx).__module__}.{type(tx).__qualname__}, which is not a connection or session that Holdfast knows",
        "pass an asyncpg, psycopg or Django connection, or a SQLAlchemy session or connection",
    )


async def run_asyncpg(tx: Any, queries: Queries, name: str, values: Values) -> object:
    """Run a statement by means of asyncpg."""
    statement = queries.asyncpg(name)
    return await tx.fetchval(statement.sql, *statement.bind(values))


def _psycopg(tx: Any, queries: Queries, name: str, values: Values) -> object:
    sql = queries.psycopg(name)
    with tx.cursor() as cursor:
        cursor.execute(sql, values)
        return _first(cursor.fetchone()) if _answers(sql) else None


async def _psycopg_async(tx: Any, queries: Queries, name: str, values: Values) -> object:
    sql = queries.psycopg(name)
    async with tx.cursor() as cursor:
        await cursor.execute(sql, values)
        return _first(await cursor.fetchone()) if _answers(sql) else None


def _django(tx: Any, queries: Queries, name: str, values: Values) -> object:
    sql = queries.psycopg(name)
    with tx.cursor() as cursor:
        cursor.execute(sql, values)
        return _first(cursor.fetchone()) if _answers(sql) else None


def _sqlalchemy(tx: Any, queries: Queries, name: str, values: Values) -> object:
    result = _sqlalchemy_result(tx, queries, name, values)
    return result.scalar() if result.returns_rows else None


def sqlalchemy_rows(tx: Any, queries: Queries, name: str, values: Values) -> Sequence[Sequence[Any]]:
    """Run a statement by means of SQLAlchemy, which begins its transaction by that, and return all its rows."""
    result = _sqlalchemy_result(tx, queries, name, values)
    rows: Sequence[Sequence[Any]] = result.fetchall() if result.returns_rows else ()
    return rows


def _sqlalchemy_result(tx: Any, queries: Queries, name: str, values: Values) -> Any:
    connection = tx.connection() if callable(tx.connection) else tx
    if connection.dialect.name != "postgresql":
        raise FieldError(
            "tx", f"is a connection of {connection.dialect.name}", "pass one to Postgres, where the outbox is"
        )
    # SQLAlchemy begins a transaction with the first statement, unless the engine or the connection is set otherwise.
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise _no_transaction("session.begin()` of an engine without `AUTOCOMMIT")
    # In the driver's own syntax: to have SQLAlchemy compile a statement costs about as much as to run it.
    match connection.dialect.paramstyle:
        case "numeric_dollar":
            statement = queries.asyncpg(name)
            return connection.exec_driver_sql(statement.sql, statement.bind(values))
        case "pyformat":
            return connection.exec_driver_sql(queries.psycopg(name), dict(values))
        case _:
            from sqlalchemy import text

            return connection.execute(text(queries.sqlalchemy(name)), values)


async def _sqlalchemy_async(tx: Any, queries: Queries, name: str, values: Values) -> object:
    session = tx() if callable(tx) else tx  # the current one of a registry
    return await session.run_sync(_sqlalchemy, queries, name, values)


def _answers(sql: str) -> bool:
    # The cursor could tell, but not inside a pipeline, where results arrive later.
    return sql.startswith(("SELECT", "WITH"))


def _first(row: Any) -> object:
    # The caller's row factory decides what a row is.
    return next(iter(row.values() if isinstance(row, Mapping) else row))


def require_alone(tx: Any, driver: Driver) -> None:
    """Refuse a connection that would not commit a statement by itself, or not only that statement."""
    match driver.package:
        case "asyncpg":
            problem = "has an open transaction" if getattr(tx, "is_in_transaction", bool)() else ""
        case "psycopg":
            idle = tx.info.transaction_status.name == "IDLE"
            problem = "" if tx.autocommit and idle else "has an open transaction, or opens one with the first statement"
        case "django":
            problem = "" if tx.get_autocommit() and not tx.in_atomic_block else "has an open transaction"
        case _:
            problem = "is SQLAlchemy's, which opens a transaction with the first statement"
    if problem:
        raise FieldError("connection", problem, "write publish(tx, ...) inside your transaction, and commit it")


def _no_transaction(begin: str = "async with connection.transaction():") -> FieldError:
    return FieldError(
        "tx",
        "has no open transaction, so the event would not be tied to your change",
        f"publish inside one, for example `{begin}`; without a change of yours, use publish_alone",
    )


def _asyncpg_transaction(tx: Any) -> None:
    if not tx.is_in_transaction():
        raise _no_transaction()


def _no_pool(_pool: Any) -> None:
    raise FieldError(
        "tx",
        "is a pool, which has no transaction",
        "write: async with pool.acquire() as tx, tx.transaction(); without a change of yours, use publish_alone",
    )


def _psycopg_transaction(tx: Any, begin: str = "with connection.transaction():") -> None:
    # Outside autocommit psycopg opens a transaction with the first statement.
    if tx.autocommit and tx.info.transaction_status.name == "IDLE":
        raise _no_transaction(begin)


def _psycopg_async_transaction(tx: Any) -> None:
    _psycopg_transaction(tx, "async with connection.transaction():")


def _django_transaction(tx: Any) -> None:
    if not tx.in_atomic_block:
        raise _no_transaction("with transaction.atomic():")


def _begins_by_itself(_tx: Any) -> None:
    """SQLAlchemy begins a transaction with the first statement; `_sqlalchemy` refuses an engine in autocommit mode."""


# By class, so that each is recognised once; weakly, because tests make classes by the thousand.
_KNOWN: WeakKeyDictionary[type, Driver] = WeakKeyDictionary()
_ASYNCPG = Driver(True, run_asyncpg, _asyncpg_transaction, "asyncpg")
_SQLALCHEMY = Driver(False, _sqlalchemy, _begins_by_itself, "sqlalchemy")
_SQLALCHEMY_ASYNC = Driver(True, _sqlalchemy_async, _begins_by_itself, "sqlalchemy")
_DJANGO = Driver(False, _django, _django_transaction, "django")
_DRIVERS: dict[tuple[str, str], Driver] = {
    ("asyncpg", "Connection"): _ASYNCPG,
    ("asyncpg", "PoolConnectionProxy"): _ASYNCPG,
    ("asyncpg", "Pool"): Driver(True, run_asyncpg, _no_pool, "asyncpg"),
    ("psycopg", "Connection"): Driver(False, _psycopg, _psycopg_transaction, "psycopg"),
    ("psycopg", "AsyncConnection"): Driver(True, _psycopg_async, _psycopg_async_transaction, "psycopg"),
    ("sqlalchemy", "Session"): _SQLALCHEMY,
    ("sqlalchemy", "scoped_session"): _SQLALCHEMY,
    ("sqlalchemy", "Connection"): _SQLALCHEMY,
    ("sqlalchemy", "AsyncSession"): _SQLALCHEMY_ASYNC,
    ("sqlalchemy", "async_scoped_session"): _SQLALCHEMY_ASYNC,
    ("sqlalchemy", "AsyncConnection"): _SQLALCHEMY_ASYNC,
    ("django", "DatabaseWrapper"): _DJANGO,
    ("django", "ConnectionProxy"): _DJANGO,
}
