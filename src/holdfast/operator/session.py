"""The session of one operator: its name, its connection, and the transactions of its verbs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from holdfast.errors import RemediedError
from holdfast.operator import arguments
from holdfast.operator.selection import Selection
from holdfast.postgres.operations import audit, events, generations
from holdfast.postgres.operations.connection import OperatorConnection, Statements
from holdfast.tracing import Tracing, require_tracing


class Refused(RemediedError):
    """The request of an operator cannot be carried out in the present state."""


class Session:
    """What all verbs of an operator share."""

    def __init__(self, connection: OperatorConnection, actor: str, tracing: Tracing | None = None) -> None:
        self.dsn = connection.dsn
        self.actor = arguments.line("actor", actor)
        self.schema = connection.schema
        self.connection = connection
        self._tracing = require_tracing(tracing)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Statements]:
        """One snapshot for all statements of the block, with a time limit."""
        async with self.connection.reading() as statements:
            yield statements

    @asynccontextmanager
    async def replaying(
        self, rows: Sequence[UUID], numbers: Sequence[int] = (), *, dry_run: bool = False
    ) -> AsyncIterator[None]:
        """Trace a replay of rows of the outbox, and of the archive by their numbers, linked to the traces they have."""
        if self._tracing is None or dry_run:
            yield
            return
        async with self.reading() as statements:
            linked = await events.trace_contexts(statements, rows, numbers)
        with self._tracing.replay(len(rows) + len(numbers), linked):
            yield

    @asynccontextmanager
    async def changing(
        self, action: str, *, dry_run: bool = False, selection: Selection | None = None, **named: Any
    ) -> AsyncIterator[Statements]:
        """One transaction, which a dry run rolls back. A refusal rolls it back too, and is written to the audit.

        `selection` is how the rows were chosen, if they were not named one by one.
        """
        chosen = None if selection is None else str(selection)
        try:
            async with self.connection.changing(dry_run=dry_run, selection=chosen) as statements:
                yield statements
        except Refused as refusal:
            if not dry_run and not self.connection.lost:
                await self._note_refusal(action, refusal, chosen, named)
            raise

    async def _note_refusal(self, action: str, refusal: Refused, selection: str | None, named: dict[str, Any]) -> None:
        reason = named.pop("reason", None)
        async with self.connection.changing(selection=selection) as statements:
            await audit.note_refusal(
                statements, actor=self.actor, action=action, reason=reason, arguments=named, problem=refusal.problem
            )


async def generation_for(statements: Statements, wanted: int | None) -> int:
    """The generation to replay into: the one that is wanted, or the newest that a living worker serves."""
    if wanted is not None:
        return arguments.whole("generation", wanted)
    return await generations.default(statements)
