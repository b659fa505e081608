"""The session of one operator: its name, its connection, and the transactions of its verbs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.operator import arguments
from holdfast.operator.selection import Selection
from holdfast.postgres.operations import audit, generations
from holdfast.postgres.operations.connection import OperatorConnection, Statements


class Refused(HoldfastError):
    """The request cannot be carried out in the present state, and nothing was changed; `remedy` says what can be."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"


class Session:
    """What all verbs of an operator share."""

    def __init__(self, dsn: str, actor: str, schema: str, on_wait: Callable[[str], None]) -> None:
        self.dsn = dsn
        self.actor = arguments.line("actor", actor)
        self.schema = schema
        self.connection = OperatorConnection(dsn, schema, on_wait)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Statements]:
        """One snapshot for all statements of the block, with a time limit."""
        async with self.connection.reading() as statements:
            yield statements

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
