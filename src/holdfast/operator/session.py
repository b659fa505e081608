"""Somebody who looks after the events of one schema."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import asyncpg

from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.operator import arguments
from holdfast.postgres import migrate
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.queries import Queries


class Refused(HoldfastError):
    """What was asked for cannot be done as things are; `remedy` says what can. Nothing was changed."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"


class Operator:
    """A person, or a tool that acts for one. Everything it changes is written down under the name of `actor`.

    The verbs are functions, one module for each noun:

        async with Operator(dsn, actor="ada@example.com") as operator:
            groups = await failures.groups(operator)
            await actions.replay(operator, [groups[0].sample_id], reason="the card terminal is back")
    """

    def __init__(self, dsn: str, *, actor: str, schema: str = "core") -> None:
        self.actor = arguments.line("actor", actor)
        self.schema = schema
        self._queries = Queries(schema)
        self._address = Address(dsn)
        self._connection: asyncpg.Connection | None = None

    async def __aenter__(self) -> Self:
        await self._address.probe()
        self._connection = await connect(self._address, "operator", statement_timeout=90)
        try:
            await migrate.require_current(self._connection, self.schema)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close(timeout=2)

    @property
    def connection(self) -> asyncpg.Connection:
        if self._connection is None:
            raise ConfigurationError("operator", "is not connected", "write: async with Operator(...) as operator")
        return self._connection

    async def fetch(self, name: str, /, **values: object) -> list[asyncpg.Record]:
        """A named statement, inside `reading` or `changing`."""
        statement = self._queries.asyncpg(name)
        rows: list[asyncpg.Record] = await self.connection.fetch(statement.sql, *statement.bind(values))
        return rows

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """One snapshot for everything that is asked inside, within a limit of time."""
        async with self.connection.transaction(isolation="repeatable_read", readonly=True):
            await self.fetch("begin_read")
            yield

    @asynccontextmanager
    async def changing(self, action: str, *, dry_run: bool = False, **named: Any) -> AsyncIterator[None]:
        """One transaction, which a dry run does not keep. A refusal is not kept either, but who was refused what is."""
        transaction = self.connection.transaction(isolation="read_committed")
        await transaction.start()
        try:
            await self.fetch("begin_action")
            yield
        except BaseException as error:
            if not self.connection.is_closed():
                await transaction.rollback()
                if isinstance(error, Refused) and not dry_run:
                    await self._note_refusal(action, error, named)
            raise
        await (transaction.rollback() if dry_run else transaction.commit())

    async def _note_refusal(self, action: str, refusal: Refused, named: dict[str, Any]) -> None:
        reason = named.pop("reason", None)
        async with self.connection.transaction():
            await self.fetch(
                "note_refusal",
                actor=self.actor,
                action=action,
                reason=reason,
                arguments=json.dumps(named, default=str),
                problem=refusal.problem,
            )

    async def generation(self, wanted: int | None) -> int:
        """The generation to replay into: the one that is wanted, or the newest that a living worker serves."""
        if wanted is not None:
            return arguments.whole("generation", wanted)
        return int((await self.fetch("default_generation"))[0][0])

    async def knows(self, generation: int) -> bool:
        """Whether it is the current generation, a deployment that is not retired, or served by a living worker."""
        return bool((await self.fetch("knows_generation", generation=generation))[0][0])
