"""Indexes that a migration builds concurrently, where the outbox is partitioned.

Postgres builds none concurrently on a partitioned table. It is made on the table alone, which is at once and invalid,
then concurrently on each partition, and is valid with the last one that is attached to it.
"""

from __future__ import annotations

import re
from typing import Any

from holdfast.postgres.queries import Queries

_BUILD = re.compile(
    r"CREATE\s+(?P<unique>UNIQUE\s+)?INDEX\s+CONCURRENTLY\s+(?:IF\s+NOT\s+EXISTS\s+)?(?P<name>\w+)\s+"
    r'ON\s+(?P<schema>\w+|"[^"]+")\.outbox\s+(?P<rest>.+)',
    re.IGNORECASE | re.DOTALL,
)
_DROP = re.compile(r"DROP\s+INDEX\s+CONCURRENTLY\s+(?P<rest>.+)", re.IGNORECASE | re.DOTALL)


async def statements_for(connection: Any, queries: Queries, statement: str) -> list[str]:
    """The statements that do what this one says, on the outbox as it is."""
    names = [row["name"] for row in await connection.fetch(queries.asyncpg("list_partition_names").sql)]
    if names and (drop := _DROP.fullmatch(statement)):
        return [f"DROP INDEX {drop['rest']}"]
    build = _BUILD.fullmatch(statement) if names else None
    if build is None:
        return [statement]
    name, schema, rest = build["name"], build["schema"], build["rest"]
    unique = build["unique"] or ""
    made = [f"CREATE {unique}INDEX IF NOT EXISTS {name} ON ONLY {schema}.outbox {rest}"]
    for partition in names:
        part = f"{partition}{name.removeprefix('outbox')}"[:63]
        made.append(f"CREATE {unique}INDEX CONCURRENTLY IF NOT EXISTS {part} ON {schema}.{partition} {rest}")
        made.append(f"ALTER INDEX {schema}.{name} ATTACH PARTITION {schema}.{part}")
    return made
