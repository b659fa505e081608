"""Reads the state of the server as far as it concerns the outbox: its tables, its connections, its xmin horizon."""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg

from holdfast.postgres.queries import Queries


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table of the schema, as the server estimates it."""

    name: str
    rows: float
    dead_rows: float
    bytes: float  # with its indexes


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The server, and the tables of the schema. The horizon is None for a login that cannot see other sessions."""

    connections: int
    connection_limit: int
    horizon_seconds: float | None
    horizon_transactions: int | None
    tables: list[TableStatus]


async def read(connection: asyncpg.Connection, schema: str = "core") -> ServerStatus:
    """Read the state of the server."""
    queries = Queries(schema)
    async with connection.transaction(isolation="read_committed", readonly=True):
        await connection.fetch(queries.asyncpg("begin_read").sql)
        server = await connection.fetchrow(queries.asyncpg("read_server").sql)
        tables = await connection.fetch(queries.asyncpg("read_tables").sql)
    return ServerStatus(**server, tables=[TableStatus(**row) for row in tables])
