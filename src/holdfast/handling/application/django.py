"""Transactions of Django: two `transaction.atomic` blocks on the connection of the handler's thread.

The outer block is the transaction, the inner one the savepoint for the handler's work, so that Django's own rules hold
in it: `on_commit`, nested `atomic`, and the refusal of `commit()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.errors import TransientHandlerError
from holdfast.handlers import Handler
from holdfast.handling.application.transaction import ApplicationTransaction
from holdfast.handling.django_blocks import AtomicBlocks
from holdfast.postgres.queries import Queries


class DjangoTransaction(ApplicationTransaction):
    """On the thread's connection of one alias, which stays open for the next handler in the thread."""

    savepoint = "transaction.atomic()"
    _ending = ("commit", "rollback", "set_autocommit", "close")

    def __init__(self, queries: Queries, alias: str) -> None:
        super().__init__(queries)
        self._alias = alias
        self._blocks = AtomicBlocks(alias)

    async def open(self) -> None:
        from django.db import connections

        self.tx = connections[self._alias]
        if self.tx.connection is not None and not self.tx.in_atomic_block and self.tx.errors_occurred:
            if self.tx.is_usable():
                self.tx.errors_occurred = False
            else:
                self.tx.close()
        self.tx.ensure_connection()
        self._use(self.tx.connection)

    async def _begin(self) -> None:
        self._blocks.begin()

    async def enter_at_once(self, statement: Callable[[bool], str], patience: float) -> bool:
        return False  # the blocks are Django's to begin

    async def rows(self, name: str, values: Mapping[str, object]) -> Sequence[Sequence[Any]]:
        if self._driver is not None:
            return await super().rows(name, values)
        with self.tx.cursor() as cursor:
            cursor.execute(self._queries.psycopg(name), values)
            rows: Sequence[Sequence[Any]] = cursor.fetchall()
        return rows

    async def set_savepoint(self) -> None:
        self._blocks.set_savepoint()
        self._marked = True

    def _lent(self) -> Any:
        return self.tx

    async def commit(self, handler: Handler) -> None:
        if self.tx.needs_rollback:
            # Django would roll back, and say nothing.
            raise TransientHandlerError(
                f"{handler.name} went on after a statement had failed, or after set_rollback(True), and nothing could "
                f"be committed; use {self.savepoint} for a part that may fail, and raise or return Reject to roll back"
            )
        await super().commit(handler)

    async def _release_savepoint(self) -> None:
        self._blocks.leave_inner()

    async def _commit(self) -> None:
        try:
            self._blocks.leave_outer()
        except Exception as error:
            if not self._blocks.committed:
                raise
            self.after_commit_error = error

    async def undo(self) -> None:
        if not self._blocks.has_savepoint:
            raise ConnectionAbortedError("the transaction has ended")
        self._blocks.leave_inner(undo=True)

    async def commit_undone(self) -> None:
        await self._commit()

    async def _rollback(self) -> None:
        self._blocks.leave_inner(undo=True)
        self._blocks.leave_outer(undo=True)

    async def give_back(self) -> None:
        if self._driver is None and not self._blocks.is_open:
            return
        try:
            await self._rollback()  # what is left of it
        except Exception:
            self._severed = True
        if self._is_lost():
            self.tx.close()


def configured_alias() -> str:
    """Return which of `DATABASES` has the outbox: `USING` in the setting `HOLDFAST`, else Django's default."""
    from django.conf import settings
    from django.db import DEFAULT_DB_ALIAS

    return str(getattr(settings, "HOLDFAST", {}).get("USING", DEFAULT_DB_ALIAS))


def close_connections() -> None:
    """Close the connections of this thread, which ends."""
    from django.db import connections

    connections.close_all()
