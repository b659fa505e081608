"""What a worker requires of the schema before it claims anything."""

import asyncpg

from holdfast.errors import NotPermitted
from holdfast.postgres import migrate
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import fetch, policies
from holdfast.postgres.schema.archive import require_archive
from holdfast.retention import RetentionPolicies, check_policies
from holdfast.settings import WorkerSettings


async def require_ready(connection: asyncpg.Connection, settings: WorkerSettings) -> RetentionPolicies:
    """Raise an error for a schema that could not work, or would do harm weeks later; return its retention policies."""
    await migrate.require_compatible(connection, settings.schema)
    queries = Queries(settings.schema)
    await _require_rights(connection, queries)
    if settings.dead_letters == "archive":
        await require_archive(connection, settings.schema)
    found = await policies(connection, queries)
    check_policies(found)
    return found


async def refuse_unready(dsn: str, settings: WorkerSettings) -> None:
    """Raise what `require_ready` raises; a database that does not answer yet is no reason to refuse."""
    try:
        address = Address(dsn)
        await address.probe()
        connection = await connect(address, "worker", statement_timeout=10)
        try:
            await require_ready(connection, settings)
        finally:
            await connection.close(timeout=2)
    except (*CONNECTION_FAULTS, asyncpg.QueryCanceledError):
        pass


async def _require_rights(connection: asyncpg.Connection, queries: Queries) -> None:
    """Refuse a login that is not a worker's: other roles may call some of what a worker calls, and it would idle."""
    rows = await fetch(connection, queries, "list_denied_functions")
    if rows:
        raise NotPermitted(
            f"{rows[0]['login']} may not work: it may not call {', '.join(row['name'] for row in rows)}",
            "use a login that has the role holdfast_worker, or as an administrator: "
            f"GRANT holdfast_worker TO {rows[0]['login']}",
        )
