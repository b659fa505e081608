"""The transaction of an ASGI request: a managed transaction whose statements have deadlines."""

from __future__ import annotations

import asyncio
import contextlib

from holdfast.idempotency.settings import IdempotencySettings
from holdfast.postgres.idempotency import (
    ExistingRecord,
    NewRecord,
    StoredResponse,
    begin_values,
    complete_values,
    existing_record,
)
from holdfast.postgres.managed_transaction import ManagedTransaction

_NO_LIMIT = contextlib.nullcontext()


class AsgiTransaction:
    """Runs the statements of one request. Those of `settle` and the rollback share the deadline of their caller."""

    restartable = True

    def __init__(self, managed: ManagedTransaction, settings: IdempotencySettings) -> None:
        self.managed = managed
        self._settings = settings
        # Straight to the managed transaction: nothing is added to these.
        self.is_lost = managed.is_lost
        self.undo = managed.undo
        self.restart = managed.restart
        self.confirm = managed.confirm
        self.commit = managed.commit
        self.rollback = managed.rollback

    @property
    def ended(self) -> bool:
        return self.managed.ended

    async def begin_record(self, record: NewRecord) -> ExistingRecord | None:
        settings = self._settings
        answered = settings.wait + settings.commit_within
        # Before a late connection there is none to cut.
        patience = settings.connect_within + answered
        async with asyncio.timeout(patience) if self.managed.connects_late else _NO_LIMIT:
            with self.managed.deadline(answered):
                return existing_record(await self.managed.run("begin_command", begin_values(record), waits=True))

    async def complete_record(self, scope: str, key: str, response: StoredResponse) -> bool:
        return bool(await self.managed.run("complete_command", complete_values(scope, key, response)))

    async def set_savepoint(self) -> None:
        with self.managed.deadline(self._settings.commit_within):
            await self.managed.set_savepoint()
