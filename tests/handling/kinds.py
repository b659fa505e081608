"""Each kind of transaction that a handler may take, behind one way to write: so that one suite runs on all of them.

A handler's body is a coroutine function of an event and a `Work`. With a synchronous library it never suspends, and
the thread of the handler runs it to its end.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg
import psycopg
import psycopg_pool
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa

from holdfast import EventEnvelope
from holdfast.handling.application.sources import finished
from holdfast.idempotency import Commands

# `once` makes a second row of the same event fail with its statement, `at_commit` one of the same number at the commit.
TABLE = """
CREATE TABLE entries (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, event_id uuid CONSTRAINT once UNIQUE, n int,
    CONSTRAINT at_commit UNIQUE (n) DEFERRABLE INITIALLY DEFERRED)
"""


class Base(orm.DeclarativeBase):
    pass


class Entry(Base):
    """A row of `entries`."""

    __tablename__ = "entries"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    event_id: orm.Mapped[Any] = orm.mapped_column(sqlalchemy.Uuid)
    n: orm.Mapped[int | None]


class Work:
    """What a handler does with its transaction."""

    def __init__(self, tx: Any, kind: Kind) -> None:
        self.tx = tx
        self.kind = kind

    async def book(self, event: EventEnvelope, n: int = 0) -> None:
        """Write a row: with the mapper, where the library has one, so that it is written by a flush."""
        if self.kind.package == "django":
            from tests.handling.djangomodels import Entry as DjangoEntry

            DjangoEntry.objects.create(event_id=event.event_id, n=n)
        elif hasattr(self.tx, "add"):
            self.tx.add(Entry(event_id=event.event_id, n=n))
        else:
            await self.execute(f"INSERT INTO entries (event_id, n) VALUES ('{event.event_id}', {n})")

    async def execute(self, sql: str) -> None:
        if self.kind.package == "sqlalchemy":
            await self._do(self.tx.execute(sqlalchemy.text(sql)))
        elif self.kind.package == "django":
            with self.tx.cursor() as cursor:
                cursor.execute(sql)
        else:
            await self._do(self.tx.execute(sql))

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        if self.kind.package == "django":
            from django.db import transaction

            block: Any = transaction.atomic()
        else:
            block = self.tx.begin_nested() if self.kind.package == "sqlalchemy" else self.tx.transaction()
        if self.kind.asynchronous:
            async with block:
                yield
        else:
            with block:
                yield

    async def flush(self) -> None:
        if hasattr(self.tx, "flush"):
            await self._do(self.tx.flush())

    async def commit(self) -> None:
        if self.kind.package == "asyncpg":
            await self.tx.execute("COMMIT")
        else:
            await self._do(self.tx.commit())

    async def rollback(self) -> None:
        if self.kind.package == "asyncpg":
            await self.tx.execute("ROLLBACK")
        else:
            await self._do(self.tx.rollback())

    async def publish(self, publisher: Any, event_type: str, payload: dict[str, Any]) -> None:
        await self._do(publisher.publish(self.tx, event_type, payload))

    async def command(self, commands: Commands, key: str, command: dict[str, Any], work: Callable[[], Any]) -> Any:
        """Run a command; `work` is a coroutine function."""
        given = work if self.kind.asynchronous else lambda: finished(work())
        return await self._do(commands.run(self.tx, key, command, given))

    async def _do(self, result: Any) -> Any:
        return await result if self.kind.asynchronous else result


Body = Callable[[EventEnvelope, Work], Awaitable[Any]]


@dataclass(frozen=True)
class Kind:
    """One kind: how tests name it, its class, and what makes its objects."""

    name: str
    package: str
    asynchronous: bool
    annotation: Any
    source: Callable[..., contextlib.AbstractAsyncContextManager[Any]]

    def __str__(self) -> str:
        return self.name

    def handler(self, body: Body) -> Callable[..., Any]:
        """Return a handler that takes such a `tx` and does what the body does."""
        if self.asynchronous:

            async def handle(event: EventEnvelope, tx: Any) -> Any:
                return await body(event, Work(tx, self))
        else:

            def handle(event: EventEnvelope, tx: Any) -> Any:  # type: ignore[misc]
                return finished(body(event, Work(tx, self)))

        handle.__annotations__ = {"event": EventEnvelope, "tx": self.annotation}
        return handle


NAME = "application"  # of its connections
Options = dict[str, Any]


@contextlib.asynccontextmanager
async def none(dsn: str, **_: Any) -> AsyncIterator[None]:
    yield None


def _engine(dsn: str, driver: str) -> str:
    return dsn.replace("postgresql://", f"postgresql+{driver}://", 1)


def engine_options(driver: str, options: Options) -> Options:
    name = {"server_settings": {"application_name": NAME}} if driver == "asyncpg" else {"application_name": NAME}
    return {"connect_args": name, "pool_size": 5, "max_overflow": 0, **options}


def async_engines(driver: str, sessions: bool) -> Any:
    @contextlib.asynccontextmanager
    async def source(dsn: str, **options: Any) -> AsyncIterator[Any]:
        engine = sa.create_async_engine(_engine(dsn, driver), **engine_options(driver, options))
        try:
            yield sa.async_sessionmaker(engine) if sessions else engine
        finally:
            await engine.dispose()

    return source


def engines(sessions: bool) -> Any:
    @contextlib.asynccontextmanager
    async def source(dsn: str, **options: Any) -> AsyncIterator[Any]:
        engine = sqlalchemy.create_engine(_engine(dsn, "psycopg"), **engine_options("psycopg", options))
        try:
            yield orm.sessionmaker(engine) if sessions else engine
        finally:
            engine.dispose()

    return source


@contextlib.asynccontextmanager
async def async_pool(dsn: str, **options: Any) -> AsyncIterator[Any]:
    kwargs = {"application_name": NAME, **options.pop("kwargs", {})}
    async with psycopg_pool.AsyncConnectionPool(
        dsn, min_size=0, max_size=5, open=False, kwargs=kwargs, **options
    ) as pool:
        yield pool


@contextlib.asynccontextmanager
async def pool(dsn: str, **options: Any) -> AsyncIterator[Any]:
    kwargs = {"application_name": NAME, **options.pop("kwargs", {})}
    with psycopg_pool.ConnectionPool(dsn, min_size=0, max_size=5, open=False, kwargs=kwargs, **options) as pool:
        yield pool


@contextlib.asynccontextmanager
async def django(dsn: str, **options: Any) -> AsyncIterator[Any]:
    from tests.handling import djangomodels

    parts = urlsplit(dsn)
    djangomodels.use(
        {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path[1:],
            "USER": unquote(parts.username or ""),
            "PASSWORD": unquote(parts.password or ""),
            "HOST": parts.hostname,
            "PORT": parts.port,
            "OPTIONS": {"application_name": NAME, **options},
        }
    )
    yield djangomodels.connection


def _wrapper() -> Any:
    from django.db.backends.base.base import BaseDatabaseWrapper

    return BaseDatabaseWrapper


ASYNCPG = Kind("asyncpg", "asyncpg", True, asyncpg.Connection, none)
ASYNC_SESSION = Kind("AsyncSession", "sqlalchemy", True, sa.AsyncSession, async_engines("asyncpg", True))
ASYNC_SESSION_PSYCOPG = Kind(
    "AsyncSession on psycopg", "sqlalchemy", True, sa.AsyncSession, async_engines("psycopg", True)
)
ASYNC_CONNECTION = Kind("AsyncConnection", "sqlalchemy", True, sa.AsyncConnection, async_engines("asyncpg", False))
SESSION = Kind("Session", "sqlalchemy", False, orm.Session, engines(True))
CONNECTION = Kind("Connection", "sqlalchemy", False, sqlalchemy.Connection, engines(False))
PSYCOPG_ASYNC = Kind("psycopg async", "psycopg", True, psycopg.AsyncConnection, async_pool)
PSYCOPG = Kind("psycopg", "psycopg", False, psycopg.Connection, pool)
DJANGO = Kind("Django", "django", False, _wrapper(), django)
KINDS = (
    ASYNCPG,
    ASYNC_SESSION,
    ASYNC_SESSION_PSYCOPG,
    ASYNC_CONNECTION,
    SESSION,
    CONNECTION,
    PSYCOPG_ASYNC,
    PSYCOPG,
    DJANGO,
)
