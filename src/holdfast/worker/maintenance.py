"""What a worker does every few seconds: report itself alive, warn of locks it waits for and of events left over, sweep.

At once when the database's clock was set: report it, and repair the times that it left in the future.
"""

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import Iterable, Sequence
from shlex import quote
from typing import Protocol
from uuid import UUID

import asyncpg

from holdfast.handlers import Handler
from holdfast.installing import package_version
from holdfast.names import meant_type
from holdfast.postgres.connection import ReservedConnection
from holdfast.postgres.deliveries import Deliveries
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.postgres.fleet import Fleet, Registration
from holdfast.postgres.subscriptions import Subscriptions, SubscriptionStatements
from holdfast.redact import redact_secrets
from holdfast.settings import WorkerSettings, channel_of
from holdfast.telemetry import Counters, Notice, Observer
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.in_flight import InFlight
from holdfast.worker.outage import Outage
from holdfast.worker.routing import SubscriptionIndex

_INTERVAL = 10.0
# A worker that starts looks this often whether its backlog is done, and so many times at most, before its first turn.
_FIRST_LOOK = 0.05
_FIRST_LOOKS = 20
# Idle workers take turns: the fleet is looked after as often as by one worker, and each looks at least this often.
_LONGEST_INTERVAL = 120.0
_LONG_WAIT = 1.0  # for a lock: no claim or settle waits so long for another one
_BLOCKED_AGAIN = 60.0
_GOODBYE = 1.4  # for a database that could not be reached when last tried


def registration(worker: UUID, handlers: Iterable[Handler], settings: WorkerSettings) -> Registration:
    """How the worker introduces itself to the others."""
    return Registration(
        id=worker,
        name=settings.shown_name,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=package_version(),
        generation=settings.generation,
        channels=list(settings.served_channels),
        handlers=sorted(handler.name for handler in handlers),
    )


class Chore(Protocol):
    """What maintenance does beside its own duties, a little at a time."""

    at_the_end: bool  # once more when the worker stops

    async def run_once(self, connection: asyncpg.Connection) -> None: ...

    def failure(self, error: str) -> Notice: ...


class Activity:
    """Whether a worker has had nothing to do."""

    def __init__(self, in_flight: InFlight, counters: Counters) -> None:
        self._in_flight = in_flight
        self._counters = counters
        self._claimed = 0

    def idle(self) -> bool:
        """Whether nothing is in flight, and nothing was claimed since this was last asked."""
        claimed, self._claimed = self._claimed, self._counters.claimed
        return claimed == self._claimed and not len(self._in_flight)


class Maintenance:
    """Never urgent: it has a connection of its own, so that no other loop waits for it; none while the worker idles."""

    def __init__(
        self,
        connection: ReservedConnection,
        deliveries: Deliveries,
        subscriptions: SubscriptionStatements,
        fleet: Fleet,
        registration: Registration,
        observe: Observer,
        activity: Activity,
        outage: Outage,
        chores: Sequence[Chore] = (),
    ) -> None:
        self._connection = connection
        self._deliveries = deliveries
        self._subscriptions = subscriptions
        self._fleet = fleet
        self._registration = registration
        self._observe = observe
        self._activity = activity
        self._outage = outage
        self._chores = chores
        self._reports = HourlyLimit()
        self._unserved: set[tuple[str, int]] = set()  # channels and generations, when last looked for
        self._blockers: set[int] = set()  # pids that sessions of this worker waited for, when last looked for
        self._blocked_at = -_BLOCKED_AGAIN  # when it was last reported
        self._introduced = False
        self.schema_mismatch: str | None = None  # why the schema no longer fits this code
        self._clock_stepped = asyncio.Event()

    async def introduce(self) -> None:
        """Record the worker before it declares schedules: its generation has to be known by then."""
        try:
            await self._beat(await self._connection.use())
        except CONNECTION_FAULTS:
            self._connection.drop()
            raise

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        # The lease keeper looks at the clock more often, in a thread of its own.
        self._deliveries.clock.when_set(lambda: loop.call_soon_threadsafe(self._clock_stepped.set))
        starting = True
        while True:
            try:
                connection = await self._connection.use()
                if starting:
                    await self._beat(connection)  # on the list of workers before the backlog is through
                    await self._wait_for_backlog()
                    starting = False
                await self._report_blocked(connection)
                await self.run_once(connection)
                await self._repair_clock(connection)
                for chore in self._chores:
                    await self._do(chore, connection)
                workers = await self._fleet.claimers(connection)
                self._outage.over()
                await self._rest(workers)
            except (*PASSING_FAULTS, *CONNECTION_FAULTS):
                await self._pause()  # the loops that matter report outages
            except asyncpg.InsufficientPrivilegeError as lost:
                self._outage.begin(lost)
                await self._pause()

    async def _wait_for_backlog(self) -> None:
        """Let the events that have waited for a worker go first, for a second at most."""
        for _ in range(_FIRST_LOOKS):
            await asyncio.sleep(_FIRST_LOOK)
            if self._activity.idle():
                return

    async def _rest(self, workers: int) -> None:
        """Wait for the next turn. While the worker idles, that of one among several, without a connection."""
        idle = self._activity.idle()
        if idle:
            await self._connection.close()
        # Drawn anew each time: workers that were started together must not look together.
        longest = min(_INTERVAL * workers * random.uniform(0.5, 1.5), _LONGEST_INTERVAL)
        until = time.monotonic() + (longest if idle else 0.0)
        stepped = await self._pause()
        while not stepped and time.monotonic() < until and self._activity.idle():
            stepped = await self._pause()

    async def _pause(self) -> bool:
        """Wait a while; true when the database's clock was set meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_INTERVAL):
                await self._clock_stepped.wait()
                self._clock_stepped.clear()
                return True
        return False

    async def _report_blocked(self, connection: asyncpg.Connection) -> None:
        """Report, at most once a minute, that sessions of this worker wait for a lock, and for whom.

        Seen twice for the same session: a statement that waited too long was cancelled and sent again, so none of them
        waits for long.
        """
        now = time.monotonic()
        waits = await self._fleet.lock_waits(connection, self._registration.id)
        seen, self._blockers = self._blockers, {wait.blocker_pid for wait in waits}
        lasting = [wait for wait in waits if wait.waited >= _LONG_WAIT or wait.blocker_pid in seen]
        if not lasting or now - self._blocked_at < _BLOCKED_AGAIN:
            return
        self._blocked_at, longest = now, lasting[0]
        since = longest.blocker_seconds
        details: dict[str, object] = {
            "session": longest.application,
            "waited_s": round(longest.waited, 1),
            "blocker_pid": longest.blocker_pid,
            "blocker_login": longest.blocker_login,
            "blocker_application": longest.blocker_application,
            "blocker_state": longest.blocker_state,
            "blocker_transaction_s": None if since is None else round(since, 1),
            "remedy": f"as an administrator: {longest.remedy}",
        }
        self._observe(Notice("error", "delivery_blocked", details))

    async def _repair_clock(self, connection: asyncpg.Connection) -> None:
        steps = self._deliveries.clock.steps
        if not steps and (unrecorded := await self._deliveries.unrecorded_step(connection)) is not None:
            steps.append(unrecorded)
        while steps:
            repaired = await self._deliveries.repair_clock(connection, steps[0])
            details: dict[str, object] = {
                "step_s": round(steps.popleft(), 1),
                "repaired": repaired,
                "remedy": "let the database follow a time server that slews; holdfast doctor shows what is left",
            }
            self._observe(Notice("warning", "clock_stepped", details))

    async def run_once(self, connection: asyncpg.Connection) -> None:
        await self._beat(connection)
        routes = [
            (channel, route)
            for channel in self._registration.channels
            for route in await self._deliveries.routes(connection, channel)
        ]
        # After the routes: whoever subscribes and then publishes in between is no reason for a warning.
        subscriptions = await self._subscriptions.read(connection)
        index = SubscriptionIndex(subscriptions)
        for channel, route in routes:
            if "/" in route and not index.subscribers(route):
                self._report_unrouted(channel, route, subscriptions)
        await self._look_at_schema(connection)
        unserved = set(await self._fleet.unserved(connection))
        # Found twice in a row: when a fleet starts, the other workers have not introduced themselves yet.
        for channel, generation in sorted(unserved & self._unserved):
            self._report_unserved(channel, generation)
        self._unserved = unserved

    async def _look_at_schema(self, connection: asyncpg.Connection) -> None:
        """Report a schema that was migrated past this code: a worker that starts would refuse it."""
        mismatch = await self._fleet.schema_mismatch(connection)
        self.schema_mismatch = None if mismatch is None else str(mismatch)
        if mismatch is not None and self._reports.due("schema_mismatch"):
            details: dict[str, object] = {"error": str(mismatch), "remedy": mismatch.remedy}
            self._observe(Notice("error", "schema_mismatch", details))

    async def _beat(self, connection: asyncpg.Connection) -> None:
        self._introduced = True  # also when the answer is lost
        await self._fleet.beat(connection, self._registration)
        await self._deliveries.alive(connection)

    async def _do(self, chore: Chore, connection: asyncpg.Connection) -> None:
        try:
            await chore.run_once(connection)
        except (*PASSING_FAULTS, *CONNECTION_FAULTS):
            raise
        except asyncpg.PostgresError as error:
            # Rows that are kept too long, or not counted, are no reason for the worker to pass for dead.
            notice = chore.failure(redact_secrets(f"{type(error).__name__}: {error}")[:500])
            if self._reports.due(notice.name, str(error.sqlstate)):
                self._observe(notice)

    def _report_unrouted(self, channel: str, route: str, subscriptions: Subscriptions) -> None:
        if not self._reports.due("unrouted", channel, route):
            return
        target, _, event_type = route.partition("/")
        meant = meant_type(event_type, (each for *_, each in subscriptions.entries))
        details: dict[str, object] = {
            "event_type": event_type,
            "target": None if target == "*" else target,
            "channel": channel,
            "known_handlers": len({name for _, name, _ in subscriptions.entries}),
            "remedy": (f"did you mean {meant}? If not, " if meant else "")
            + "start a worker with a handler for this type; the events wait and burn no attempts",
        }
        self._observe(Notice("warning", "events_unrouted", details))

    def _report_unserved(self, channel: str, generation: int) -> None:
        if not self._reports.due("unserved", channel, str(generation)):
            return
        details: dict[str, object] = {
            "channel": channel,
            "generation": generation,
            "remedy": f"{self._serving(channel, generation)}; the events wait and burn no attempts",
        }
        self._observe(Notice("warning", "channel_unserved", details))

    def _serving(self, channel: str, generation: int) -> str:
        """Return what leads to workers for a channel, or its events to the workers of this generation."""
        own = self._registration.generation
        named = "" if channel == channel_of(generation) else f" --channel {quote(channel)}"
        start = f"start a worker with --generation {generation}{named}"
        if generation == own:
            return start
        moving = f"holdfast generations move {generation} --to {own}"
        if generation > own:  # a deployment that has begun and is not there yet, or was given up
            retiring = f"holdfast generations retire {generation} --force"
            return f"{start}; if that deployment was given up: {retiring}, then {moving}"
        return f"correct HOLDFAST_GENERATION where they are published, and {moving}; or {start}"

    async def say_goodbye(self) -> None:
        """Take the worker off the list, if the database can be reached; else it is found silent a minute later."""
        if not self._introduced:
            return
        patience = None if self._connection.reachable else _GOODBYE
        self._connection.drop(fault=False)  # the loop may have been ended in the middle of a statement
        try:
            async with asyncio.timeout(patience):
                connection = await self._connection.use()
            await self._fleet.gone(connection, self._registration.id)
            for chore in self._chores:
                if chore.at_the_end:
                    await self._do(chore, connection)
        except (*PASSING_FAULTS, *CONNECTION_FAULTS):
            pass
