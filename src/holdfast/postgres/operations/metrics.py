"""What metrics are made of, and a connection that reads it again and again."""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg

from holdfast.names import schema_name
from holdfast.postgres import schedules
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.postgres.operations import status
from holdfast.postgres.operations.status import Notifications, Status
from holdfast.postgres.schedules import ScheduleStatus
from holdfast.postgres.schema import migrate

# What `MetricsSource.read` may raise while the database does not answer.
READ_FAULTS = (asyncpg.PostgresError, *CONNECTION_FAULTS)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a schema. No read of it depends on how many settled events are kept."""

    status: Status
    notifications: Notifications
    schedules: list[ScheduleStatus]


async def snapshot(connection: asyncpg.Connection, schema: str = "core") -> Snapshot:
    """Read the state of a schema."""
    return Snapshot(
        await status.read(connection, schema),
        await status.notifications(connection),
        await schedules.listing(connection, schema),
    )


class MetricsSource:
    """One connection, which is opened again after a fault."""

    def __init__(self, dsn: str, schema: str, *, timeout: float) -> None:
        self._address = Address(dsn)
        self._schema = schema_name(schema)
        self._timeout = timeout
        self._connection: asyncpg.Connection | None = None

    async def read(self) -> Snapshot:
        """The state now. After an error, call `drop`."""
        if self._connection is None or self._connection.is_closed():
            await self._address.probe()
            self._connection = await connect(self._address, "metrics", statement_timeout=self._timeout)
            await migrate.require_compatible(self._connection, self._schema)
        return await snapshot(self._connection, self._schema)

    def drop(self) -> None:
        """Forget the connection without waiting for the server."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            try:
                await connection.close(timeout=2)
            except CONNECTION_FAULTS:
                connection.terminate()
