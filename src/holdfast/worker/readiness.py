"""What a worker requires of the schema before it claims anything."""

import asyncpg

from holdfast.postgres import migrate
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import policies
from holdfast.postgres.schema.archive import require_archive
from holdfast.retention import RetentionPolicies, check_policies
from holdfast.settings import WorkerSettings


async def require_ready(connection: asyncpg.Connection, settings: WorkerSettings) -> RetentionPolicies:
    """Raise an error for a schema that could not work, or would do harm weeks later; return its retention policies."""
    await migrate.require_compatible(connection, settings.schema)
    if settings.dead_letters == "archive":
        await require_archive(connection, settings.schema)
    found = await policies(connection, Queries(settings.schema))
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
