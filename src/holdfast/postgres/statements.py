"""Runs statements by their names, on the connections of one address."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from holdfast.postgres.connection import Address, own_transaction
from holdfast.postgres.queries import Queries


class ApplicationConnection(ABC):
    """A connection of the application's, in whatever library, that runs statements of Holdfast's by their names."""

    @abstractmethod
    async def rows(self, name: str, values: Mapping[str, object]) -> Sequence[Sequence[Any]]:
        """Return all rows of a statement."""


class NamedStatements:
    """The statements of one schema. Every call names the connection it runs on.

    Outside of a transaction a statement commits by itself. Behind a transaction pooler it gets a transaction of its
    own: only inside of one is it prepared and run by the same session.
    """

    def __init__(self, queries: Queries, address: Address) -> None:
        self._queries = queries
        self._address = address

    def filled_in(self, name: str, values: Mapping[str, object]) -> str:
        """Return a statement with values in its text."""
        return self._queries.asyncpg(name).filled_in(values)

    def partly_filled_in(self, name: str, values: Mapping[str, object]) -> str:
        """Return a statement with some values in its text, and `%(name)s` for the ids that are not among them."""
        return self._queries.asyncpg(name).partly_filled_in(values)

    async def fetch(
        self, connection: asyncpg.Connection | ApplicationConnection, name: str, /, **values: object
    ) -> list[asyncpg.Record]:
        """Return all rows of a statement. Those of an application's connection are known by position only."""
        if isinstance(connection, ApplicationConnection):
            return await connection.rows(name, values)  # type: ignore[return-value]
        statement = self._queries.asyncpg(name)
        records: list[asyncpg.Record]
        if self._address.pooled and not connection.is_in_transaction():
            async with own_transaction(connection):
                records = await connection.fetch(statement.sql, *statement.bind(values))
        else:
            records = await connection.fetch(statement.sql, *statement.bind(values))
        return records
