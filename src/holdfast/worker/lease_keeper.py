"""Extends leases, and sends heartbeats, from a thread with a loop and a connection of its own.

While nothing is in flight the claimer sends the heartbeats, and the thread has no connection.

A handler that blocks the worker's loop (a forgotten time.sleep, a long computation) would otherwise lose its lease
while it still runs, and another worker would run it a second time. And the worker would pass for dead, as it would
while it finishes what runs after SIGTERM: an operator would release its events.
"""

import asyncio
import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from uuid import UUID

import asyncpg

from holdfast.postgres.connection import ReservedConnection
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.faults import PASSING_FAULTS
from holdfast.telemetry import Notice
from holdfast.worker.dispatcher import Dispatcher
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.pulse import Pulse
from holdfast.worker.shared import Shared

_CHUNK = 500
_STOP_PATIENCE = 1.0


def digest_of(identity: UUID) -> str:
    """What a notification calls a delivery by: every login of the database may listen, and an id says too much."""
    return hashlib.sha256(str(identity).encode()).hexdigest()[:16]


class LeaseKeeper:
    """Extends the leases every third of their time, and has the dispatcher cancel handlers whose lease is lost.

    It sends heartbeats until the last handler has ended.
    """

    def __init__(self, shared: Shared, dispatcher: Dispatcher, heartbeat: Heartbeat) -> None:
        self._address = shared.connections.address
        self._deliveries = shared.deliveries
        self._in_flight = shared.in_flight
        self._observe = shared.observe
        self._outages = shared.outages
        self._lease = shared.settings.lease
        self._pulse = shared.pulse
        self._dispatcher = dispatcher
        self._heartbeat = heartbeat
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._worker_loop: asyncio.AbstractEventLoop | None = None
        self._warned_at = 0.0
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._doubted: deque[str] = deque(maxlen=_CHUNK)
        self._doubts_all = False
        self._own_pulse = Pulse()

    def doubt(self, digest: str) -> None:
        """Ask the database now, not when the leases are next extended, whether a delivery still has its lease.

        A notification says that it has not, and names it by a digest of its id. Any role may send one: only the
        database's answer stops a handler.
        """
        self._doubted.append(digest)

    def doubt_all(self) -> None:
        """Ask for everything in flight: what notifications would have said has not been heard."""
        self._doubts_all = True

    def _take_doubted(self) -> list[Delivery]:
        if self._doubts_all:
            self._doubts_all = False
            self._doubted.clear()
            return self._in_flight.snapshot()
        digests = {self._doubted.popleft() for _ in range(len(self._doubted))}
        return [each for each in self._in_flight.snapshot() if digest_of(each.id) in digests]

    @property
    def silent_for(self) -> float:
        """Seconds for which its thread has been blocked, or has ended."""
        return 0.0 if self._thread is None else self._own_pulse.silent_for

    def start(self) -> None:
        self._worker_loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run_in_thread, name="holdfast-leases", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._stopping.set()
        if self._thread is None:
            return
        if self._running is not None:
            loop, running = self._running
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(running.cancel)
        await asyncio.to_thread(self._thread.join, _STOP_PATIENCE)

    def _run_in_thread(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._run_as_task())

    async def _run_as_task(self) -> None:
        running = asyncio.create_task(self.run())
        self._running = asyncio.get_running_loop(), running
        pulse = asyncio.create_task(self._own_pulse.run())
        try:
            await running
        finally:
            pulse.cancel()

    async def run(self) -> None:
        interval = self._lease / 3
        connection = ReservedConnection(self._address, "leases", statement_timeout=interval)
        outage = self._outages.of("leases")
        due = beat_due = time.monotonic()
        try:
            while not self._stopping.is_set():
                now = time.monotonic()
                beats = now >= min(due, beat_due)
                leased = self._take_doubted() if self._doubted or self._doubts_all else []
                if not beats and not leased:
                    # Short steps, so that stopping is prompt without a signal between threads; and whoever sends
                    # doubts, no more than ten looks a second.
                    self._watch(now)
                    await asyncio.sleep(min(0.1, min(due, beat_due) - now))
                    continue
                if beats:
                    beat_due = now + self._heartbeat.interval
                    self._watch(now)
                if now >= due:
                    leased, due = self._aged(now), now + interval
                if not len(self._in_flight) and not self._heartbeat.missing:
                    beat_due = now + 0.5  # the claimer sends them
                    outage.over()
                    continue
                try:
                    used = await connection.use()
                    await self._extend(used, leased)
                    if beats:
                        await self._heartbeat.send(used)
                        await self._heartbeat.end_silent_sessions(used, self._worker_loop)
                    outage.over()
                    if not len(self._in_flight):
                        await connection.close()
                except PASSING_FAULTS:
                    due = time.monotonic() + 0.1
                except Exception as fault:  # of any kind: a worker that extends nothing loses every lease
                    connection.drop()
                    due = time.monotonic() + min(outage.begin(fault), interval)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_PATIENCE / 2):
                    await connection.close()

    def _aged(self, now: float) -> list[Delivery]:
        """Return the deliveries whose leases are old enough to need more time."""
        # Not for ever: a delivery that is past its limit and could not be cancelled, or was never run, loses its lease.
        # One that is handled and cannot be settled does not: its handler would run again.
        blocked = set(self._in_flight.snapshot_blocked())
        return [
            each
            for each in self._in_flight.snapshot()
            if self._lease / 6 < now - each.claimed_at
            and (
                now - (each.started_at or each.claimed_at) < each.handler.timeout + 2 * self._lease
                or each in blocked
                # A thread cannot be cancelled, and the next attempt must not run beside it.
                or (each.started_at is not None and not each.handler.asynchronous)
            )
        ]

    async def _extend(self, connection: asyncpg.Connection, leased: Sequence[Delivery]) -> None:
        for start in range(0, len(leased), _CHUNK):
            chunk = leased[start : start + _CHUNK]
            gone = set(await self._deliveries.extend(connection, chunk))
            # The deliveries and not their ids: this worker may have claimed the row again by now, under another lease.
            lost = [each for each in chunk if each.id in gone]
            if lost and self._worker_loop is not None and not self._worker_loop.is_closed():
                self._worker_loop.call_soon_threadsafe(self._dispatcher.cancel, lost)

    def _watch(self, now: float) -> None:
        """Report handlers that block the worker's event loop."""
        silent = self._pulse.silent_for
        if silent > max(2.0, self._lease / 3) and now - self._warned_at > 30:
            self._warned_at = now
            suspects = sorted({each.handler.name for each in self._dispatcher.running() if each.handler.asynchronous})
            details: dict[str, object] = {
                "blocked_s": round(silent, 1),
                "handlers": suspects,
                "remedy": "the handler blocks the event loop: await instead, or make it a plain def",
            }
            self._observe(Notice("warning", "loop_blocked", details))
