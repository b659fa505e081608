"""Handlers that write in a transaction of the application's library, and the loop that does the same by hand.

Both write the same rows with the same sessions, ten at a time. The loop locks the row, writes the inbox and the
handler's row, and settles, in one transaction for each event.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from benchmarks.systems.harness import BUSINESS
from holdfast import EventEnvelope

PLACES = 10
NOTE = "x"


def control(first: str, second: str) -> list[str]:
    """The statements of the control, with such parameters: lock the row, write the inbox, settle."""
    from benchmarks.systems.raw.statements import ENTER, INBOX, LEAVE

    return [each.replace("$1", first).replace("$2", second) for each in (ENTER, INBOX, LEAVE)]


class Library(ABC):
    """One library: its sessions, a handler that writes with them, and one event by hand."""

    asynchronous = True

    @abstractmethod
    def source(self, dsn: str) -> contextlib.AbstractAsyncContextManager[Any]:
        """What makes the sessions."""

    @abstractmethod
    def handler(self, handled: list[None]) -> Callable[..., Any]:
        """A handler that writes one row."""

    @abstractmethod
    def by_hand(self, source: Any, row: Any, token: Any) -> Any:
        """Handle one event in one transaction; a coroutine, where the library has them."""

    def leave_thread(self) -> None:  # noqa: B027  (most have nothing to do here)
        """Close what a thread has opened."""


class AsyncSessions(Library):
    """AsyncSession of SQLAlchemy, on asyncpg."""

    def __init__(self) -> None:
        import sqlalchemy

        from benchmarks.systems.models import Order

        self._order = Order
        self._enter, self._inbox, self._leave = map(sqlalchemy.text, control(":id", ":token"))

    @contextlib.asynccontextmanager
    async def source(self, dsn: str) -> AsyncIterator[Any]:
        from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

        address = dsn.replace("postgresql://", "postgresql+asyncpg://", 1)
        engine = create_async_engine(address, pool_size=PLACES, max_overflow=0)
        try:
            yield async_sessionmaker(engine)
        finally:
            await engine.dispose()

    def handler(self, handled: list[None]) -> Callable[..., Any]:
        from sqlalchemy.ext.asyncio import AsyncSession

        async def handle(event: EventEnvelope, tx: Any) -> None:
            tx.add(self._order(note=NOTE))
            handled.append(None)

        handle.__annotations__ = {"event": EventEnvelope, "tx": AsyncSession}
        return handle

    async def by_hand(self, source: Any, row: Any, token: Any) -> None:
        json.loads(row["payload"])
        async with source() as session, session.begin():
            assert (await session.execute(self._enter, {"id": row["id"], "token": token})).scalar()
            await session.execute(self._inbox, {"id": row["idempotency_key"]})
            session.add(self._order(note=NOTE))
            await session.execute(self._leave, {"id": row["id"], "token": token})


class Sessions(AsyncSessions):
    """Session of SQLAlchemy, on psycopg, in threads."""

    asynchronous = False

    @contextlib.asynccontextmanager
    async def source(self, dsn: str) -> AsyncIterator[Any]:
        from sqlalchemy import create_engine
        from sqlalchemy.orm import sessionmaker

        address = dsn.replace("postgresql://", "postgresql+psycopg://", 1)
        engine = create_engine(address, pool_size=PLACES, max_overflow=0)
        try:
            yield sessionmaker(engine)
        finally:
            engine.dispose()

    def handler(self, handled: list[None]) -> Callable[..., Any]:
        from sqlalchemy.orm import Session

        def handle(event: EventEnvelope, tx: Any) -> None:
            tx.add(self._order(note=NOTE))
            handled.append(None)

        handle.__annotations__ = {"event": EventEnvelope, "tx": Session}
        return handle

    def by_hand(self, source: Any, row: Any, token: Any) -> None:  # type: ignore[override]
        json.loads(row["payload"])
        with source() as session, session.begin():
            assert session.execute(self._enter, {"id": row["id"], "token": token}).scalar()
            session.execute(self._inbox, {"id": row["idempotency_key"]})
            session.add(self._order(note=NOTE))
            session.execute(self._leave, {"id": row["id"], "token": token})


class AsyncPsycopg(Library):
    """AsyncConnection of psycopg."""

    def __init__(self) -> None:
        self._enter, self._inbox, self._leave = control("%(id)s", "%(token)s")

    @contextlib.asynccontextmanager
    async def source(self, dsn: str) -> AsyncIterator[Any]:
        from psycopg_pool import AsyncConnectionPool

        async with AsyncConnectionPool(dsn, min_size=PLACES, max_size=PLACES, open=False) as pool:
            await pool.wait()
            yield pool

    def handler(self, handled: list[None]) -> Callable[..., Any]:
        import psycopg

        async def handle(event: EventEnvelope, tx: Any) -> None:
            await tx.execute(BUSINESS)
            handled.append(None)

        handle.__annotations__ = {"event": EventEnvelope, "tx": psycopg.AsyncConnection}
        return handle

    async def by_hand(self, source: Any, row: Any, token: Any) -> None:
        json.loads(row["payload"])
        async with source.connection() as connection, connection.transaction():
            cursor = await connection.execute(self._enter, {"id": row["id"], "token": token})
            assert await cursor.fetchone()
            await connection.execute(self._inbox, {"id": row["idempotency_key"]})
            await connection.execute(BUSINESS)
            await connection.execute(self._leave, {"id": row["id"], "token": token})


class Psycopg(AsyncPsycopg):
    """Connection of psycopg, in threads."""

    asynchronous = False

    @contextlib.asynccontextmanager
    async def source(self, dsn: str) -> AsyncIterator[Any]:
        from psycopg_pool import ConnectionPool

        with ConnectionPool(dsn, min_size=PLACES, max_size=PLACES, open=False) as pool:
            pool.wait()
            yield pool

    def handler(self, handled: list[None]) -> Callable[..., Any]:
        import psycopg

        def handle(event: EventEnvelope, tx: Any) -> None:
            tx.execute(BUSINESS)
            handled.append(None)

        handle.__annotations__ = {"event": EventEnvelope, "tx": psycopg.Connection}
        return handle

    def by_hand(self, source: Any, row: Any, token: Any) -> None:  # type: ignore[override]
        json.loads(row["payload"])
        with source.connection() as connection, connection.transaction():
            assert connection.execute(self._enter, {"id": row["id"], "token": token}).fetchone()
            connection.execute(self._inbox, {"id": row["idempotency_key"]})
            connection.execute(BUSINESS)
            connection.execute(self._leave, {"id": row["id"], "token": token})


class Django(Library):
    """Django's ORM inside `atomic`, in threads."""

    asynchronous = False

    def __init__(self) -> None:
        self._enter, self._inbox, self._leave = control("%(id)s", "%(token)s")

    @contextlib.asynccontextmanager
    async def source(self, dsn: str) -> AsyncIterator[Any]:
        import django
        from django.conf import settings

        parts = urlsplit(dsn)
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path[1:],
            "USER": unquote(parts.username or ""),
            "PASSWORD": unquote(parts.password or ""),
            "HOST": parts.hostname,
            "PORT": parts.port,
            "CONN_MAX_AGE": None,
        }
        settings.configure(DATABASES={"default": database}, INSTALLED_APPS=[])
        django.setup()
        from django.db import connection

        yield connection

    def handler(self, handled: list[None]) -> Callable[..., Any]:
        from django.db.backends.base.base import BaseDatabaseWrapper

        from benchmarks.systems.django_models import Order

        def handle(event: EventEnvelope, tx: Any) -> None:
            Order.objects.create(note=NOTE)
            handled.append(None)

        handle.__annotations__ = {"event": EventEnvelope, "tx": BaseDatabaseWrapper}
        return handle

    def by_hand(self, source: Any, row: Any, token: Any) -> None:
        from django.db import connection, transaction

        from benchmarks.systems.django_models import Order

        json.loads(row["payload"])
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(self._enter, {"id": row["id"], "token": token})
            assert cursor.fetchone()
            cursor.execute(self._inbox, {"id": row["idempotency_key"]})
            Order.objects.create(note=NOTE)
            cursor.execute(self._leave, {"id": row["id"], "token": token})

    def leave_thread(self) -> None:
        from django.db import connections

        connections.close_all()


LIBRARIES: dict[str, Callable[[], Library]] = {
    "async_session": AsyncSessions,
    "session": Sessions,
    "psycopg_async": AsyncPsycopg,
    "psycopg": Psycopg,
    "django": Django,
}


class HandThreads:
    """Ten threads that handle events by hand, fed from an event loop."""

    def __init__(self, library: Library, source: Any, handled: list[None]) -> None:
        self._library = library
        self._handled = handled
        self._source = source
        self._rows: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work) for _ in range(PLACES)]
        self.errors: list[BaseException] = []
        for thread in self._threads:
            thread.start()

    def put(self, item: Any) -> None:
        self._rows.put(item)

    def _work(self) -> None:
        try:
            while (item := self._rows.get()) is not None:
                self._library.by_hand(self._source, *item)
                self._handled.append(None)
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._library.leave_thread()

    def join(self) -> None:
        for _ in self._threads:
            self._rows.put(None)
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
