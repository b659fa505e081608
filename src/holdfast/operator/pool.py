"""Operators for many callers at once: a few connections that all pages and requests of a process share."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Self

from holdfast.checks import number, whole
from holdfast.errors import RemediedError
from holdfast.operator.operator import Operator
from holdfast.postgres.connection import Address
from holdfast.postgres.faults import CONNECTION_FAULTS, DATABASE_ERRORS
from holdfast.postgres.operations.connection import OperatorConnection
from holdfast.postgres.queries import Queries
from holdfast.tracing import Tracing

_TRUSTED_FOR: Final = 1.0  # a connection that answered a moment ago is not asked again
_HEALTH_TIMEOUT: Final = 1.0
_CONNECT_TIMEOUT: Final = 5.0


class OperatorsBusy(RemediedError):
    """All connections of the pool were in use for too long; nothing was done."""


class DatabaseAway(RemediedError):
    """The database cannot be reached, or went away in the middle; the next call tries it again."""


class Operators:
    """A pool of connections. `acting` lends one, as the `Operator` of whoever acts.

        async with Operators(dsn) as operators:
            async with operators.acting("ada@example.com") as operator:
                status = await operator.status()

    A read through it ends after `read_timeout` seconds with `ReadTimeout`; changes have the time they always have. Who
    asks while all connections are in use waits `wait` seconds, and gets `OperatorsBusy`. The pool opens connections
    when they are needed, so it starts without a database; while there is none, callers get `DatabaseAway`.
    """

    def __init__(
        self,
        dsn: str,
        *,
        schema: str = "core",
        size: int = 4,
        read_timeout: float = 2.0,
        wait: float = 5.0,
        tracing: Tracing | None = None,
    ) -> None:
        self.schema = schema
        self.size = whole("size", size, 1, 100)
        self.read_timeout = number("read_timeout", read_timeout, 0.05, 90)
        self._wait = number("wait", wait, 0.05, 90)
        self._dsn = dsn
        self._address = Address(dsn)
        self._others: Operators | None = None
        self._tracing = tracing
        self._free = asyncio.Semaphore(self.size)
        self._idle: list[tuple[OperatorConnection, float]] = []  # with when it was used last; the latest at the end
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the idle connections now, and each of the others when it comes back."""
        self._closed = True
        while self._idle:
            connection, _ = self._idle.pop()
            with suppress(*CONNECTION_FAULTS):
                await connection.close()
        if self._others is not None:
            await self._others.close()

    @asynccontextmanager
    async def acting(self, actor: str) -> AsyncIterator[Operator]:
        """Lend a connection, as an operator with this name in the audit. It must not be kept after the block."""
        async with self._lending() as connection:
            yield Operator.on(connection, actor, self._tracing)

    @asynccontextmanager
    async def records(self) -> AsyncIterator[Any]:
        """Lend the driver's connection of another pool of the same size, for records of requests.

        Not from this one: who holds one connection and waits for a second would wait for others that do the same.
        """
        if self._others is None:
            self._others = Operators(
                self._dsn, schema=self.schema, size=self.size, read_timeout=self.read_timeout, wait=self._wait
            )
        async with self._others._lending() as connection:
            yield connection.driver

    async def secrets(self) -> dict[int, str]:
        """Return secrets that all processes with this address have: the database's, and the one before it."""
        statement = Queries(self.schema).asyncpg("operator_secret")
        async with self.records() as connection:
            secret: str = await connection.fetchval(statement.sql)
        return {1: hashlib.sha256(f"holdfast records {self._dsn}".encode()).hexdigest(), 2: secret}

    @asynccontextmanager
    async def _lending(self) -> AsyncIterator[OperatorConnection]:
        try:
            async with asyncio.timeout(self._wait):
                await self._free.acquire()
        except TimeoutError:
            raise OperatorsBusy(
                f"all {self.size} connections to the database are in use",
                "try again in a moment; if that happens often, look for slow reads or give the pool more connections",
            ) from None
        connection: OperatorConnection | None = None
        try:
            connection = await self._connection()
            yield connection
        except CONNECTION_FAULTS as error:
            if connection is None or connection.idle:
                raise
            raise DatabaseAway(
                "the connection to the database was lost",
                "if this was to change something, look at the audit before you do it again",
            ) from error
        finally:
            self._take_back(connection)
            self._free.release()

    async def _connection(self) -> OperatorConnection:
        """A connection that answers: one that is idle, or a new one."""
        if self._closed:
            raise DatabaseAway("the pool of operators is closed", "the process is shutting down")
        while self._idle:
            connection, used_at = self._idle.pop()
            if connection.idle and time.monotonic() - used_at < _TRUSTED_FOR:
                return connection
            try:
                if await connection.usable(_HEALTH_TIMEOUT):
                    return connection
            except BaseException:
                connection.terminate()
                raise
            connection.terminate()
            self._address.found(False)
        connection = OperatorConnection(self._address, self.schema, read_timeout=self.read_timeout)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                await connection.open()
        except DATABASE_ERRORS as error:
            raise DatabaseAway(
                "the database cannot be reached", "wait for it: it is tried again with every request"
            ) from error
        return connection

    def _take_back(self, connection: OperatorConnection | None) -> None:
        if connection is None:
            return
        if self._closed or not connection.idle:
            # Closed by the other side, or left within a transaction by somebody who was cancelled.
            connection.terminate()
        else:
            self._idle.append((connection, time.monotonic()))
