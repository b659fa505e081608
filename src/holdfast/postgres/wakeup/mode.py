"""Changing when commits notify: when a worker sleeps, always, or never."""

from __future__ import annotations

from typing import Any, Literal

from holdfast.postgres.queries import Queries
from holdfast.postgres.schema.ddl import MigrationRefused, change, connect, one_at_a_time, reading
from holdfast.postgres.schema.migrate import require_compatible
from holdfast.postgres.schema.ownership import OWNER, Facts, inspect

Mode = Literal["when_idle", "always", "never"]


async def mode(dsn: str, schema: str = "core") -> str:
    """Return the wake-up mode, or `missing` without the trigger."""
    queries = Queries(schema)
    connection = await connect(dsn)
    try:
        _require_installed(await inspect(connection, queries), schema)
        found = await _bell(connection, queries)
        return found or "missing"
    finally:
        await connection.close()


async def set_mode(
    dsn: str, wanted: Mode, schema: str = "core", *, actor: str = "holdfast", reason: str | None = None
) -> str:
    """Set the wake-up mode, write it to the audit, and return the mode before.

    Waits at most two seconds for the table at a time.
    """
    queries = Queries(schema)
    connection = await connect(dsn)
    try:
        async with one_at_a_time(connection, queries, lambda: None):
            facts = await inspect(connection, queries)
            _require_installed(facts, schema)
            _require_owner(facts)
            await require_compatible(connection, schema, role="operator")
            before = await _bell(connection, queries)
            if before != wanted:

                async def work() -> None:
                    if facts.schema_owner == OWNER:
                        await connection.execute(queries.asyncpg("become_owner").sql)
                    if wanted != "never":
                        await connection.execute(queries.asyncpg("drop_bell").sql)
                    await connection.execute(queries.asyncpg(f"bell_{wanted}").sql)
                    audit = queries.asyncpg("audit_wakeup_mode")
                    line = {"actor": actor, "reason": reason, "mode": wanted, "before": before or "missing"}
                    await connection.execute(audit.sql, *audit.bind(line))

                await change(connection, queries, f"setting the wake-up mode of {schema}", work)
            return before or "missing"
    finally:
        await connection.close()


async def _bell(connection: Any, queries: Queries) -> str | None:
    async with reading(connection, queries):
        found: str | None = await connection.fetchval(queries.asyncpg("read_wakeup_mode").sql)
    return found


def _require_installed(facts: Facts, schema: str) -> None:
    if not facts.has_ledger:
        raise MigrationRefused(
            f"there is no Holdfast in the schema {schema} of the database {facts.database}",
            "install it: holdfast migrate apply, or name its schema: --schema",
        )


def _require_owner(facts: Facts) -> None:
    if facts.schema_owner == OWNER and not facts.may_become_owner and not facts.superuser:
        raise MigrationRefused(
            f"{facts.login} may not become {OWNER}", f"as an administrator: GRANT {OWNER} TO {facts.login}"
        )
