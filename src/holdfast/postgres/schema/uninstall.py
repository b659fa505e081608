"""Taking Holdfast out of a database, with everything it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import asyncpg

from holdfast.postgres.queries import Queries
from holdfast.postgres.schema.ddl import MigrationRefused, change, connect, one_at_a_time, reading, transaction
from holdfast.postgres.schema.ownership import OWNER, ROLES, Facts, inspect

_NOT_DROPPED = (
    asyncpg.InsufficientPrivilegeError,  # another login's to drop
    asyncpg.DependentObjectsStillExistError,  # taken into use this moment
    asyncpg.UndefinedObjectError,  # dropped this moment, by an uninstall in another database
    asyncpg.InternalServerError,  # the same, met half-way: "tuple concurrently deleted"
)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What would be lost."""

    schema: str
    events: int
    tables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """What was removed. A role stays when another database uses it or this login may not drop it."""

    schema: str
    roles_dropped: tuple[str, ...]
    roles_kept: tuple[str, ...]


async def holdings(dsn: str, schema: str = "core") -> Holdings:
    """Count what an uninstall would delete. Reads only."""
    queries = Queries(schema)
    connection = await connect(dsn)
    try:
        async with transaction(connection, queries):
            facts = await _require_ours(connection, queries)
            tables = [row[0] for row in await connection.fetch(queries.asyncpg("list_tables").sql)]
            await _become_owner(connection, queries, facts)
            events = await connection.fetchval(queries.asyncpg("count_events").sql) if "outbox" in tables else 0
        return Holdings(schema, events, tuple(tables))
    finally:
        await connection.close()


async def uninstall(dsn: str, schema: str = "core") -> Removal:
    """Drop the schema with everything in it, and the roles that nothing else uses."""
    queries = Queries(schema)
    connection = await connect(dsn)
    try:
        async with one_at_a_time(connection, queries, lambda: None):
            async with transaction(connection, queries):
                facts = await _require_ours(connection, queries)

            async def work() -> None:
                await _become_owner(connection, queries, facts)
                await _run(connection, queries, "drop_schema")
                if facts.schema_owner == OWNER and not await connection.fetchval(
                    queries.asyncpg("owner_has_other_schemas").sql
                ):
                    await _run(connection, queries, "drop_owned")

            await change(connection, queries, f"dropping the schema {schema}", work)
            dropped = await _drop_roles(connection, queries)
            async with transaction(connection, queries):
                kept = (await inspect(connection, queries)).roles
            return Removal(schema, dropped, tuple(kept))
    finally:
        await connection.close()


async def _require_ours(connection: Any, queries: Queries) -> Facts:
    facts = await inspect(connection, queries)
    if not facts.has_ledger:
        raise MigrationRefused(
            f"there is no Holdfast in the schema {queries.schema} of the database {facts.database}",
            "name the schema it was installed in: --schema",
        )
    return facts


async def _become_owner(connection: Any, queries: Queries, facts: Facts) -> None:
    if facts.schema_owner != OWNER:
        return
    if not facts.may_become_owner:
        raise MigrationRefused(
            f"{facts.login} may not become {OWNER}", f"as an administrator: GRANT {OWNER} TO {facts.login}"
        )
    await _run(connection, queries, "become_owner")


async def _drop_roles(connection: Any, queries: Queries) -> tuple[str, ...]:
    statement = queries.asyncpg("unused_roles")
    dropped = []
    async with reading(connection, queries):
        unused = await connection.fetch(statement.sql, *statement.bind({"roles": list(ROLES)}))
    for row in unused:
        role = row[0]
        try:
            await _run(connection, queries, f"drop_{role.removeprefix('holdfast_')}")
        except _NOT_DROPPED:
            continue
        dropped.append(role)
    return tuple(dropped)


async def _run(connection: Any, queries: Queries, name: str) -> None:
    await connection.execute(queries.asyncpg(name).sql)
