"""Takes what waits in the table of another library, in the transaction that publishes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

import asyncpg

from holdfast.errors import ConfigurationError
from holdfast.postgres.queries import Queries

_NO_TABLE = (
    asyncpg.UndefinedTableError,
    asyncpg.InvalidSchemaNameError,
    asyncpg.InvalidNameError,
    asyncpg.FeatureNotSupportedError,
)
_NOT_OF_THIS_KIND = (
    asyncpg.UndefinedColumnError,
    asyncpg.InvalidTextRepresentationError,
    asyncpg.WrongObjectTypeError,
    asyncpg.DatatypeMismatchError,
)


@dataclass(frozen=True, slots=True)
class PeerTable:
    """The table of another library: its rows, and how many its workers hold."""

    name: str
    id_column: str
    take_sql: str
    busy_sql: str

    @classmethod
    async def find(cls, connection: asyncpg.Connection, kind: str, table: str, **columns: str) -> Self:
        """Find a table by its qualified name; `kind` says whose it is."""
        statement = Queries().asyncpg(f"compose_{kind}")
        try:
            rows = await connection.fetch(statement.sql, *statement.bind({"table": table, **columns}))
        except _NO_TABLE as error:
            remedy = "name it with --table schema.table, in quotation marks if it needs them in SQL"
            raise ConfigurationError("--table", f"{table} does not exist", remedy) from error
        if "id" in columns:
            await cls._require_key(connection, table, columns["id"])
        return cls(table, columns.get("id", "id"), rows[0]["take"], rows[0]["busy"])

    @staticmethod
    async def _require_key(connection: asyncpg.Connection, table: str, column: str) -> None:
        statement = Queries().asyncpg("is_key_column")
        if not await connection.fetchval(statement.sql, *statement.bind({"table": table, "id": column})):
            problem = f"{column} of {table} does not tell its rows apart: it is not unique, or may be NULL"
            raise ConfigurationError("--id-column", problem, "name the column of its primary key")

    async def take(self, connection: asyncpg.Connection, most: int) -> list[dict[str, Any]]:
        """Take the next rows, in an open transaction: they are gone when it commits, and back when it does not."""
        entering = Queries().asyncpg("enter_peer_schema")
        await connection.execute(entering.sql, *entering.bind({"table": self.name}))
        try:
            rows = await connection.fetch(self.take_sql, most)
        except _NOT_OF_THIS_KIND as error:
            problem = f"{self.name} is not such a table: {error}"
            raise ConfigurationError("--table", problem, "name the table of that library, and its columns") from error
        return sorted((json.loads(row[0]) for row in rows), key=lambda row: row[self.id_column])

    async def busy(self, connection: asyncpg.Connection) -> int:
        """Return how many rows the library's own workers hold."""
        return int(await connection.fetchval(self.busy_sql))
