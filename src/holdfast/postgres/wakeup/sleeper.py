"""The guard of a channel: the sleeping worker on whose behalf producers ring the bell.

A NOTIFY makes committing producers wait for each other, so they send one only while somebody sleeps. An idle worker
becomes the channel's guard and takes the channel's lock exclusively; commits that cannot share it notify. It waits
for the commits that could still share it, looks once more, and sleeps. There is one guard per channel: its
notifications wake every listener, so the others may sleep as well. A guard that gets busy stands down and says so;
one that dies loses its locks, and the others find out within a second.
"""

import asyncio
import contextlib
from collections.abc import Callable
from uuid import UUID

import asyncpg

from holdfast.postgres.connection import ReservedConnection
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.postgres.queries import Queries

_PATIENCE = 5.0
_LONGEST_QUEUE = 60.0


class Sleeper:
    """Owns one connection. `hears` tells whether the worker listens.

    `on_asleep` is called when a lock that had to be waited for is granted, and when one is lost.
    """

    def __init__(
        self,
        connection: ReservedConnection,
        queries: Queries,
        worker: UUID,
        *,
        hears: Callable[[], bool],
        on_asleep: Callable[[], None],
    ) -> None:
        connection.on_lost = self.reset
        self._connection = connection
        self._queries = queries
        self._worker = str(worker)
        self._hears = hears
        self._on_asleep = on_asleep
        self._turn = asyncio.Lock()
        self._standing: set[str] = set()  # we are the guard, with the lock granted
        self._waiting: asyncio.Task[None] | None = None  # we are the guard, the lock is not granted yet

    @property
    def standing(self) -> bool:
        return bool(self._standing) or self._waiting is not None

    def guards(self, channel: str) -> bool:
        return channel in self._standing

    async def stand(self, channel: str) -> bool:
        """Try to become the guard. True when the worker has just become it and must look once more.

        Without a connection there is no bell, and the polling interval covers it. A bell that the worker itself would
        not hear must not be rung for it.
        """
        if channel in self._standing or self._waiting is not None or not self._hears():
            return False
        try:
            answer = await self._ask("guard", channel=channel)
            if answer == 2:
                await self._announce(channel)
        except CONNECTION_FAULTS:
            return False
        if answer == 1:
            self._waiting = asyncio.create_task(self._fall_asleep(channel))
        return answer == 2

    async def _fall_asleep(self, channel: str) -> None:
        try:
            # Commits that wait for a long transaction of their own are waited for: from the moment it queues, the
            # others notify. Only a connection that is gone does not answer for this long.
            await self._ask("fall_asleep", patience=_LONGEST_QUEUE, channel=channel)
            await self._announce(channel)
        except (*CONNECTION_FAULTS, asyncpg.PostgresError):
            self.reset()  # with the connection goes the post: who cannot sleep must not keep others from it
        finally:
            self._waiting = None
            self._on_asleep()

    async def _announce(self, channel: str) -> None:
        self._standing.add(channel)
        await self._ask("announce_guard", channel=channel, worker=self._worker)

    async def stand_down(self) -> None:
        """Busy: producers need not ring. A lock that is still being waited for is given up once it is granted."""
        if self._waiting is not None:
            return
        with contextlib.suppress(*CONNECTION_FAULTS):
            for channel in tuple(self._standing):
                self._standing.discard(channel)
                await self._ask("stand_down", channel=channel, worker=self._worker)

    async def ping(self) -> None:
        """Tells a dead connection, and keeps the server from ending it as idle."""
        if self._waiting is None:
            with contextlib.suppress(*CONNECTION_FAULTS):
                await self._ask("ping")

    async def _ask(self, name: str, *, patience: float | None = _PATIENCE, **values: object) -> object:
        statement = self._queries.asyncpg(name)
        async with self._turn:
            connection = await self._connection.use()
            try:
                return await connection.fetchval(statement.sql, *statement.bind(values), timeout=patience)
            except CONNECTION_FAULTS:
                self.reset()
                raise

    def reset(self) -> None:
        """The connection is gone, and with it the locks. A worker that relied on them must look for itself."""
        stood, self._standing = self._standing, set()
        self._connection.drop()
        if stood:
            self._on_asleep()

    async def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
            self._connection.drop()  # it is blocked in the server: there is nobody to say goodbye to
        self._standing.clear()
        await self._connection.close()
