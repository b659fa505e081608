"""Fires schedules: sleeps until the next slot by the database's clock, and publishes its event if no other worker has.

A worker fires the schedules that its own code declares, in their newest declaration. It declares them when it starts,
and again on each new connection: behind that may be a restored backup, which is older than they are.
"""

import asyncio
import random

import asyncpg

from holdfast.errors import ConfigurationError
from holdfast.observing import ObserverGroup
from holdfast.postgres.connection import ReservedConnection
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.postgres.schedules import Schedules, Watched
from holdfast.redact import redact_secrets
from holdfast.schedules import Due, Schedule, due
from holdfast.telemetry import Counters, Fired, Notice
from holdfast.tracing import Tracing
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.outage import Outages

# Operators resume schedules, other workers change their declarations, and clocks are set: look at least this often.
_LONGEST_SLEEP = 5.0
# Not all workers at once: one that wakes later finds the slot fired.
_JITTER = 0.05
_AGAIN = 0.1
# So many tries to fire the slots due under the old timing before a new one replaces it.
_OWED_TRIES = 20


class Scheduler:
    """One loop, one connection."""

    def __init__(
        self,
        connection: ReservedConnection,
        schedules: Schedules,
        declared: tuple[Schedule, ...],
        counters: Counters,
        observe: ObserverGroup,
        outages: Outages,
        tracing: Tracing | None = None,
    ) -> None:
        self._connection = connection
        self._schedules = schedules
        self._declared = declared
        self._names = [schedule.name for schedule in declared]
        self._counters = counters
        self._observe = observe
        self._wants_fired = observe.wants(Fired)
        self._outage = outages.of("schedule")
        self._tracing = tracing
        self._reports = HourlyLimit()
        self._declared_on: asyncpg.Connection | None = None

    async def declare(self) -> None:
        """Record what the code declares, when the worker starts."""
        try:
            connection = await self._connection.use()
            await self._declare(connection)
            self._declared_on = connection
        except CONNECTION_FAULTS:
            self._connection.drop()
            raise

    async def _declare(self, connection: asyncpg.Connection) -> None:
        for schedule in self._declared:
            answer = await self._schedules.declare(connection, schedule)
            for left in reversed(range(_OWED_TRIES)):
                if answer != "owed":
                    break
                # Slots due under the old timing would be lost with it: fire them first.
                await self.run_once(connection)
                await asyncio.sleep(_AGAIN)
                answer = await self._schedules.declare(connection, schedule, force=left == 0)
            if answer == "older" and self._reports.due("schedule_superseded", schedule.name):
                details: dict[str, object] = {
                    "schedule": schedule.name,
                    "cause": "a later generation has declared it; its declaration stands",
                    "remedy": "if that generation is gone: holdfast generations retire NUMBER, and start this again",
                }
                self._observe(Notice("info", "schedule_superseded", details))

    async def _declare_again(self, connection: asyncpg.Connection) -> None:
        """Declare on a new connection. What is refused there is refused only for now: it was allowed at the start."""
        try:
            await self._declare(connection)
            self._declared_on = connection
        except (*PASSING_FAULTS, *CONNECTION_FAULTS):
            raise
        except (ConfigurationError, asyncpg.PostgresError) as error:
            remedy = "the database has the schedules that were declared before; this is tried again"
            self._report("schedule_refused", ", ".join(self._names), _brief(error), remedy)

    async def run(self) -> None:
        while True:
            try:
                connection = await self._connection.use()
                if connection is not self._declared_on:
                    await self._declare_again(connection)
                wait = await self.run_once(connection)
                self._outage.over()
            except asyncio.CancelledError:
                self._connection.drop(fault=False)  # in the middle of a statement: do not wait for its answer
                raise
            except PASSING_FAULTS:
                wait = random.uniform(0.02, 0.2)
            except CONNECTION_FAULTS as fault:
                self._connection.drop()
                wait = self._outage.begin(fault)
            await asyncio.sleep(wait)

    async def run_once(self, connection: asyncpg.Connection) -> float:
        """Fire the slots that are due. Returns the seconds until the next look."""
        wait = _LONGEST_SLEEP
        for watched in await self._schedules.watch(connection, self._names):
            if watched.due_in is not None and watched.due_in > 0:
                wait = min(wait, watched.due_in + random.uniform(0, _JITTER))
            else:
                # Its next slot, or whether another worker was quicker, is known at the next look.
                wait = min(wait, await self._fire(connection, watched))
        return wait

    async def _fire(self, connection: asyncpg.Connection, watched: Watched) -> float:
        """Fire one schedule. Returns the seconds until the next look at it."""
        try:
            now_due = due(watched.timing, watched.missed, watched.owed_after, watched.looked_at)
            if not await self._publish(connection, watched, now_due):
                return _AGAIN
        except ConfigurationError as error:
            remedy = "a later version of the code has declared it, for workers that understand it: start one"
            self._report("schedule_unreadable", watched.name, str(error), remedy)
            return _LONGEST_SLEEP
        except (*PASSING_FAULTS, *CONNECTION_FAULTS):
            raise
        except asyncpg.PostgresError as error:
            # A schedule that cannot be fired must not hold up the others.
            remedy = "the database refuses its event; it is tried again: take away what refuses, such as a trigger"
            self._report("schedule_refused", watched.name, _brief(error), remedy)
            return _LONGEST_SLEEP
        self._counters.fired += len(now_due.fire)
        if self._wants_fired and now_due.fire:
            self._observe(Fired(watched.name, tuple(now_due.fire)))
        if now_due.left_out:
            details: dict[str, object] = {
                "schedule": watched.name,
                "missed": watched.missed,
                "since": watched.owed_after.isoformat(),
                "fired": [slot.isoformat() for slot in now_due.fire[:1]],
            }
            self._observe(Notice("warning", "slots_missed", details))
        return max((now_due.next - watched.looked_at).total_seconds(), 0.0)

    async def _publish(self, connection: asyncpg.Connection, watched: Watched, now_due: Due) -> bool:
        if self._tracing is None or not now_due.fire:
            return await self._schedules.fire(connection, watched, now_due)
        with self._tracing.fire(watched.name, len(now_due.fire)) as span:
            fired = await self._schedules.fire(connection, watched, now_due, span.trace_context)
            if not fired:  # another worker was quicker, which is known only now
                span.drop()
            return fired

    def _report(self, name: str, schedule: str, error: str, remedy: str) -> None:
        if self._reports.due(name, schedule):
            self._observe(Notice("error", name, {"schedule": schedule, "error": error, "remedy": remedy}))


def _brief(error: BaseException) -> str:
    return redact_secrets(f"{type(error).__name__}: {error}")[:500]
