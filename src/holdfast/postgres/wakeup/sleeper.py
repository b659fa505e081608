"""The sleeper of a channel: the idle worker for which producers ring the bell.

A NOTIFY makes committing producers wait for each other, so they send one only while a worker sleeps. An idle worker
becomes the channel's sleeper and takes the channel's lock exclusively; commits that cannot share it notify. It waits
for the commits that could still share it, looks for work once more, and sleeps. One sleeper per channel suffices: the
notifications wake every listener, so the other idle workers sleep as well. A sleeper that gets busy gets up and
announces it; one that dies loses its locks, and its deputy, another idle worker, notices within a second. The others
need no connection for this: they ask now and then, on one that they have, whether one of the two places is vacant.
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
    """One worker's part in it, on a connection of its own.

    `possible` is false where no notification can arrive: without LISTEN, or behind a transaction pooler. `hears` is
    true while the listener listens. `look_again` is called when a lock that had to be waited for is granted, and when
    one is lost.
    """

    def __init__(
        self,
        connection: ReservedConnection,
        queries: Queries,
        worker: UUID,
        look_again: Callable[[], None],
        *,
        possible: bool = True,
    ) -> None:
        connection.when_lost(self.reset)
        self.possible = possible
        self.hears = False
        self._connection = connection
        self._queries = queries
        self._worker = str(worker)
        self._look_again = look_again
        self._connection_lock = asyncio.Lock()
        self._asleep: set[str] = set()  # channels whose sleeper this is, with the lock granted
        self._deputy: set[str] = set()  # channels whose deputy this is
        self._waiting: asyncio.Task[None] | None = None  # for the lock of a channel whose sleeper this is

    def hear(self, hears: bool) -> None:
        """Note that the listener has begun to listen, or has ceased to."""
        self.hears = hears

    def give_up(self) -> None:
        """Note that no notification can arrive."""
        self.possible = False

    @property
    def chosen(self) -> bool:
        """Whether this worker is the sleeper or the deputy of any channel, asleep or still waiting for the lock."""
        return bool(self._asleep or self._deputy) or self._waiting is not None

    @property
    def waiting(self) -> bool:
        """Whether it waits for the lock of a channel."""
        return self._waiting is not None

    @property
    def deputy(self) -> bool:
        """Whether this worker is the deputy of any channel, and has to look after its sleeper."""
        return bool(self._deputy)

    def asleep(self, channel: str) -> bool:
        """Whether every commit on the channel notifies on behalf of this worker."""
        return channel in self._asleep

    async def fall_asleep(self, channel: str, beside: asyncpg.Connection | None = None) -> bool:
        """Try to become the channel's sleeper, or else its deputy. True when the worker must look once more.

        Without a connection no commit notifies it, and the polling interval covers that. A worker that would not hear
        the notifications does not make producers send them. `beside` is another connection of the worker: on it is
        asked whether it is worth opening one for this.
        """
        if channel in self._asleep or self._waiting is not None or not self.hears:
            return False
        try:
            if beside is not None and not self._connection.is_open and not await self._is_vacant(beside, channel):
                return False
            deputy = channel in self._deputy
            name = "watch_sleeper" if deputy else "become_sleeper"
            answer = await self._ask(name, channel=channel, worker=self._worker)
            if answer == 2:
                self._asleep.add(channel)
            if answer == 0 and not deputy:
                if await self._ask("become_deputy", channel=channel):
                    self._deputy.add(channel)
            elif answer == 3:
                await self._ask("look_all", channel=channel, worker=self._worker)
            elif answer in (1, 2) and deputy:
                self._deputy.discard(channel)
                await self._ask("resign_as_deputy", channel=channel)
        except CONNECTION_FAULTS:
            return False
        if answer == 1:
            self._waiting = asyncio.create_task(self._wait_for_lock(channel))
        return answer in (2, 3)

    async def _is_vacant(self, connection: asyncpg.Connection, channel: str) -> bool:
        statement = self._queries.asyncpg("is_place_vacant")
        return bool(await connection.fetchval(statement.sql, *statement.bind({"channel": channel})))

    async def leave(self) -> None:
        """Close the connection, if this worker has no place to keep with it."""
        if not self.chosen and self._connection.is_open:
            async with self._connection_lock:
                await self._connection.close()

    async def _wait_for_lock(self, channel: str) -> None:
        try:
            # Commits that wait for a long transaction of their own are waited for: from the moment the lock is queued
            # for, the others notify. Only a connection that is gone does not answer for this long.
            await self._ask("fall_asleep", patience=_LONGEST_QUEUE, channel=channel, worker=self._worker)
            self._asleep.add(channel)
        except (*CONNECTION_FAULTS, asyncpg.PostgresError):
            self.reset()  # both locks go with the connection: one that cannot fall asleep must not keep others from it
        finally:
            self._waiting = None
            self._look_again()

    async def get_up(self) -> None:
        """Release the locks: the worker is busy, and producers need not ring. One still waited for is kept."""
        if self._waiting is not None:
            return
        with contextlib.suppress(*CONNECTION_FAULTS):
            for channel in tuple(self._asleep):
                self._asleep.discard(channel)
                await self._ask("get_up", channel=channel, worker=self._worker)
            for channel in tuple(self._deputy):
                self._deputy.discard(channel)
                await self._ask("resign_as_deputy", channel=channel)

    async def ping(self) -> None:
        """Detect a dead connection, and keep the server from ending it as idle."""
        if self._waiting is None and self.chosen:
            with contextlib.suppress(*CONNECTION_FAULTS):
                await self._ask("ping")

    async def _ask(self, name: str, *, patience: float | None = _PATIENCE, **values: object) -> object:
        statement = self._queries.asyncpg(name)
        async with self._connection_lock:
            connection = await self._connection.use()
            try:
                return await connection.fetchval(statement.sql, *statement.bind(values), timeout=patience)
            except CONNECTION_FAULTS:
                self.reset()
                raise

    def reset(self) -> None:
        """Forget the connection, which is gone, and the locks with it. A worker that was asleep must look again."""
        slept, self._asleep = self._asleep, set()
        self._deputy.clear()
        self._connection.drop()
        if slept:
            self._look_again()

    async def close(self) -> None:
        """Release everything; without a word to the server when it still keeps the connection waiting for a lock."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
            self._connection.drop(fault=False)
        self._asleep.clear()
        self._deputy.clear()
        await self._connection.close()
