"""What a worker does now and then: say that it lives, report events that nobody will take, sweep."""

import asyncio
import os
import socket
from importlib.metadata import version
from uuid import UUID

import asyncpg

from holdfast.postgres.connection import ReservedConnection
from holdfast.postgres.deliveries import Deliveries, Subscriptions
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.postgres.fleet import Fleet, Registration
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Notice, Observer
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.lanes import subscribers
from holdfast.worker.sweeper import Sweeper

_INTERVAL = 10.0


class Maintenance:
    """Never urgent: a connection of its own, so that it is in nobody's way."""

    def __init__(
        self,
        connection: ReservedConnection,
        deliveries: Deliveries,
        fleet: Fleet,
        observe: Observer,
        settings: WorkerSettings,
        worker: UUID,
        handlers: list[str],
        sweeper: Sweeper | None = None,
    ) -> None:
        self._connection = connection
        self._deliveries = deliveries
        self._fleet = fleet
        self._observe = observe
        self._settings = settings
        self._sweeper = sweeper
        self._reports = HourlyLimit()
        self._unserved: set[tuple[str, int]] = set()  # as the last look found them
        self._known = False  # to the others
        host = socket.gethostname()
        self._registration = Registration(
            id=worker,
            name=settings.name or f"{host}:{os.getpid()}",
            host=host,
            pid=os.getpid(),
            version=version("holdfast"),
            generation=settings.generation,
            channels=list(settings.served_channels),
            handlers=handlers,
        )

    async def introduce(self) -> None:
        """Say that the worker lives before it does anything: its generation has to be known for that."""
        try:
            await self._beat(await self._connection.use())
        except CONNECTION_FAULTS:
            self._connection.drop()
            raise

    async def run(self) -> None:
        while True:
            try:
                connection = await self._connection.use()
                await self.run_once(connection)
                await self._sweep(connection)
            except (*PASSING_FAULTS, *CONNECTION_FAULTS):
                pass  # the loops that matter report outages
            await asyncio.sleep(_INTERVAL)

    async def run_once(self, connection: asyncpg.Connection) -> None:
        await self._beat(connection)
        subscriptions = await self._deliveries.subscriptions(connection)
        for channel in self._settings.served_channels:
            for route in await self._deliveries.lanes(connection, channel):
                if "/" in route and not subscribers(subscriptions, route):
                    self._report_unrouted(channel, route, subscriptions)
        unserved = set(await self._fleet.unserved(connection))
        # Twice in a row: when a fleet starts, the others have not introduced themselves yet.
        for channel, generation in sorted(unserved & self._unserved):
            self._report_unserved(channel, generation)
        self._unserved = unserved

    async def _beat(self, connection: asyncpg.Connection) -> None:
        self._known = True  # also when the answer is lost
        await self._fleet.beat(connection, self._registration)

    async def _sweep(self, connection: asyncpg.Connection) -> None:
        if self._sweeper is None:
            return
        try:
            await self._sweeper.run_once(connection)
        except (*PASSING_FAULTS, *CONNECTION_FAULTS):
            raise
        except asyncpg.PostgresError as error:
            # Rows that are kept too long are no reason to stop saying that the worker lives.
            if self._reports.due("sweep_failed", str(error.sqlstate)):
                details: dict[str, object] = {
                    "error": f"{type(error).__name__}: {error}"[:500],
                    "remedy": "holdfast retention sweep shows it; compare the schema with holdfast migrate plan",
                }
                self._observe(Notice("error", "sweep_failed", details))

    def _report_unrouted(self, channel: str, route: str, subscriptions: Subscriptions) -> None:
        if not self._reports.due("unrouted", channel, route):
            return
        target, _, event_type = route.partition("/")
        details: dict[str, object] = {
            "event_type": event_type,
            "target": None if target == "*" else target,
            "channel": channel,
            "known_handlers": len({name for _, name, _ in subscriptions.entries}),
            "remedy": "start a worker with a handler for this type; the events wait and burn no attempts",
        }
        self._observe(Notice("warning", "events_unrouted", details))

    def _report_unserved(self, channel: str, generation: int) -> None:
        if not self._reports.due("unserved", channel, str(generation)):
            return
        details: dict[str, object] = {
            "channel": channel,
            "generation": generation,
            "remedy": f"start a worker with channels=({channel!r},) and generation={generation}; "
            "the events wait and burn no attempts",
        }
        self._observe(Notice("warning", "channel_unserved", details))

    async def say_goodbye(self) -> None:
        if not self._known or not self._connection.reachable:
            return  # its heartbeat stops anyway
        self._connection.drop(fault=False)  # the loop may have been ended in the middle of a statement
        try:
            await self._fleet.gone(await self._connection.use(), self._registration.id)
        except (*PASSING_FAULTS, *CONNECTION_FAULTS):
            pass
