"""What metrics are made of, and a connection that reads it again and again."""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg

from holdfast.names import schema_name
from holdfast.postgres import schedules
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.postgres.operations import server, status
from holdfast.postgres.operations.rates import RollupLag, signals_of
from holdfast.postgres.operations.server import ServerStatus
from holdfast.postgres.operations.status import Notifications, Status
from holdfast.postgres.queries import Queries
from holdfast.postgres.schedules import ScheduleStatus
from holdfast.postgres.schema import migrate

# What `MetricsSource.read` may raise while the database does not answer.
READ_FAULTS = (asyncpg.PostgresError, *CONNECTION_FAULTS)


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Dead letters of one handler; of all handlers beyond the limit together, if the names are None."""

    channel: str | None
    generation: int | None
    handler: str | None
    failed: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a schema. No read of it depends on how many settled events are kept."""

    status: Status
    notifications: Notifications
    schedules: list[ScheduleStatus]
    failed_by_handler: list[DeadLetters]
    failures_of_week: int
    rollup_lag: RollupLag
    server: ServerStatus


async def snapshot(connection: asyncpg.Connection, schema: str = "core") -> Snapshot:
    """Read the state of a schema."""
    by_handler, failures, lag = await _failures(connection, schema)
    return Snapshot(
        await status.read(connection, schema),
        await status.notifications(connection),
        await schedules.listing(connection, schema),
        by_handler,
        failures,
        lag,
        await server.read(connection, schema),
    )


async def _failures(connection: asyncpg.Connection, schema: str) -> tuple[list[DeadLetters], int, RollupLag]:
    """Return dead letters by handler, how many deliveries failed in a week, and how far behind the roll-up is."""
    queries = Queries(schema)
    by_handler = queries.asyncpg("count_dead_letters")
    limits = {"most": status.MOST, "most_handlers": status.MOST_ROUTES}
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        await connection.fetch(queries.asyncpg("begin_read").sql)
        handlers = await connection.fetch(by_handler.sql, *by_handler.bind(limits))
        signals = signals_of(await connection.fetchrow(queries.asyncpg("read_signals").sql))
        lag = RollupLag(**await connection.fetchrow(queries.asyncpg("read_lag").sql))
    return [DeadLetters(**row) for row in handlers], signals.failures, lag


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
