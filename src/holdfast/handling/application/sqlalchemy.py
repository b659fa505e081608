"""Transactions of SQLAlchemy: sessions of a factory, and connections of an engine, asynchronous and not.

The session begins and commits; statements of Holdfast's go straight to the driver in between. A failed flush makes the
session roll back to its beginning, unless it happens in `begin_nested()`: then the delivery is settled on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.errors import FieldError
from holdfast.handlers import Handler
from holdfast.handling.application.transaction import ApplicationTransaction, awaited
from holdfast.postgres.drivers import sqlalchemy_rows
from holdfast.postgres.queries import Queries


class SqlalchemyTransaction(ApplicationTransaction):
    """On a session or connection that `make` returns."""

    savepoint = "tx.begin_nested()"
    _ending = ("commit", "rollback", "close", "reset")

    def __init__(self, queries: Queries, make: Callable[[], Any], *, asynchronous: bool) -> None:
        super().__init__(queries)
        self._make = make
        self._asynchronous = asynchronous
        self._connection: Any = None
        self._direct = False  # the transaction has begun on the server too

    async def open(self) -> None:
        self.tx = self._make()
        if hasattr(self.tx, "start"):
            await self.tx.start()
        await self._connect()

    async def _begin(self) -> None:
        if not self.is_held() or self._lent().get_transaction() is None:
            await self._connect()

    async def _connect(self) -> None:
        """Take a connection from the pool. It begins, for SQLAlchemy; the server may learn of it later."""
        self._direct = False
        if hasattr(self._lent(), "get_bind"):
            connection = await self._do(self.tx.connection)
        else:
            await self._do(self.tx.begin)
            connection = self.tx
        self._connection = connection.sync_connection if self._asynchronous else connection
        if getattr(self._connection.connection.dbapi_connection, "autocommit", False):
            raise FieldError(
                "tx", "has no transactions, because its engine is in AUTOCOMMIT mode", "leave out isolation_level"
            )
        self._begun = self._lent().get_transaction()
        self._use(self._connection.connection.driver_connection)
        self._direct = self._driver is not None and self._driver.begins_by_itself

    async def enter_at_once(self, statement: Callable[[bool], str], patience: float) -> bool:
        return self._direct and await super().enter_at_once(statement, patience)

    async def rows(self, name: str, values: Mapping[str, object]) -> Sequence[Sequence[Any]]:
        if self._direct:
            return await super().rows(name, values)
        rows: Sequence[Sequence[Any]] = await self._through_sqlalchemy(name, values)
        self._direct = self._driver is not None
        return rows

    async def _command(self, name: str) -> None:
        if self._direct:
            await super()._command(name)
        else:
            await self._through_sqlalchemy(name, {})

    async def _through_sqlalchemy(self, name: str, values: Mapping[str, object]) -> Any:
        if self._asynchronous:
            return await self.tx.run_sync(sqlalchemy_rows, self._queries, name, values)
        return sqlalchemy_rows(self.tx, self._queries, name, values)

    def _lent(self) -> Any:
        return getattr(self.tx, "sync_session", None) or getattr(self.tx, "sync_connection", None) or self.tx

    def is_held(self) -> bool:
        # A session gives it back with its commit and with its rollback.
        return self._connection is not None and not self._connection.closed

    def is_over(self) -> bool:
        return self._connection is not None and bool(self._connection.closed)

    def _is_active(self) -> bool:
        """Return whether no flush has failed, after which the session has rolled back."""
        return bool(getattr(self._lent(), "is_active", True))

    def _is_open(self) -> bool:
        if not self._is_active():
            return True  # the commit says what is wrong
        return self._lent().get_transaction() is self._begun and self.is_held() and super()._is_open()

    async def commit(self, handler: Handler) -> None:
        if not self._is_active():
            raise self._went_on(handler)
        await super().commit(handler)

    async def _commit(self) -> None:
        await self._do(self.tx.commit)

    async def _rollback(self) -> None:
        await self._do(self.tx.rollback)

    async def give_back(self) -> None:
        if self._asynchronous and self.is_over():
            self._lent().close()  # which waits for nothing: the connection is in its pool
            return
        if self._is_lost():
            # Or the pool would send a rollback there, and report that it could not.
            await self._do(self.tx.invalidate)
        await self._do(self.tx.close)

    async def _do(self, method: Callable[..., Any]) -> Any:
        return await awaited(method, asynchronous=self._asynchronous)
