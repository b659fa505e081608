"""Delivers what is due and stops: the parts of a worker without the loops that it needs only in order to live long."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Self

from holdfast.errors import HoldfastError
from holdfast.failure import describe
from holdfast.generation import serving_generation
from holdfast.handlers import HandlerRegistry
from holdfast.handling.application.sources import Transactions
from holdfast.ids import uuid7
from holdfast.observability.logging import log_fact
from holdfast.observing import DirectObservers
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Counters, Notice, Observer
from holdfast.worker.connections import Connections
from holdfast.worker.lifecycle import Lifecycle
from holdfast.worker.parts import Parts

# For what is still running when a drainer ends: its tasks have been cancelled.
_END_PATIENCE = 2.0

UnlessEnded = Callable[[Coroutine[None, None, object]], Awaitable[None]]


async def deliver_due(parts: Parts, unless_ended: UnlessEnded, ended: Callable[[], bool]) -> None:
    """Wait until a running claimer finds nothing that is due while nothing is in flight.

    Handlers publish: only what is found after the last of them has ended is all there is.
    """
    counters, in_flight = parts.shared.counters, parts.shared.in_flight
    while not ended():
        await unless_ended(in_flight.none.wait())
        # Successes are reported behind their settlement: the one that closes a breaker makes more rows due.
        await unless_ended(parts.settler.flush())
        idle, claimed = in_flight.none.is_set(), counters.claimed
        await unless_ended(parts.claimer.rest())
        parts.dispatcher.hurry()
        if idle and claimed == counters.claimed:
            return


class Drainer:
    """Delivers, whenever `deliver` is called, what is due: it claims, runs handlers and settles as a worker does.

    It does not listen, keep leases, sweep or tell others that it lives: it ends long before a lease does. Nor does it
    wait until a rate allows more. When it is left, it closes its connections, but those that it was given.
    """

    def __init__(
        self,
        dsn: str,
        registry: HandlerRegistry,
        settings: WorkerSettings,
        *,
        observers: Iterable[Observer] = (),
        connections: Connections | None = None,
        transactions: Transactions = None,
    ) -> None:
        self._settings = settings
        self._observers = DirectObservers(observers, log_fact)
        self._closes = connections is None
        worker = uuid7()
        self.parts = Parts(dsn, worker, registry, settings, self._observers, None, None, transactions, connections)
        self.parts.shared.held.spends_time = False
        self._lifecycle = Lifecycle(self.parts, worker, registry)
        self._loops: list[asyncio.Task[None]] = []
        self._dead = asyncio.Event()

    @property
    def counters(self) -> Counters:
        """What it has done so far."""
        return self.parts.shared.counters

    @property
    def dead(self) -> bool:
        """Whether it was killed."""
        return self._dead.is_set()

    async def __aenter__(self) -> Self:
        parts = self.parts
        await parts.lifespans.start()
        try:
            await self._lifecycle.introduce()
        except BaseException:
            await self._close()
            raise
        loops = (parts.settler.run, parts.dispatcher.run, parts.claimer.run)
        self._loops = [asyncio.create_task(loop()) for loop in loops]
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if not self.dead:
            self.parts.claimer.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_PATIENCE):
                    await self.parts.dispatcher.stop(0)
                    if self.parts.scheduler is not None:
                        await self.parts.maintenance.say_goodbye()
        await self._end_loops()
        await self._close()

    async def deliver(self) -> None:
        """Fire the slots that are due, and deliver until nothing is due."""
        with serving_generation(self._settings.schema, self._settings.generation):
            if self.parts.scheduler is not None:
                await self.parts.scheduler.run_once(await self.parts.connections.schedule.use())
            await deliver_due(self.parts, self._unless_ended, lambda: self.dead)

    def kill(self) -> None:
        """End as a process ends that is killed: nothing more is settled, and open transactions are rolled back."""
        self._dead.set()

    async def _unless_ended(self, awaited: Coroutine[None, None, object]) -> None:
        """Wait, unless it is killed, or one of its loops fails, which is a defect."""
        waiting, dead = asyncio.create_task(awaited), asyncio.create_task(self._dead.wait())
        try:
            await asyncio.wait((waiting, dead, *self._loops), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            dead.cancel()
        for loop in self._loops:
            if loop.done() and not loop.cancelled() and (error := loop.exception()) is not None:
                raise error
        if self.dead:
            await self._end_loops()

    async def _end_loops(self) -> None:
        loops, self._loops = self._loops, []
        # The dispatcher first: the handlers that it cancels must find nobody to settle what they end with.
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    async def _close(self) -> None:
        parts = self.parts
        try:
            await parts.sleeper.close()
            if self._closes or self.dead:
                await parts.connections.close()
        finally:
            try:
                await parts.lifespans.stop()
            except HoldfastError as error:
                self._observers(Notice("error", "lifespan_failed", {"error": describe(error).text}))
            self._observers.finish()
