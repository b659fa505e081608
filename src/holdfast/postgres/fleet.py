"""`core.workers`: who runs, and since when it was last heard of."""

from dataclasses import asdict, dataclass
from uuid import UUID

import asyncpg

from holdfast.postgres.queries import Queries


@dataclass(frozen=True, slots=True)
class Registration:
    """How a worker introduces itself."""

    id: UUID
    name: str
    host: str
    pid: int
    version: str
    generation: int
    channels: list[str]
    handlers: list[str]


class Fleet:
    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    async def beat(self, connection: asyncpg.Connection, registration: Registration) -> None:
        statement = self._queries.asyncpg("worker_beat")
        await connection.execute(statement.sql, *statement.bind(asdict(registration)))

    async def gone(self, connection: asyncpg.Connection, worker: UUID) -> None:
        statement = self._queries.asyncpg("worker_stopped")
        await connection.execute(statement.sql, *statement.bind({"id": worker}))
