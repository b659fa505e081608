"""The connection of a driver, under the session of an application's library: its statements, its state, its end.

Statements go straight to the driver: the work of SQLAlchemy or Django for a statement costs about as much as to run it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from holdfast.postgres.drivers import Values
from holdfast.postgres.queries import Queries

# `unknown`: in a transaction, which may have failed.
Status = Literal["idle", "open", "failed", "unknown", "closed"]
_CANCEL_PATIENCE = 3.0
_STATUSES: dict[int, Status] = {0: "idle", 1: "open", 2: "open", 3: "failed"}  # as libpq numbers them


class DriverConnection(ABC):
    """A connection of one driver. With a synchronous driver its coroutines never suspend."""

    begins_by_itself = True  # a transaction, with the first statement

    def __init__(self, connection: Any, queries: Queries) -> None:
        self._connection = connection
        self._queries = queries

    @abstractmethod
    async def rows(self, name: str, values: Values) -> Sequence[Sequence[Any]]:
        """Return all rows of a named statement."""

    @abstractmethod
    async def command(self, name: str) -> None:
        """Run a named statement that has neither values nor rows."""

    @property
    def begin(self) -> str | None:
        """What a script has to begin with in order to begin a transaction; None where the driver has to begin it."""
        return None

    async def script(self, text: str) -> None:
        """Run several statements, without values, in one message."""
        raise NotImplementedError

    @property
    @abstractmethod
    def status(self) -> Status:
        """What the driver knows of its transaction, without asking the server."""

    def interrupt(self) -> None:  # noqa: B027
        """Ask the server to cancel the statement that runs, if the driver can do so without stopping every thread.

        Any thread may call it, for a connection that another thread waits for.
        """

    def keep_open(self, seconds: float) -> None:  # noqa: B027
        """Let the transaction of a thread be silent for so long from now on."""

    def sever(self) -> None:
        """Close the socket, which fails the statement that waits for it. Any thread may do that."""
        with contextlib.suppress(Exception), socket.socket(fileno=os.dup(self._connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)


class AsyncpgConnection(DriverConnection):
    begins_by_itself = False

    async def rows(self, name: str, values: Values) -> Sequence[Sequence[Any]]:
        statement = self._queries.asyncpg(name)
        rows: list[Any] = await self._connection.fetch(statement.sql, *statement.bind(values))
        return rows

    async def command(self, name: str) -> None:
        await self._connection.execute(self._queries.asyncpg(name).sql)

    @property
    def status(self) -> Status:
        if self._connection.is_closed():
            return "closed"
        return "unknown" if self._connection.is_in_transaction() else "idle"

    def sever(self) -> None:
        with contextlib.suppress(Exception):
            self._connection.terminate()


class _Libpq(DriverConnection):
    @property
    def status(self) -> Status:
        if self._connection.closed:
            return "closed"
        return _STATUSES.get(int(self._connection.info.transaction_status), "closed")

    def keep_open(self, seconds: float) -> None:
        """Let the transaction be silent for so long from now on. Any thread may do that; it waits its turn.

        Nothing is done where statements wait for each other's answers, or one has failed.
        """
        with contextlib.suppress(Exception), self._cursor() as cursor:
            cursor.execute(self._queries.psycopg("keep_open"), {"milliseconds": str(round(seconds * 1000))})

    @abstractmethod
    def _cursor(self) -> Any: ...


class PsycopgConnection(_Libpq):
    async def rows(self, name: str, values: Values) -> Sequence[Sequence[Any]]:
        with self._cursor() as cursor:
            cursor.execute(self._queries.psycopg(name), values)
            rows: list[Any] = cursor.fetchall()
        return rows

    async def command(self, name: str) -> None:
        await self.script(self._queries.psycopg(name))

    @property
    def begin(self) -> str | None:
        connection = self._connection
        if connection.autocommit:
            return "BEGIN; "
        settings = (connection.isolation_level, connection.read_only, connection.deferrable)
        return "BEGIN; " if settings == (None, None, None) else None

    async def script(self, text: str) -> None:
        # As libpq has it: a cursor takes as long as the server needs for such a command.
        _require_success(self._connection.pgconn.exec_(self._encoded(text)))

    def _encoded(self, text: str) -> bytes:
        return text.encode() if text.isascii() else text.encode(self._connection.info.encoding)

    def interrupt(self) -> None:
        from psycopg import capabilities

        # Before libpq 17 it waits for the server's answer with the interpreter's lock held: for a server that does not
        # answer, the whole process would wait.
        if capabilities.has_cancel_safe():
            with contextlib.suppress(Exception):
                self._connection.cancel_safe(timeout=_CANCEL_PATIENCE)

    def _cursor(self) -> Any:
        from psycopg.rows import tuple_row

        return self._connection.cursor(row_factory=tuple_row)  # whatever the application has for its own rows


def _require_success(result: Any) -> None:
    from psycopg import errors, pq

    if result.status != pq.ExecStatus.COMMAND_OK:
        raise errors.error_from_result(result, encoding="utf-8")


class AsyncPsycopgConnection(PsycopgConnection):
    async def rows(self, name: str, values: Values) -> Sequence[Sequence[Any]]:
        async with self._cursor() as cursor:
            await cursor.execute(self._queries.psycopg(name), values)
            rows: list[Any] = await cursor.fetchall()
        return rows

    async def script(self, text: str) -> None:
        from psycopg import generators

        connection = self._connection
        async with connection.lock:
            connection.pgconn.send_query(self._encoded(text))
            results = await connection.wait(generators.execute(connection.pgconn))
        _require_success(results[-1])

    def interrupt(self) -> None:
        """Do nothing: the task that waits is cancelled instead."""


class Psycopg2Connection(_Libpq):
    """psycopg2 is SQLAlchemy's default, and Django takes it as well."""

    async def rows(self, name: str, values: Values) -> Sequence[Sequence[Any]]:
        with self._cursor() as cursor:
            cursor.execute(self._queries.psycopg(name), values)
            rows: list[Any] = cursor.fetchall()
        return rows

    async def command(self, name: str) -> None:
        with self._cursor() as cursor:
            cursor.execute(self._queries.psycopg(name))

    def _cursor(self) -> Any:
        from psycopg2.extensions import cursor  # type: ignore[import-untyped]

        return self._connection.cursor(cursor_factory=cursor)


_BY_CLASS: dict[tuple[str, str], type[DriverConnection]] = {
    ("asyncpg", "Connection"): AsyncpgConnection,
    ("psycopg", "Connection"): PsycopgConnection,
    ("psycopg", "AsyncConnection"): AsyncPsycopgConnection,
    ("psycopg2", "connection"): Psycopg2Connection,
}


def driver_connection(connection: Any, queries: Queries) -> DriverConnection | None:
    """Return the driver's connection for Holdfast's own statements; None for a driver that Holdfast does not know."""
    for cls in type(connection).__mro__:
        known = _BY_CLASS.get((cls.__module__.partition(".")[0], cls.__name__))
        if known is not None:
            return known(connection, queries)
    return None
