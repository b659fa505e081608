"""The heartbeats of a worker: the claimer sends them while nothing is in flight, and the lease keeper otherwise."""

import asyncio
import time

import asyncpg

from holdfast.postgres.deliveries import Deliveries
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Notice, Observer
from holdfast.worker.wakeups import Wakeups

_INTERVAL = 10.0  # a heartbeat counts for a minute, however long the lease is
# How much later than the claimer the thread sends one that is missing.
_PATIENCE = 2.0


class Heartbeat:
    """When the database last took one, and how one is sent. Two threads send them, each on its own connection."""

    def __init__(self, deliveries: Deliveries, settings: WorkerSettings, observe: Observer, wakeups: Wakeups) -> None:
        self._deliveries = deliveries
        self._observe = observe
        self._wakeups = wakeups
        self._sent_at: float | None = None
        self.interval = min(settings.lease / 3, _INTERVAL)

    @property
    def sent_for(self) -> float | None:
        """Seconds since the database last took one; None before the first."""
        sent_at = self._sent_at
        return None if sent_at is None else time.monotonic() - sent_at

    @property
    def due_in(self) -> float:
        """Seconds until the claimer, if it is idle, sends the next one. The first is sent at the start."""
        return max(self.interval - (self.sent_for or 0.0), 0.0)

    @property
    def missing(self) -> bool:
        """Whether nobody has sent one in time: the worker is busy, stops, or something blocks its event loop."""
        sent_for = self.sent_for
        return sent_for is None or sent_for >= self.interval + _PATIENCE

    async def send(self, connection: asyncpg.Connection) -> None:
        """Send one."""
        await self._deliveries.alive(connection)
        self._sent_at = time.monotonic()

    async def end_silent_sessions(
        self, connection: asyncpg.Connection, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """End sessions of workers that send none. `loop` is the claimer's, from another thread."""
        ended = await self._deliveries.end_silent_sessions(connection)
        for worker, session in ended:
            details: dict[str, object] = {
                "worker_id": str(worker),
                "session": session,
                "cause": "its worker has been silent for longer than its lease, and the session held a transaction",
            }
            self._observe(Notice("warning", "session_ended", details))
        if not ended:
            return
        if loop is None:
            self._wakeups.look_again()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(self._wakeups.look_again)
