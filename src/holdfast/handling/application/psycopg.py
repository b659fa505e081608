"""Transactions of psycopg 3, on connections of psycopg_pool, asynchronous and not."""

from __future__ import annotations

from typing import Any

from holdfast.handling.application.transaction import ApplicationTransaction, awaited
from holdfast.postgres.queries import Queries

_RELEASE_AND_COMMIT = ("release_handler", "commit_handler")


class PsycopgTransaction(ApplicationTransaction):
    """On a connection in autocommit mode or not. `tx.transaction()` in the handler is a savepoint in both."""

    savepoint = "tx.transaction()"
    _ending = ("commit", "rollback", "close")

    def __init__(self, queries: Queries, pool: Any, *, asynchronous: bool) -> None:
        super().__init__(queries)
        self._pool = pool
        self._asynchronous = asynchronous

    async def open(self) -> None:
        self.tx = await self._do(self._pool.getconn)
        self._use(self.tx)

    async def _begin(self) -> None:
        # Otherwise psycopg begins with the first statement, as the connection's own settings say.
        if self.tx.autocommit:
            await self._command("begin_handler")

    def _lent(self) -> Any:
        return self.tx

    async def _release_savepoint(self) -> None:
        # In one message: if the first fails, the second is not carried out.
        await self._connected().script("; ".join(self._queries.psycopg(each) for each in _RELEASE_AND_COMMIT))

    async def _commit(self) -> None:
        if not self._marked:
            await self._command("commit_handler")

    async def _rollback(self) -> None:
        await self._do(self.tx.rollback)

    async def give_back(self) -> None:
        if self._driver is None:
            return  # the pool has given none
        if self._severed or self._driver.status != "idle":
            await self._do(self.tx.close)  # in a transaction that nothing else can end now
        await self._do(self._pool.putconn, self.tx)

    async def _do(self, method: Any, *arguments: Any) -> Any:
        return await awaited(method, *arguments, asynchronous=self._asynchronous)
