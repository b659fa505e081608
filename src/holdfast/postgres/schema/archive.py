"""The archive of dead letters: whether the tables are what a worker that archives needs."""

from __future__ import annotations

import asyncpg

from holdfast.errors import SchemaMismatch
from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import fetch
from holdfast.postgres.schema.ddl import reading


async def require_archive(connection: asyncpg.Connection, schema: str = "core") -> None:
    """Raise SchemaMismatch, naming what is missing in which table, unless rows can be moved from one to the other.

    The number of a schema says which migrations ran, and nothing about what was dropped since.
    """
    queries = Queries(schema)
    async with reading(connection, queries):
        rows = await fetch(connection, queries, "missing_parts")
    if rows:
        missing = "; ".join(_missing(f"{schema}.{row['relation']}", row["kind"], row["part"]) for row in rows)
        raise SchemaMismatch(
            f"{schema} in which {missing}",
            "the tables as they were made, because dead_letters is 'archive'",
            "put back what was dropped (holdfast doctor shows the statement), or use dead_letters='in_place'",
        )


def _missing(table: str, kind: str, part: str) -> str:
    return f"{table} is missing" if kind == "table" else f"{table} has no {kind} {part}"
