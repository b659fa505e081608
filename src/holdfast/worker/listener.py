"""Listens for the bell: one direct connection, reconnected from 1 s to 30 s, checked at every polling interval.

A notification is a hint and nothing more: any role may send one. What it says is only ever a reason to look.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.postgres.connection import ReservedConnection
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.postgres.queries import Queries
from holdfast.telemetry import Counters
from holdfast.worker.outage import Outages

_LONGEST_WAIT = 30.0
_PATIENCE = 5.0
PING_INTERVAL = 5.0


class Listener:
    """Calls `wake(rescan)` for the bell and `stop(id)` for a cancelled event.

    When it cannot hear any more it calls `lost(silent)`: true when the other side did not even close the connection.
    """

    def __init__(
        self,
        connection: ReservedConnection,
        queries: Queries,
        channels: tuple[str, ...],
        worker: UUID,
        counters: Counters,
        outages: Outages,
        *,
        poll_interval: float,
        wake: Callable[[bool], None],
        stop: Callable[[UUID], None],
        may_listen: Callable[[], Awaitable[bool]],
        lost: Callable[[bool], None],
        pinged: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._queries = queries
        self._channels = channels
        self._worker = str(worker)
        self._counters = counters
        self._poll_interval = poll_interval
        self._wake = wake
        self._stop = stop
        self._may_listen = may_listen
        self._lost = lost
        self._pinged = pinged
        self._outage = outages.of("listen", longest_wait=_LONGEST_WAIT)
        self._gone = asyncio.Event()
        self.healthy = False

    async def run(self) -> None:
        first = True
        while True:
            try:
                if first and not await self._may_listen():
                    return
                await self._listen()
                self._outage.over()
                if not first:
                    self._counters.listen_reconnects += 1
                first = False
                self.healthy = True
                self._wake(True)  # what was published while nobody listened rang for nobody
                await self._watch()
            except CONNECTION_FAULTS as fault:
                self.healthy = False
                self._connection.drop()
                self._lost(isinstance(fault, TimeoutError))
                self._wake(True)
                await self._outage.wait(fault)

    async def close(self) -> None:
        await self._connection.close()

    async def _listen(self) -> None:
        connection = await self._connection.use()
        self._gone.clear()
        connection.add_termination_listener(self._terminated)
        for channel in self._channels:
            await connection.add_listener(channel, self._heard)

    async def _ask(self, connection: asyncpg.Connection, name: str, **values: object) -> None:
        statement = self._queries.asyncpg(name)
        await connection.execute(statement.sql, *statement.bind(values), timeout=_PATIENCE)

    async def _watch(self) -> None:
        """Until the connection is gone. A half-open one does not say so: it has to be asked."""
        while True:
            try:
                async with asyncio.timeout(min(self._poll_interval, PING_INTERVAL)):
                    await self._gone.wait()
                raise ConnectionResetError("the listening connection was closed")
            except TimeoutError:
                connection = await self._connection.use()
                await self._ask(connection, "ping")
                await self._pinged()

    def _terminated(self, _connection: Any) -> None:
        self._gone.set()

    def _heard(self, _connection: Any, _pid: int, _channel: str, hint: object) -> None:
        word, _, rest = str(hint).partition(" ")
        self._counters.wakeups += 1
        if word == "stop":
            with contextlib.suppress(ValueError):  # not from us
                self._stop(UUID(rest))
        elif word in ("guarded", "unguarded"):
            if rest != self._worker:
                self._wake(False)
        else:
            self._wake(word == "rescan")
