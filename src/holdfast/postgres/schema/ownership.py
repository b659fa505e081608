"""Who owns the schema: holdfast_owner where roles can be had, else the login that migrates."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from holdfast.postgres.queries import Queries
from holdfast.postgres.schema.ddl import MigrationRefused, reading

RolesMode = Literal["auto", "always", "never"]

OWNER = "holdfast_owner"
ROLES = (OWNER, "holdfast_producer", "holdfast_worker", "holdfast_operator")
OLDEST_SERVER = 150000


@dataclass(frozen=True, slots=True)
class Facts:
    """What the server says about itself, this login and the schema."""

    version: int
    encoding: str
    database: str
    login: str
    superuser: bool
    may_create_roles: bool
    may_create_schema: bool
    roles: list[str]
    may_become_owner: bool
    may_grant_owner: bool
    schema_owner: str | None
    may_create_in_schema: bool
    schema_objects: int
    has_ledger: bool
    has_contract: bool
    may_read_ledger: bool


async def inspect(connection: Any, queries: Queries) -> Facts:
    """Read the facts; refuse a server that Holdfast does not work on."""
    statement = queries.asyncpg("inspect_server")
    async with reading(connection, queries):
        row = await connection.fetchrow(statement.sql, *statement.bind({"roles": list(ROLES)}))
    facts = Facts(**{field.name: row[field.name] for field in fields(Facts)})
    if facts.version < OLDEST_SERVER:
        raise MigrationRefused(
            f"the server is Postgres {facts.version // 10000}",
            f"use Postgres {OLDEST_SERVER // 10000} or later",
        )
    if facts.encoding != "UTF8":
        raise MigrationRefused(
            f"the database {facts.database} has the encoding {facts.encoding}",
            "create it with ENCODING 'UTF8' TEMPLATE template0",
        )
    return facts


@dataclass(frozen=True, slots=True)
class Ownership:
    """The decision: with roles or without, and what has to happen to the schema for it."""

    roles: bool
    create_schema: bool
    change_owner: bool
    why_not: str = ""


def decide(facts: Facts, mode: RolesMode, schema: str) -> Ownership:
    """Choose by what is there and what this login may do; refuse with the command that would help."""
    if facts.schema_objects and not facts.has_ledger:
        raise MigrationRefused(
            f"the schema {schema} already holds {facts.schema_objects} objects that are not Holdfast's",
            "give Holdfast a schema of its own: --schema holdfast",
        )
    obstacle = _obstacle(facts, schema)
    installed_with_roles = facts.schema_owner == OWNER
    if mode == "never" and installed_with_roles:
        raise MigrationRefused(f"the schema {schema} belongs to {OWNER}", "leave out --roles never")
    wanted = mode == "always" or installed_with_roles or (mode == "auto" and not facts.has_ledger)
    if wanted and obstacle is None:
        return Ownership(
            roles=True,
            create_schema=facts.schema_owner is None,
            change_owner=facts.schema_owner not in (None, OWNER),
        )
    if wanted and obstacle and (mode == "always" or installed_with_roles):
        raise obstacle
    _require_schema_rights(facts, schema)
    return Ownership(
        roles=False,
        create_schema=facts.schema_owner is None,
        change_owner=False,
        why_not=obstacle.problem if obstacle and mode == "auto" else "",
    )


def _obstacle(facts: Facts, schema: str) -> MigrationRefused | None:
    """Why this login cannot work with the roles, or None."""
    if facts.superuser:
        return None
    missing = [role for role in ROLES if role not in facts.roles]
    if missing and not facts.may_create_roles:
        return MigrationRefused(
            f"{facts.login} may not create the roles {', '.join(missing)}",
            f"as an administrator: ALTER ROLE {facts.login} CREATEROLE, or run `holdfast migrate print`",
        )
    # Before Postgres 16 CREATEROLE was enough to become a member of any role that is not a superuser.
    before_16 = facts.version < 160000 and facts.may_create_roles
    if OWNER not in missing and not (facts.may_become_owner or facts.may_grant_owner or before_16):
        return MigrationRefused(
            f"{facts.login} may not become {OWNER}", f"as an administrator: GRANT {OWNER} TO {facts.login}"
        )
    if facts.schema_owner != OWNER and not facts.may_create_schema:
        remedy = f"CREATE SCHEMA {schema} AUTHORIZATION {OWNER}"
        if OWNER in missing:
            remedy = f"GRANT CREATE ON DATABASE {facts.database} TO {facts.login}"
        return MigrationRefused(
            f"{facts.login} may not create a schema in the database {facts.database}", f"as an administrator: {remedy}"
        )
    if facts.schema_owner not in (None, OWNER, facts.login):
        return MigrationRefused(
            f"the schema {schema} belongs to {facts.schema_owner}",
            f"as an administrator: ALTER SCHEMA {schema} OWNER TO {OWNER}",
        )
    return None


def _require_schema_rights(facts: Facts, schema: str) -> None:
    if facts.schema_owner is None and not facts.may_create_schema:
        raise MigrationRefused(
            f"{facts.login} may not create a schema in the database {facts.database}",
            f"as an administrator: CREATE SCHEMA {schema} AUTHORIZATION {facts.login}",
        )
    if facts.schema_owner is not None and not facts.may_create_in_schema:
        raise MigrationRefused(
            f"the schema {schema} belongs to {facts.schema_owner}, and {facts.login} may not create in it",
            f"as an administrator: ALTER SCHEMA {schema} OWNER TO {facts.login}",
        )
