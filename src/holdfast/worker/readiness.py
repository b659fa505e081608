"""What a worker requires of the schema before it claims anything."""

import asyncpg

from holdfast.postgres import migrate
from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import policies
from holdfast.postgres.schema.archive import require_archive
from holdfast.retention import RetentionPolicies, check_policies
from holdfast.settings import WorkerSettings


async def require_ready(connection: asyncpg.Connection, settings: WorkerSettings) -> RetentionPolicies:
    """Raise an error for a schema that could not work, or would do harm weeks later; return its retention policies."""
    await migrate.require_current(connection, settings.schema)
    if settings.dead_letters == "archive":
        await require_archive(connection, settings.schema)
    found = await policies(connection, Queries(settings.schema))
    check_policies(found)
    return found
