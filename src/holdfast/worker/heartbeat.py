"""Extends leases from a thread with a loop and a connection of its own.

A handler that blocks the worker's loop (a forgotten time.sleep, a long computation) would otherwise lose its lease
while it still runs, and another worker would run it a second time.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import asyncpg

from holdfast.postgres.connection import Address, ReservedConnection
from holdfast.postgres.deliveries import Deliveries, Delivery
from holdfast.postgres.faults import PASSING_FAULTS
from holdfast.telemetry import Notice, Observer
from holdfast.worker.in_flight import InFlight
from holdfast.worker.outage import Outages

_CHUNK = 500
_STOP_PATIENCE = 1.0


class Heartbeat:
    """Beats every third of the lease. `lost` is called, on the worker's loop, with what is not ours any more."""

    def __init__(
        self,
        address: Address,
        deliveries: Deliveries,
        in_flight: InFlight,
        observe: Observer,
        outages: Outages,
        *,
        lease: float,
        lost: Callable[[Iterable[Delivery]], None],
        running: Callable[[], list[Delivery]],
        last_turn: Callable[[], float],
    ) -> None:
        self._address = address
        self._deliveries = deliveries
        self._in_flight = in_flight
        self._observe = observe
        self._outages = outages
        self._lease = lease
        self._lost = lost
        self._running = running
        self._last_turn = last_turn
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._warned_at = 0.0
        self._beating: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._doubted: deque[Delivery] = deque(maxlen=_CHUNK)

    def doubt(self, delivery: Delivery) -> None:
        """Somebody says that the delivery is not ours any more: ask the database now, and not at the next beat."""
        self._doubted.append(delivery)

    def start(self) -> None:
        self._home = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._beat_forever, name="holdfast-heartbeat", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._stopping.set()
        if self._thread is None:
            return
        if self._beating is not None:
            loop, beating = self._beating
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(beating.cancel)
        await asyncio.to_thread(self._thread.join, _STOP_PATIENCE)

    def _beat_forever(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._beat())

    async def _beat(self) -> None:
        beating = asyncio.create_task(self.run())
        self._beating = asyncio.get_running_loop(), beating
        await beating

    async def run(self) -> None:
        interval = self._lease / 3
        connection = ReservedConnection(self._address, "heartbeat", statement_timeout=interval)
        outage = self._outages.of("heartbeat")
        due = time.monotonic() + interval
        try:
            while not self._stopping.is_set():
                now = time.monotonic()
                if now < due and not self._doubted:
                    # Short steps, so that stopping is prompt without a signal between threads.
                    await asyncio.sleep(min(0.1, due - now))
                    continue
                doubted = list(self._doubted) if now < due else None
                self._doubted.clear()
                if doubted is None:
                    due = now + interval
                    self._watch(now)
                try:
                    await self.run_once(await connection.use(), now, doubted)
                    outage.over()
                except PASSING_FAULTS:
                    due = time.monotonic() + 0.1
                except Exception as fault:  # whatever it is: a worker without a heartbeat loses every lease
                    connection.drop()
                    due = time.monotonic() + min(outage.begin(fault), interval)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_PATIENCE / 2):
                    await connection.close()

    async def run_once(self, connection: asyncpg.Connection, now: float, doubted: list[Delivery] | None = None) -> None:
        """Extend every lease that is old enough to need it, or those that are in doubt."""
        # Not for ever: what is past its limit and could not be cancelled, or was never run, gives its event up.
        held = doubted or [
            each
            for each in self._in_flight.snapshot()
            if self._lease / 6 < now - each.claimed_at
            and now - (each.started_at or each.claimed_at) < each.handler.timeout + 2 * self._lease
        ]
        for start in range(0, len(held), _CHUNK):
            chunk = held[start : start + _CHUNK]
            gone = set(await self._deliveries.extend(connection, chunk))
            # The deliveries and not their ids: the row may be ours again by now, under another lease.
            lost = [each for each in chunk if each.id in gone]
            if lost and self._home is not None and not self._home.is_closed():
                self._home.call_soon_threadsafe(self._lost, lost)

    def _watch(self, now: float) -> None:
        """Name the handlers that keep the loop from turning."""
        silent = now - self._last_turn()
        if silent > max(2.0, self._lease / 3) and now - self._warned_at > 30:
            self._warned_at = now
            suspects = sorted({each.handler.name for each in self._running() if each.handler.asynchronous})
            details: dict[str, object] = {
                "blocked_s": round(silent, 1),
                "handlers": suspects,
                "remedy": "the handler blocks the event loop: await instead, or make it a plain def",
            }
            self._observe(Notice("warning", "loop_blocked", details))
