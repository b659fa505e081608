"""The transaction of a Django request: two `transaction.atomic` blocks on the connection of the thread.

The outer block is the transaction, the inner one the savepoint for the view's work. The methods are coroutines for the
shared exchange and never suspend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connections, transaction

from holdfast.handling.django_blocks import AtomicBlocks
from holdfast.postgres.faults import is_conflict
from holdfast.postgres.idempotency import ExistingRecord, NewRecord, Records, StoredResponse


class AtomicTransaction:
    """Opens the transaction. `after_commit_failed` gets the error of a function that was to run after the commit."""

    restartable = False  # Django does not let a view end the transaction

    def __init__(self, using: str, records: Records, after_commit_failed: Callable[[Exception], None]) -> None:
        self._using = using
        self._records = records
        self._after_commit_failed = after_commit_failed
        self._watching = False
        self.conflict: BaseException | None = None  # raised by a statement of the view, which may have caught it
        self._blocks = AtomicBlocks(using)
        self._blocks.begin()

    @property
    def ended(self) -> bool:
        return not self._blocks.is_open

    @property
    def needs_rollback(self) -> bool:
        """Whether leaving the block would silently roll back."""
        return bool(transaction.get_rollback(using=self._using))

    def is_lost(self) -> bool:
        return False  # Django's errors say so

    def watch(self) -> None:
        """Watch the errors of all further statements: the view may catch one that it cannot recover from."""
        self._connection.execute_wrappers.append(self._watch)
        self._watching = True

    def _watch(self, execute: Callable[..., Any], *statement: Any) -> Any:
        try:
            return execute(*statement)
        except Exception as error:
            if is_conflict(error):
                self.conflict = error
            raise

    # --- for the shared exchange ------------------------------------------------------------------------------

    async def begin_record(self, record: NewRecord) -> ExistingRecord | None:
        existing: ExistingRecord | None = self._records.begin(self._connection, record)
        return existing

    async def complete_record(self, scope: str, key: str, response: StoredResponse) -> bool:
        self._leave_inner()
        completed: bool = self._records.complete(self._connection, scope, key, response)
        return completed

    async def set_savepoint(self) -> None:
        self._blocks.set_savepoint()

    async def undo(self) -> None:
        self._leave_inner(undo=True)

    async def restart(self) -> None:
        raise NotImplementedError

    async def confirm(self) -> None:
        self._leave_inner()
        with self._connection.cursor() as cursor:
            cursor.execute(self._records.queries.psycopg("confirm_request"))

    async def commit(self) -> None:
        try:
            self._blocks.leave_outer()
        except Exception as error:
            if not self._blocks.committed:
                raise
            self._after_commit_failed(error)

    async def rollback(self) -> None:
        for leave in (self._leave_inner, self._blocks.leave_outer):
            try:
                leave(undo=True)
            except Exception:
                # A connection that cannot roll back is lost, and its transaction with it.
                self._connection.close()

    @property
    def _connection(self) -> Any:
        return connections[self._using]

    def _leave_inner(self, *, undo: bool = False) -> None:
        if self._watching:
            self._watching = False
            self._connection.execute_wrappers.remove(self._watch)
        self._blocks.leave_inner(undo=undo)
