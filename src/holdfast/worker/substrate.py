"""A broker as a part of a worker, which relays events to it, and takes messages for its own handlers from it.

sink ◀──relay (a handler among the others, see relay.py)      sources ──takers (taking.py)──▶ dispatcher

When the worker first reaches the broker, it moves those handlers to it that no operator has moved or kept back yet. It
makes their consumers first, so that no event is sent past them. From then on only operators move handlers, and the
worker follows what the database says.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from holdfast.brokers.engine import BrokerUnavailable, Engine, Interest
from holdfast.brokers.engines import engine_of
from holdfast.errors import ConfigurationError
from holdfast.failure import describe
from holdfast.handlers import Handler
from holdfast.measurements import BrokerAnswer
from holdfast.observing import ObserverGroup
from holdfast.postgres.brokers import BrokerStatements
from holdfast.postgres.connection import ReservedConnection
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.postgres.messages import Message, MessageDeliveries
from holdfast.postgres.statements import NamedStatements
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Notice
from holdfast.worker.broker_outage import unavailable_notice
from holdfast.worker.broker_reports import BrokerReports
from holdfast.worker.connections import Connections
from holdfast.worker.dispatcher import Dispatcher
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.in_flight import InFlight
from holdfast.worker.reading import MessageReader
from holdfast.worker.relay import Relay, relay_name
from holdfast.worker.relay_secrets import RelaySecrets
from holdfast.worker.reports import Reports
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared
from holdfast.worker.shared_connection import SharedConnection
from holdfast.worker.taking import Intake, Taker

# Seconds between two questions to the database: which handlers get their events from the broker?
_ASK_INTERVAL = 2.0
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 10.0
_CLOSE_PATIENCE = 3.0


class MessagesInFlight(InFlight):
    """The deliveries in flight of a worker with a broker: messages learn when they are in flight no longer."""

    def drop(self, *dropped: Delivery) -> None:
        super().drop(*dropped)
        for each in dropped:
            if isinstance(each, Message):
                each.end()


class MessageReports(Reports):
    """The reports of a worker with a broker: lost messages go back to the broker."""

    def lost(self, deliveries: Sequence[Delivery]) -> None:
        for each in deliveries:
            if isinstance(each, Message):
                each.returned = True
        super().lost(deliveries)


class _Running(NamedTuple):
    taker: Taker
    task: asyncio.Task[None]


class Substrate:
    """One broker of one worker. `run` relays and takes, as the database says, until `stop`."""

    def __init__(
        self,
        address: str,
        handlers: Iterable[Handler],
        settings: WorkerSettings,
        connections: Connections,
        statements: NamedStatements,
        observe: ObserverGroup,
    ) -> None:
        self.engine: Engine = engine_of(address)
        self._address = address
        self._handlers = {handler.name: handler for handler in handlers if handler.via == "outbox"}
        if any(name.startswith("relay.") for name in self._handlers):
            raise ConfigurationError("registry", "has a handler of the domain context relay", "give it another name")
        self._settings = settings
        self._observe = observe
        for handler in self._handlers.values():
            for channel in settings.served_channels:
                # Refuses a handler for which the address has no names.
                self.engine.names(self._interest(handler.name, channel, "", handler.event_types, datetime.now(UTC)))
        limit = settings.lease / 3
        self._database = SharedConnection(ReservedConnection(connections.address, "broker", statement_timeout=limit))
        self._statements = BrokerStatements(statements)
        self._secrets = RelaySecrets(self._statements, self._database, settings.relay_secrets)
        self.relay = Relay(self.engine, self._statements, self._database, self._secrets, observe, lease=settings.lease)
        self._running: dict[Interest, _Running] = {}
        self._reports = BrokerReports(
            self.engine,
            self._statements,
            self._database,
            settings.served_channels,
            self._taking,
            observe,
        )
        self._stopped = asyncio.Event()
        self._hourly = HourlyLimit()
        self.adopted = asyncio.Event()  # set when undecided handlers have moved to the broker

    @property
    def relays(self) -> frozenset[str]:
        """The names of the relays in this worker."""
        return frozenset((relay_name(self.engine.name),))

    def serve(self, shared: Shared, deliveries: MessageDeliveries, dispatcher: Dispatcher, settler: Settler) -> None:
        """Use these parts of the worker, which are made after the substrate."""
        self._shared = shared
        self._intake = Intake(dispatcher, deliveries, settler)
        self._outage = shared.outages.of("broker")

    @property
    def taken(self) -> int:
        """How many messages this worker has taken and not settled."""
        return sum(each.taker.taken for each in self._running.values())

    def answers(self) -> tuple[BrokerAnswer, ...]:
        """Return the broker's last answers about this worker's handlers."""
        return self._reports.answers()

    def _taking(self) -> dict[Interest, bool]:
        """Return the interests that are taken now, and whether the broker answers each. Any thread may call it."""
        return {interest: running.taker.answered for interest, running in tuple(self._running.items())}

    # --- life -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the handlers that get events from the broker, and follow what the database says about that."""
        reporting = asyncio.create_task(self._reports.run())
        try:
            await self._serve()
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)

    async def _serve(self) -> None:
        backoff = _FIRST_BACKOFF
        while not self._stopped.is_set():
            wait = _ASK_INTERVAL
            try:
                await self._secrets.renew()
                if not self.adopted.is_set():
                    await self._adopt()
                    self.adopted.set()
                await self._follow()
                backoff = _FIRST_BACKOFF
            except BrokerUnavailable as fault:
                self._report(fault)
                wait, backoff = backoff, min(2 * backoff, _LONGEST_BACKOFF)
            except (*PASSING_FAULTS, *CONNECTION_FAULTS) as fault:
                self._database.drop()
                wait = self._outage.begin(fault)
            else:
                self._outage.over()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stopped.wait()

    async def stop(self) -> None:
        """Take no more messages."""
        self._stopped.set()
        for each in self._running.values():
            each.taker.stop()
        if self._running:
            await asyncio.wait([each.task for each in self._running.values()], timeout=_CLOSE_PATIENCE)

    async def close(self) -> None:
        """Tell the broker what became of the last messages, and leave it."""
        running, self._running = tuple(self._running.values()), {}
        for each in running:
            each.task.cancel()
        closing = [each.taker.close() for each in running]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_PATIENCE):
                await asyncio.gather(*closing, self.relay.close(), self._database.close(), return_exceptions=True)

    # --- what the database says --------------------------------------------------------------------------

    async def _adopt(self) -> None:
        """Make the consumers of handlers that no operator has moved yet, and move these handlers to the broker."""
        await self.relay.open()
        async with self._database.lent() as connection:
            undecided = await self._statements.undecided(connection, self._handlers)
        now = datetime.now(UTC)
        for handler_name, context, event_types in undecided:
            for channel in self._settings.served_channels:
                await self._make_consumer(self._interest(handler_name, channel, context, event_types, now))
        if undecided:
            names = [each.handler_name for each in undecided]
            async with self._database.lent() as connection:
                await self._statements.adopt(connection, names, self.engine.name, self._settings.shown_name)
            details: dict[str, object] = {"handlers": names, "broker": self.engine.name}
            self._observe(Notice("info", "handlers_moved", details))

    async def _make_consumer(self, interest: Interest) -> None:
        source = self.engine.source(interest, lease=self._settings.lease)
        try:
            await source.open()
        finally:
            await source.close()

    async def _follow(self) -> None:
        """Start and stop takers, so that each handler the database names has one for each channel."""
        async with self._database.lent() as connection:
            owed = await self._statements.owed(connection, self.engine.name, self._handlers)
        wanted = {
            self._interest(each.handler_name, channel, each.domain_context, each.event_types, each.since)
            for each in owed
            for channel in self._settings.served_channels
        }
        for interest in self._running.keys() - wanted:
            await self._end(self._running.pop(interest))
        for interest in wanted:
            running = self._running.get(interest)
            if running is not None and running.task.done():
                self._report_ended(running)
                await running.taker.close()
                running = None
            if running is None:
                self._running[interest] = await self._begin(interest)

    async def _begin(self, interest: Interest) -> _Running:
        source = self.engine.source(interest, lease=self._settings.lease)
        handler = self._handlers[interest.handler_name]
        reader = MessageReader(self.engine.name, handler, interest, self._secrets.signatures, self._observe)
        taker = Taker(self._shared, self._database, self._secrets, self._intake, source, reader)
        return _Running(taker, asyncio.create_task(taker.run()))

    async def _end(self, running: _Running) -> None:
        """End a taker whose handler left the broker, after waiting a short while for its loop to end."""
        running.taker.stop()
        await asyncio.wait((running.task,), timeout=_CLOSE_PATIENCE)
        running.task.cancel()
        await running.taker.close()

    def _interest(
        self, handler_name: str, channel: str, context: str, event_types: Sequence[str], since: datetime
    ) -> Interest:
        return Interest(
            handler_name=handler_name,
            channel=channel,
            domain_context=context,
            event_types=tuple(event_types),
            since=since,
            # Several consumers keep the order only if one event at a time is handled in the fleet.
            ordered=self._handlers[handler_name].fleet_concurrency == 1,
        )

    def _report(self, fault: BrokerUnavailable) -> None:
        if self._hourly.due("broker_unavailable"):
            action = "trying again; events wait in the outbox"
            self._observe(unavailable_notice(self.engine.name, self._address, fault, action=action))

    def _report_ended(self, running: _Running) -> None:
        error = None if running.task.cancelled() else running.task.exception()
        if error is not None:
            details: dict[str, object] = {"loop": "take", "error": describe(error).text}
            self._observe(Notice("error", "loop_failed", details))
