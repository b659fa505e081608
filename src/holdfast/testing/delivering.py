"""Workers that deliver in a test, one after the other: when a fault kills one, another takes over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from holdfast.errors import ConfigurationError
from holdfast.handlers import HandlerRegistry
from holdfast.handling.application.sources import Transactions
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Counters, Observer
from holdfast.testing.databases import TestDatabase
from holdfast.testing.faults import Duplicate, Fault, LostAnswer, StruckRegistry, answers_lost, stop_claims
from holdfast.testing.pools import OpenPools
from holdfast.testing.records import MOST_FOLLOWING, MOST_FOR_EACH, Drained
from holdfast.worker.connections import Connections
from holdfast.worker.draining import Drainer

# A delivery that comes back more often than this is snoozed without end: retries would have ended.
_MOST_RETURNS = 100
_SESSIONS_PATIENCE = 10.0
_LOOK_INTERVAL = 0.05
# Seconds after which fewer deliveries count as endless, for deliveries that are slow.
_LONG = 20.0
_FEW_FOLLOWING = 100

Due = tuple[datetime, UUID]


class PutOffForEver(AssertionError):
    """A handler snoozes its event without end."""


class WithoutEnd(AssertionError):
    """Handlers publish events whose handlers publish events, without end."""


class Delivering:
    """Delivers the events of one database to the handlers of one registry, while it is open."""

    def __init__(
        self,
        database: TestDatabase,
        registry: HandlerRegistry,
        settings: WorkerSettings,
        faults: Sequence[Fault] = (),
        observers: Sequence[Observer] = (),
        connections: Connections | None = None,
        transactions: Transactions = None,
        pools: OpenPools | None = None,
    ) -> None:
        self._transactions = transactions
        self._pools = pools or OpenPools()
        self._database = database
        self._registry = registry
        self._settings = settings
        self._faults = list(faults)
        self._observers = observers
        self._connections = connections
        self._worker: Drainer | None = None
        self._hanging: set[asyncio.Future[None]] = set()
        # Held except while `deliver` runs: the worker must not claim events that become due in between.
        self.claims_stopped = asyncio.Lock()
        self._counted = Counters()
        self._looked_at: datetime | None = None

    async def __aenter__(self) -> Self:
        await self._pools.open(self._transactions)
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end(kind, error, trace)

    async def _begin(self) -> None:
        registry = StruckRegistry(self._registry, self, self._faults) if self._faults else self._registry
        connections, self._connections = self._connections, None
        with naming_the_fixture():
            self._worker = Drainer(
                self._database.dsn,
                registry,
                self._settings,
                observers=self._observers,
                connections=connections,
                transactions=self._transactions,
            )
        self._counted = Counters()
        stop_claims(self._worker, self.claims_stopped)
        if not self.claims_stopped.locked():
            await self.claims_stopped.acquire()
        await self._worker.__aenter__()

    async def _end(self, *error: Any) -> None:
        worker, self._worker = self._worker, None
        for each in self._hanging:
            each.cancel()
        if worker is not None:
            await worker.__aexit__(*error)

    def other_worker(self) -> Drainer:
        """Return a second worker, which meets no faults."""
        return Drainer(self._database.dsn, self._registry, self._settings, transactions=self._transactions)

    # --- until nothing is left, or until a time -------------------------------------------------------

    async def drain(self, due_only: bool) -> Drained:
        """Deliver what is due; unless `due_only`, move the clock to the next delivery, until none is left."""
        done, returns = await self.deliver(), Counter[UUID]()
        while not due_only and (due := await self._next_due()) is not None:
            at, delivery = due
            returns[delivery] += 1
            if returns[delivery] > _MOST_RETURNS:
                raise PutOffForEver(str(delivery))
            before = await self._database.value("now")
            done += Drained(moved=await self._database.value("move", to=at) - before)
            done += await self.deliver()
        return done

    async def advance(self, by: timedelta) -> Drained:
        """Move the clock forward in steps: deliver each event when it is due, and fire each slot at its time."""
        if by < timedelta(0):
            raise ConfigurationError("advance", f"is {by}", "give a positive time: the clock goes forward only")
        until = await self._database.value("now") + by
        names = [schedule.name for schedule in self._registry.schedules]
        done = await self.deliver()
        while True:
            due = await self._next_due()
            slot = await self._database.value("next_slot", names=names) if names else None
            at = min((each for each in (due and due[0], slot) if each is not None), default=until)
            await self._database.value("move", to=min(at, until))
            done += await self.deliver()
            if at >= until:
                return replace(done, moved=by)

    async def _next_due(self) -> Due | None:
        """Return the time and the id of the next delivery to one of the handlers.

        Deliveries that were due before the last look began are left out: they were delivered, or are on a channel that
        is not served. Those that a rate or an open breaker holds back count from when that is over.
        """
        due = [
            (row["available_at"], row["id"])
            for row in await self._database.fetch("due", since=self._looked_at)
            if self._wanting(row["handler_name"], row["event_type"], row["target"])
        ]
        return min([*due, *await self._held_back()], default=None)

    async def _held_back(self) -> list[Due]:
        waits = {} if self._worker is None else self._worker.parts.shared.held.timed()
        if not waits:
            return []
        now: datetime = await self._database.value("now")
        return [
            (now + timedelta(seconds=waits[name]), row["id"])
            for row in await self._database.fetch("left_due", since=self._looked_at)
            for name in self._wanting(row["handler_name"], row["event_type"], row["target"])
            if name in waits
        ]

    def _wanting(self, handler_name: str | None, event_type: str, target: str | None) -> list[str]:
        """Return the names of the handlers to which a row is owed."""
        if handler_name is not None:
            return [handler_name] if handler_name in self._registry else []
        return [
            handler.name
            for handler in self._registry
            if handler.via == "outbox" and handler.wants(event_type) and target in (None, handler.domain_context)
        ]

    async def deliver(self) -> Drained:
        """Deliver what is due, and once more what a fault has interrupted or repeats."""
        self._looked_at = await self._database.value("now")
        done = await self._deliver()
        while self._worker is not None and self._worker.dead:
            owner = self._worker.parts.connections.address.owner
            await self._end(None, None, None)
            await self._sessions_gone(owner)
            await self.expire_leases(None)
            await self._begin()
            done += await self._deliver()
        if await self._open_again():
            done += await self._deliver()
        return done

    async def _deliver(self) -> Drained:
        worker = self._worker
        if worker is None:
            raise RuntimeError("no worker delivers: use it with `async with`")
        with answers_lost(worker, [each for each in self._faults if isinstance(each, LostAnswer) and not each.met]):
            while True:
                self.claims_stopped.release()
                try:
                    await self._within_bounds(worker)
                finally:
                    await self.claims_stopped.acquire()
                if worker.dead or worker.parts.shared.in_flight.none.is_set():
                    break
        before, self._counted = self._counted, replace(worker.counters)
        names = ("delivered", "retried", "snoozed", "failed", "duplicates", "fired")
        return Drained(**{name: getattr(self._counted, name) - getattr(before, name) for name in names})

    async def _within_bounds(self, worker: Drainer) -> None:
        before, began = worker.counters.delivered, time.monotonic()
        there: int | None = None
        delivering = asyncio.ensure_future(worker.deliver())
        try:
            while not (await asyncio.wait((delivering,), timeout=_LOOK_INTERVAL))[0]:
                delivered = worker.counters.delivered - before
                if delivered > (MOST_FOLLOWING if time.monotonic() - began < _LONG else _FEW_FOLLOWING):
                    if there is None:
                        there = await self._database.value("events_before", at=self._looked_at)
                    if delivered > MOST_FOR_EACH * there:
                        raise WithoutEnd
            delivering.result()
        finally:
            delivering.cancel()
            await asyncio.wait((delivering,))

    # --- for faults -----------------------------------------------------------------------------------

    def kill_worker(self) -> None:
        """End the worker as if its process were killed."""
        if self._worker is not None:
            self._worker.kill()

    async def expire_leases(self, handler: str | None) -> None:
        """Let the leases of a handler's deliveries expire, or all leases."""
        await self._database.fetch("expire_leases", handler=handler)

    async def lose_settlement(self, handler: str, event_id: UUID) -> None:
        """Lose the settlement of a plain handler; with `tx` it is part of the handler's transaction, and stays."""
        if not self._registry[handler].transactional:
            await self._database.fetch("lose_settlement", handler=handler, event_id=event_id)

    def strike_from_thread(self, fault: Fault, event_id: UUID, loop: asyncio.AbstractEventLoop) -> None:
        """Run a fault on the event loop of the workers, and wait for it in the thread of a handler."""

        async def strike() -> None:
            striking = asyncio.ensure_future(fault.strike(self, event_id))
            self._hanging.add(striking)
            try:
                await striking
            finally:
                self._hanging.discard(striking)

        asyncio.run_coroutine_threadsafe(strike(), loop).result()

    async def _open_again(self) -> bool:
        """Open the deliveries again that a fault repeats; return whether there are any."""
        opened = 0
        for fault in self._faults:
            if isinstance(fault, Duplicate) and fault.event_id is not None:
                values = {"handler": fault.handler, "event_id": fault.event_id}
                opened += await self._database.value("redeliver", **values)
                fault.event_id = None
        return bool(opened)

    async def _sessions_gone(self, owner: str) -> None:
        """Wait until the server knows that a killed worker is gone: until then its rows are locked."""
        deadline = time.monotonic() + _SESSIONS_PATIENCE
        while await self._database.value("sessions", owner=f"holdfast % {owner}") or await self._database.value(
            "locked"
        ):
            if time.monotonic() > deadline:
                raise AssertionError("the sessions of the killed worker have not ended in time")
            await asyncio.sleep(0.002)


def quick(settings: WorkerSettings, schema: str) -> WorkerSettings:
    """Return the settings of a worker that runs only during a drain."""
    return replace(settings, schema=schema, listen=False, sweep=False, settle_after=0.0)


@contextlib.contextmanager
def naming_the_fixture() -> Iterator[None]:
    """Refuse a handler whose `tx` no source makes; the remedy names the fixture instead of the worker's argument."""
    try:
        yield
    except ConfigurationError as refused:
        if not refused.field.endswith(".tx"):
            raise
        problem = refused.problem.replace("the worker was given", "the fixture holdfast_transactions returns")
        remedy = f"let it return {refused.remedy.partition(' of the application')[0].removeprefix('pass ')}"
        raise ConfigurationError(refused.field, problem, f"{remedy}: docs/testing.md has an example") from None


class WarmConnections:
    """The connections that drains on the kit's loop share: statements are parsed and planned once for all tests."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._registry: HandlerRegistry | None = None
        self._connections: Connections | None = None

    async def of(
        self, dsn: str, registry: HandlerRegistry, settings: WorkerSettings, transactions: Transactions
    ) -> Connections:
        """Return the connections for a registry; close those for another one."""
        key = (dsn, id(registry), len(registry), settings, id(transactions))
        if self._connections is None or key != self._key:
            await self.close()
            from uuid import uuid4

            self._key, self._registry = key, registry  # which keeps its id from being another's
            with naming_the_fixture():
                self._connections = Connections(dsn, uuid4(), registry, settings, transactions)
        return self._connections

    async def close(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            with contextlib.suppress(Exception):
                await connections.close()
