"""`core.workers`: who runs, and since when it was last heard of."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from uuid import UUID

import asyncpg

from holdfast.errors import SchemaMismatch
from holdfast.postgres.connection import own_transaction
from holdfast.postgres.lock_waits import DELIVERING, LockWait
from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import fetch
from holdfast.postgres.schema.contract import read_contract, read_terms


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
        self._terms = read_terms()

    async def beat(self, connection: asyncpg.Connection, registration: Registration) -> None:
        await self._fetch(connection, "worker_beat", asdict(registration))

    async def gone(self, connection: asyncpg.Connection, worker: UUID) -> None:
        await self._fetch(connection, "worker_stopped", {"id": worker})

    async def unserved(self, connection: asyncpg.Connection) -> list[tuple[str, int]]:
        """The channels and generations with open events of which no worker has been heard in the last minute."""
        rows = await self._fetch(connection, "unserved_channels", {})
        return [(row["channel"], row["generation"]) for row in rows]

    async def schema_mismatch(self, connection: asyncpg.Connection) -> SchemaMismatch | None:
        """Return why the schema does not fit this code, if it does not: it may have been migrated meanwhile."""
        async with own_transaction(connection):
            found = await read_contract(connection, self._queries, recorded=True)
        try:
            self._terms.require(self._queries.schema, found)
        except SchemaMismatch as mismatch:
            return mismatch
        return None

    async def claimers(self, connection: asyncpg.Connection) -> int:
        """About how many workers there are, as far as their sessions can be seen."""
        rows = await self._fetch(connection, "count_claimers", {})
        return int(rows[0][0])

    async def lock_waits(self, connection: asyncpg.Connection, worker: UUID) -> list[LockWait]:
        """Return which sessions of a worker wait for a lock, and for whom."""
        values = {"waited": timedelta(0), "sessions": f"{DELIVERING} {worker}$", "pid": None}
        return [LockWait(**row) for row in await self._fetch(connection, "list_lock_waits", values)]

    async def _fetch(
        self, connection: asyncpg.Connection, name: str, values: Mapping[str, object]
    ) -> list[asyncpg.Record]:
        # Behind a transaction pooler a statement is prepared and run by the same session only inside a transaction.
        return await fetch(connection, self._queries, name, **values)
