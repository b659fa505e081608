"""A database connection that several loops of a worker use in turn."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import asyncpg

from holdfast.postgres.connection import ReservedConnection


class SharedConnection:
    """A connection that is lent to one loop at a time."""

    def __init__(self, connection: ReservedConnection) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[asyncpg.Connection]:
        async with self._turn:
            yield await self._connection.use()

    def drop(self) -> None:
        self._connection.drop()

    async def close(self) -> None:
        await self._connection.close()
