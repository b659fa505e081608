"""Takes what waits in the table of another library, in the transaction that publishes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

import asyncpg

from holdfast.errors import ConfigurationError, NotPermitted
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
_TIME, _BOOLEAN = "D", "B"  # categories of types
_LONGEST_ID = 100


@dataclass(frozen=True, slots=True)
class ImportAudit:
    """Who imports what, and why: the lines of an import in the audit. `place` is a table or a queue."""

    schema: str
    actor: str
    reason: str | None
    library: str
    place: str
    source: str

    async def note(self, connection: asyncpg.Connection, published: int) -> None:
        """Write the line of one batch, in the transaction that publishes it."""
        statement = Queries(self.schema).asyncpg("audit_import")
        values = {
            "actor": self.actor,
            "reason": self.reason,
            "library": self.library,
            "place": self.place,
            "source": self.source,
            "published": published,
        }
        try:
            await connection.execute(statement.sql, *statement.bind(values))
        except asyncpg.InsufficientPrivilegeError as error:
            raise NotPermitted(
                f"{self.library} may not be imported by this login: {error}", "use a member of holdfast_operator"
            ) from error


@dataclass(frozen=True, slots=True)
class PeerTable:
    """The table of another library: its rows, and how many its workers hold."""

    name: str
    trusted_roles: Collection[str]
    take_sql: str
    hold_sql: str
    busy_sql: str
    aside_sql: str
    search_path: str  # of the login, under which the statements above find their table

    @classmethod
    async def find(
        cls,
        connection: asyncpg.Connection,
        kind: str,
        table: str,
        columns: Mapping[str, str],
        trusted_roles: Collection[str] = (),
    ) -> Self:
        """Find a table by its qualified name; `kind` says whose it is, `columns` what those of one's own are called.

        One whose triggers would run what somebody else wrote is refused, unless that role is in `trusted_roles`.
        """
        try:
            await cls._require_trusted(connection, table, trusted_roles)
            found = await cls._columns(connection, table)
            if columns:
                kind = cls._kind_by_columns(kind, table, columns, found)
            given = {name: columns[name] for name in ("id", "done") if name in columns}
            statement = Queries().asyncpg(f"compose_{kind}")
            composed = (await connection.fetch(statement.sql, *statement.bind({"table": table, **given})))[0]
            statement = Queries().asyncpg("compose_hold")
            hold: str = await connection.fetchval(statement.sql, *statement.bind({"take": composed["take"]}))
        except _NO_TABLE as error:
            remedy = "name it with --table schema.table, in quotation marks if it needs them in SQL"
            raise ConfigurationError("--table", f"{table} does not exist", remedy) from error
        if "id" in columns:
            await cls._require_key(connection, table, columns["id"])
        path: str = await connection.fetchval(Queries().asyncpg("login_search_path").sql)
        return cls(table, trusted_roles, composed["take"], hold, composed["busy"], composed.get("aside", ""), path)

    @staticmethod
    async def _require_trusted(connection: asyncpg.Connection, table: str, roles: Collection[str]) -> None:
        statement = Queries().asyncpg("untrusted_peer")
        values = {"table": table, "trusted": list(roles)}
        async with connection.transaction():
            await connection.execute(Queries().asyncpg("leave_peer_schema").sql)
            row = await connection.fetchrow(statement.sql, *statement.bind(values))
        if row is not None:
            raise NotPermitted(
                f"{row['object']} {row['relation']} {row['owner']}, who could have it run anything with your rights",
                f"import as the login that owns {table}, or add --trusted-role {row['owner']} if you trust it",
            )

    @staticmethod
    async def _columns(connection: asyncpg.Connection, table: str) -> dict[str, tuple[str, str]]:
        statement = Queries().asyncpg("peer_columns")
        rows = await connection.fetch(statement.sql, *statement.bind({"table": table}))
        return {row["name"]: (row["type"], row["category"]) for row in rows}

    @staticmethod
    def _kind_by_columns(
        kind: str, table: str, columns: Mapping[str, str], found: Mapping[str, tuple[str, str]]
    ) -> str:
        """Return the kind of a table of one's own: it has another where a boolean says whether a row is done."""
        for use, column in columns.items():
            if column not in found:
                problem = f"{column} is not a column of {table}"
                raise ConfigurationError(f"--{use}-column", problem, f"name one of {', '.join(found)}")
        type_, category = found[columns["done"]]
        if category not in (_TIME, _BOOLEAN):
            problem = f"{columns['done']} of {table} is of type {type_}"
            remedy = (
                "name a time that is NULL, or a boolean that is false, while a row waits; if it is a status, add one"
            )
            raise ConfigurationError("--done-column", problem, remedy)
        return f"{kind}_with_flag" if category == _BOOLEAN else kind

    @staticmethod
    async def _require_key(connection: asyncpg.Connection, table: str, column: str) -> None:
        statement = Queries().asyncpg("is_key_column")
        if not await connection.fetchval(statement.sql, *statement.bind({"table": table, "id": column})):
            problem = f"{column} of {table} does not tell its rows apart: it is not unique, or may be NULL"
            raise ConfigurationError("--id-column", problem, "name the column of its primary key")

    def aside(self, row: str) -> str:
        """Return how a row is put aside, so that the next import goes on without it."""
        if not self.aside_sql or len(row) > _LONGEST_ID:
            return "put the row aside: what its own worker does with it, or a DELETE"
        quoted = row.replace("'", "''")
        return f"put the row aside: {self.aside_sql}'{quoted}'"

    async def take(self, connection: asyncpg.Connection, most: int) -> list[tuple[str, str]]:
        """Take the next rows, in an open transaction: they are gone when it commits, and back when it does not.

        Each is its id, and its columns as JSON: whether that can be read is for those who can name the row. Whose code
        that runs is asked once more, under locks: somebody may have added a trigger since the table was found.
        """
        entering = Queries().asyncpg("enter_peer_schema")
        returning = Queries().asyncpg("return_to_search_path")
        try:
            await connection.execute(returning.sql, *returning.bind({"path": self.search_path}))
            await connection.fetch(self.hold_sql, most)
            await self._require_trusted(connection, self.name, self.trusted_roles)
            await connection.execute(entering.sql, *entering.bind({"table": self.name}))
            rows = await connection.fetch(self.take_sql, most)
            await connection.execute(Queries().asyncpg("leave_peer_schema").sql)
        except _NOT_OF_THIS_KIND as error:
            problem = f"{self.name} is not such a table: {error}"
            raise ConfigurationError("--table", problem, "name the table of that library, and its columns") from error
        return [(row[1], row[0]) for row in rows]

    async def busy(self, connection: asyncpg.Connection) -> int:
        """Return how many rows the library's own workers hold."""
        return int(await connection.fetchval(self.busy_sql))
