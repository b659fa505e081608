"""A schema as the catalogs describe it: kinds of objects, objects by name, and what is to be said about each.

The names of the attributes are those of the columns in `sql/doctor.sql`, and the codes of the differences are made of
them. A description says nothing about who owns an object: that is for each installation to decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from holdfast.postgres.queries import Queries
from holdfast.postgres.schema.ownership import ROLES

Attributes = Mapping[str, Any]
Objects = Mapping[str, Attributes]
Description = Mapping[str, Objects]

_STATEMENTS = {
    "table": "describe_tables",
    "column": "describe_columns",
    "constraint": "describe_constraints",
    "index": "describe_indexes",
    "trigger": "describe_triggers",
    "rule": "describe_rules",
    "view": "describe_views",
    "sequence": "describe_sequences",
    "function": "describe_functions",
    "grant": "describe_grants",
    "default": "describe_default_grants",
    "role": "describe_roles",
}
KINDS = tuple(_STATEMENTS)


@dataclass(frozen=True, slots=True)
class Live:
    """A schema in a database."""

    objects: Description
    owners: Mapping[tuple[str, str], str]  # by kind and name
    lost_rights: tuple[tuple[str, str, list[str]], ...]  # of owners: kind, object, privileges


async def describe(connection: asyncpg.Connection, queries: Queries) -> Live:
    """Read it in one snapshot."""

    async def fetch(name: str, **values: object) -> list[asyncpg.Record]:
        statement = queries.asyncpg(name)
        rows: list[asyncpg.Record] = await connection.fetch(statement.sql, *statement.bind(values))
        return rows

    async with connection.transaction(isolation="repeatable_read", readonly=True):
        await fetch("begin_examination")
        rows = {kind: await fetch(name, roles=list(ROLES)) for kind, name in _STATEMENTS.items()}
        lost = await fetch("describe_lost_rights")
    return Live(
        {kind: _objects(kind, rows[kind]) for kind in KINDS},
        {(kind, row["name"]): row["owner"] for kind in KINDS for row in rows[kind] if "owner" in row},
        tuple((row["kind"], row["object"], row["privileges"]) for row in lost),
    )


def _objects(kind: str, rows: list[asyncpg.Record]) -> Objects:
    objects = {_key(kind, row): _attributes(kind, row) for row in rows}
    # Only columns have an order of their own.
    return objects if kind == "column" else dict(sorted(objects.items()))


def fingerprint(body: str) -> str:
    """What is kept of the text of a function."""
    return hashlib.sha256(body.encode()).hexdigest()


def _key(kind: str, row: asyncpg.Record) -> str:
    if kind == "grant":
        columns = "columns of " if row["on_columns"] else ""
        what = f"{row['kind'].lower()} {row['object']}".rstrip()
        return f"{row['privilege']} on {columns}{what} to {row['grantee']}"
    # Indexes share one space of names with tables; what else belongs to a table has its name there.
    return f"{row['relation']}.{row['name']}" if "relation" in row and kind != "index" else str(row["name"])


def _attributes(kind: str, row: asyncpg.Record) -> Attributes:
    # Lists are sets here, and the order in which a database sorts is its own.
    attributes: dict[str, Any] = {
        name: sorted(value) if isinstance(value, list) else value for name, value in row.items() if name != "owner"
    }
    if kind == "function":
        attributes["body"] = fingerprint(attributes["body"])
    elif kind == "trigger" and attributes["name"] == "outbox_bell":
        # How the bell is set is the operator's choice (holdfast notify), by its argument or by silencing it.
        attributes["definition"] = attributes["definition"].replace("('always')", "('when_idle')")
        attributes["disabled"] = "no" if attributes["disabled"] == "yes" else attributes["disabled"]
    return attributes
