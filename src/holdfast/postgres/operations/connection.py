"""An operator's connection, and the transactions in which its statements run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import asyncpg

from holdfast.errors import ConfigurationError
from holdfast.postgres import doctor
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.doctor import Part, Report
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.postgres.operations import metrics, status, sweeping
from holdfast.postgres.operations.metrics import Snapshot
from holdfast.postgres.operations.patience import LockWatch, ReadLimit
from holdfast.postgres.operations.status import Status
from holdfast.postgres.operations.sweeping import SweepReport
from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import Batch
from holdfast.postgres.schema import migrate

STATEMENT_TIMEOUT = 90.0

_LOGIN = "SELECT pg_catalog.quote_ident(session_user), pg_catalog.to_regrole('holdfast_operator') IS NOT NULL"


class Statements:
    """The named statements of a schema, on a connection with an open transaction."""

    def __init__(self, connection: asyncpg.Connection, queries: Queries) -> None:
        self.connection = connection
        self.queries = queries

    async def fetch(self, name: str, /, **values: object) -> list[asyncpg.Record]:
        """All rows of a statement."""
        statement = self.queries.asyncpg(name)
        rows: list[asyncpg.Record] = await self.connection.fetch(statement.sql, *statement.bind(values))
        return rows

    async def row(self, name: str, /, **values: object) -> asyncpg.Record:
        """The row of a statement that always has exactly one."""
        (row,) = await self.fetch(name, **values)
        return row

    async def value(self, name: str, /, **values: object) -> Any:
        """The first column of the first row."""
        return (await self.fetch(name, **values))[0][0]


class OperatorConnection:
    """One connection to one schema. The schema's version is checked before the first statement that depends on it."""

    def __init__(
        self,
        address: Address | str,
        schema: str,
        on_wait: Callable[[str], None] = lambda _what: None,
        *,
        read_timeout: float | None = None,
    ) -> None:
        self.schema = schema
        self._queries = Queries(schema)
        self._address = address if isinstance(address, Address) else Address(address)
        self._locks = LockWatch(self._address, self._queries, on_wait)
        self._read_limit = None if read_timeout is None else ReadLimit(read_timeout)
        self._connection: asyncpg.Connection | None = None
        self._checked = False

    @property
    def dsn(self) -> str:
        """The address, with the password that it may have."""
        return self._address.dsn

    async def open(self) -> None:
        if not self._address.reached:
            await self._address.probe()
        self._connection = await connect(self._address, "operator", statement_timeout=STATEMENT_TIMEOUT)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.close(timeout=2)
            except CONNECTION_FAULTS:  # what was asked of it is answered, and the server ends the session by itself
                connection.terminate()

    def terminate(self) -> None:
        """Forget the connection; nothing is asked of the other side."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def usable(self, timeout: float) -> bool:
        """Whether the other side still answers, and no transaction was left behind."""
        connection = self._connection
        if connection is None or connection.is_closed() or connection.is_in_transaction():
            return False
        try:
            await connection.fetchval("SELECT 1", timeout=timeout)
        except (*CONNECTION_FAULTS, asyncpg.PostgresError):
            return False
        return True

    @property
    def idle(self) -> bool:
        """Whether the connection is open, and between two transactions."""
        connection = self._connection
        return connection is not None and not connection.is_closed() and not connection.is_in_transaction()

    @property
    def driver(self) -> asyncpg.Connection:
        """The driver's connection."""
        if self._connection is None:
            raise ConfigurationError("operator", "is not connected", "write: async with Operator(...) as operator")
        return self._connection

    @property
    def lost(self) -> bool:
        return bool(self.driver.is_closed())

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Statements]:
        """One snapshot for all statements of the block, with a time limit."""
        connection = await self._current()
        async with (
            self._rights(connection),
            self._limited(connection),
            self._locks.over(connection),
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            statements = Statements(connection, self._queries)
            await statements.fetch("begin_read")
            if self._read_limit is not None:
                await statements.fetch("limit_read", limit=self._read_limit.setting)
            yield statements

    @asynccontextmanager
    async def changing(self, *, dry_run: bool = False, selection: str | None = None) -> AsyncIterator[Statements]:
        """One transaction, which is rolled back after an error and after a dry run. Its audit says the selection."""
        connection = await self._current()
        async with self._rights(connection), self._locks.over(connection):
            transaction = connection.transaction(isolation="read_committed")
            await transaction.start()
            try:
                statements = Statements(connection, self._queries)
                await statements.fetch("begin_action")
                if selection is not None:
                    await statements.fetch("note_selection", selection=selection)
                if dry_run:
                    await statements.fetch("note_dry_run")
                yield statements
            except BaseException:
                if not connection.is_closed():
                    await transaction.rollback()
                raise
            await (transaction.rollback() if dry_run else transaction.commit())

    async def status(self) -> Status:
        """The state of the schema, in one snapshot."""
        connection = await self._current()
        limit = self._read_limit
        async with self._rights(connection), self._limited(connection), self._locks.over(connection):
            return await status.read(connection, self.schema, None if limit is None else limit.setting)

    async def snapshot(self) -> Snapshot:
        """What metrics are made of."""
        connection = await self._current()
        async with self._rights(connection), self._limited(connection), self._locks.over(connection):
            return await metrics.snapshot(connection, self.schema)

    async def examine(self, only: Part | None) -> Report:
        """The doctor's report; the schema may have any version, or be missing."""
        async with self._locks.seen(self.driver) as waits:
            return await doctor.examine(self.driver, self.schema, only=only, pooled=self._address.pooled, waits=waits)

    async def sweep(self, actor: str, reason: str | None, on_batch: Callable[[Batch], None]) -> SweepReport:
        """Take everything that is due, in batches with transactions of their own."""
        connection = await self._current()
        async with self._rights(connection), self._locks.over(connection):
            return await sweeping.sweep(connection, self._queries, actor, reason, on_batch)

    def _limited(self, connection: asyncpg.Connection) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._read_limit is None else self._read_limit.over(connection)

    @asynccontextmanager
    async def _rights(self, connection: asyncpg.Connection) -> AsyncIterator[None]:
        """Name the role that the login lacks, when the server denies it something."""
        try:
            yield
        except asyncpg.InsufficientPrivilegeError as error:
            if not error.hint and not connection.is_closed() and not connection.is_in_transaction():
                login, has_roles = await connection.fetchrow(_LOGIN)
                grant = (
                    "use a login that has the role holdfast_operator, or as an administrator: "
                    f"GRANT holdfast_operator TO {login}"
                )
                error.remedy = grant if has_roles else f"use the login that owns the schema {self.schema}"
            raise

    async def _current(self) -> asyncpg.Connection:
        connection = self.driver
        if not self._checked:
            await migrate.require_compatible(connection, self.schema, role="operator")
            self._checked = True
        return connection
