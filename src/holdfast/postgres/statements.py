"""Runs statements by their names, on the connections of one address."""

from __future__ import annotations

import asyncpg

from holdfast.postgres.connection import Address, own_transaction
from holdfast.postgres.queries import Queries


class NamedStatements:
    """The statements of one schema. Every call names the connection it runs on.

    Outside of a transaction a statement commits by itself. Behind a transaction pooler it gets a transaction of its
    own: only inside of one is it prepared and run by the same session.
    """

    def __init__(self, queries: Queries, address: Address) -> None:
        self._queries = queries
        self._address = address

    async def fetch(self, connection: asyncpg.Connection, name: str, /, **values: object) -> list[asyncpg.Record]:
        """Return all rows of a statement."""
        statement = self._queries.asyncpg(name)
        records: list[asyncpg.Record]
        if self._address.pooled and not connection.is_in_transaction():
            async with own_transaction(connection):
                records = await connection.fetch(statement.sql, *statement.bind(values))
        else:
            records = await connection.fetch(statement.sql, *statement.bind(values))
        return records
