"""Listens for notifications: one direct connection, reconnected after 1 s to 30 s, pinged every few seconds.

A notification is a hint: any role may send one. What it says is only ever a reason to look.
"""

import asyncio
import time
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.postgres.faults import CONNECTION_FAULTS, LoginRefused
from holdfast.postgres.queries import Queries
from holdfast.postgres.wakeup.sleeper import Sleeper
from holdfast.telemetry import Notice
from holdfast.worker.connections import IDLE_LIMIT, PING_INTERVAL
from holdfast.worker.lease_keeper import LeaseKeeper
from holdfast.worker.shared import Shared
from holdfast.worker.wakeups import Wakeups

_LONGEST_WAIT = 30.0
_PATIENCE = 5.0


class Listener:
    """Wakes the claimer for notifications, and has the lease keeper check a delivery whose event was cancelled.

    While it does not hear, the sleeper must not sleep, and the claimer polls.
    """

    def __init__(
        self,
        shared: Shared,
        queries: Queries,
        worker: UUID,
        wakeups: Wakeups,
        sleeper: Sleeper,
        lease_keeper: LeaseKeeper,
    ) -> None:
        self._connections = shared.connections
        self._connection = shared.connections.listen
        self._queries = queries
        self._channels = shared.settings.served_channels
        self._worker = str(worker)
        self._counters = shared.counters
        self._observe = shared.observe
        self._poll_interval = shared.settings.poll_interval
        self._wakeups = wakeups
        self._sleeper = sleeper
        self._lease_keeper = lease_keeper
        self._outage = shared.outages.of("listen", longest_wait=_LONGEST_WAIT)
        self._gone = asyncio.Event()
        self._answered_at: float | None = None  # when the session last answered

    async def run(self) -> None:
        """Listen until it is cancelled."""
        try:
            await self._run()
        finally:
            self._sleeper.hear(False)

    async def _run(self) -> None:
        first = True
        while True:
            try:
                if first and not await self._can_listen():
                    return
                await self._listen()
                self._outage.over()
                if not first:
                    self._counters.listen_reconnects += 1
                first = False
                self._sleeper.hear(True)
                # What was published meanwhile rang no bell for this worker, and what was cancelled was not told to it.
                self._wakeups.look_again()
                self._lease_keeper.doubt_all()
                await self._watch()
            except CONNECTION_FAULTS as fault:
                self._sleeper.hear(False)
                self._connection.drop()
                self._sleeper.reset()
                if isinstance(fault, TimeoutError):
                    self._connections.drop()  # the server did not even close the connection: the others are dead too
                self._wakeups.look_again()
                if not self._ended_as_idle():
                    await self._outage.wait(fault)

    def _ended_as_idle(self) -> bool:
        """Whether the lost session was idle for too long, because a handler has blocked the event loop: no outage.

        The driver's error does not tell: it reads the server's last words as the answer to another statement.
        """
        answered_at, self._answered_at = self._answered_at, None
        return answered_at is not None and time.monotonic() - answered_at >= IDLE_LIMIT

    async def _can_listen(self) -> bool:
        """False, with a report, behind a transaction pooler, where no notification arrives: the worker polls."""
        address = self._connections.listen_address
        if address is not self._connections.address:
            try:
                await address.probe()
            except asyncpg.PostgresError as refusal:
                raise LoginRefused(str(refusal)) from refusal
        if not address.pooled:
            return True
        self._sleeper.give_up()
        details: dict[str, object] = {
            "cause": "the connection goes through a transaction pooler, where nothing can be listened for",
            "action": f"polling every {self._poll_interval:g} s",
            "remedy": "give listen_dsn (HOLDFAST_LISTEN_DSN) a direct connection",
        }
        self._observe(Notice("error", "listener_pooled", details))
        return False

    async def _listen(self) -> None:
        connection = await self._connection.use()
        self._gone.clear()
        connection.add_termination_listener(self._terminated)
        for channel in self._channels:
            await connection.add_listener(channel, self._heard)
        self._answered_at = time.monotonic()

    async def _ask(self, connection: asyncpg.Connection, name: str, **values: object) -> None:
        statement = self._queries.asyncpg(name)
        await connection.execute(statement.sql, *statement.bind(values), timeout=_PATIENCE)

    async def _watch(self) -> None:
        """Return when the connection is gone. A half-open one is found by asking."""
        while True:
            try:
                async with asyncio.timeout(min(self._poll_interval, PING_INTERVAL)):
                    await self._gone.wait()
                raise ConnectionResetError("the listening connection was closed")
            except TimeoutError:
                connection = await self._connection.use()
                await self._ask(connection, "ping")
                self._answered_at = time.monotonic()
                await self._sleeper.ping()

    def _terminated(self, _connection: Any) -> None:
        self._gone.set()

    def _heard(self, _connection: Any, _pid: int, _channel: str, hint: object) -> None:
        word, _, rest = str(hint).partition(" ")
        self._counters.wakeups += 1
        if word == "cancel":
            self._lease_keeper.doubt(rest)
        elif word in ("asleep", "awake"):
            if rest != self._worker:
                self._wakeups.wake()
        else:
            self._wakeups.wake(rescan=word == "rescan")
