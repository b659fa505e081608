"""The life of a worker: in which order its parts start, and in which order they stop."""

import asyncio
import contextlib
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from uuid import UUID

import asyncpg

from holdfast.failure import describe
from holdfast.handlers import HandlerRegistry
from holdfast.observability.health import State
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.postgres.subscriptions import Subscriptions
from holdfast.postgres.transport import unverified_notice
from holdfast.telemetry import Notice
from holdfast.worker.outage import START
from holdfast.worker.parts import Parts
from holdfast.worker.readiness import require_ready
from holdfast.worker.routing import outdated

# A database that does not answer must not keep a worker from stopping. Together these are less than five seconds.
_CLAIM_PATIENCE = 2.0
_GOODBYE = 2.5  # beyond the grace
_END_PATIENCE = 0.5
_CLOSE_PATIENCE = 1.0
# How long an application that a worker is a part of waits at its start for the database of the worker.
_START_PATIENCE = 3.0


class Lifecycle:
    """Runs the parts of one worker, once. `started` is set when all loops run; setting `stop` ends them.

    `entered` is set with `started`, or earlier if the database cannot be reached: what the worker is a part of need not
    wait for it.
    """

    def __init__(self, parts: Parts, worker: UUID, registry: HandlerRegistry) -> None:
        self._parts = parts
        self._worker = worker
        self._registry = registry
        self._settings = parts.shared.settings
        self._observe = parts.shared.observe
        self.started = asyncio.Event()
        self.entered = asyncio.Event()
        self.stop = asyncio.Event()
        self.ended = False

    @property
    def state(self) -> State:
        """How far it is, once it runs. Safe in another thread."""
        if self.ended:
            return "stopped"
        return "draining" if self.stop.is_set() else "running" if self.started.is_set() else "starting"

    async def run(self) -> None:
        """Work, and note meanwhile that the event loop turns."""
        pulse = asyncio.create_task(self._parts.shared.pulse.run())
        try:
            await self._run_with_lifespans()
        finally:
            pulse.cancel()
            self.ended = True

    async def _run_with_lifespans(self) -> None:
        """Enter the lifespans, work, and leave them when the last handler has ended."""
        lifespans = self._parts.lifespans
        if not await lifespans.start(self.stop):
            return
        try:
            await self._run()
        finally:
            await lifespans.stop()

    async def _run(self) -> None:
        """Prepare the database, start the loops, wait for `stop`, and stop them within the grace."""
        prepared = False
        try:
            prepared = await self._prepare()
        except Exception as error:
            if self.entered.is_set():  # the application runs: it learns of the error only when it ends
                self._observe(Notice("error", "worker_refused", {"error": describe(error).text}))
            raise
        finally:
            if not prepared:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GOODBYE):
                        await self._parts.maintenance.say_goodbye()
                await self._close()
        if not prepared:
            return
        parts = self._parts
        parts.lease_keeper.start()
        meter = None if parts.shared.tracing is None else parts.shared.tracing.meter
        unwatch = None if meter is None else meter.watch(parts.shared.tally.snapshot)
        settling = asyncio.create_task(self._keep("settle", parts.settler.run))
        dispatching = asyncio.create_task(self._keep("dispatch", parts.dispatcher.run))
        claiming = asyncio.create_task(self._keep("claim", parts.claimer.run))
        others = [asyncio.create_task(self._keep("maintain", parts.maintenance.run))]
        others.append(asyncio.create_task(self._keep("summarise", parts.shared.tally.run)))
        if parts.scheduler is not None:
            others.append(asyncio.create_task(self._keep("schedule", parts.scheduler.run)))
        if parts.listener is not None:
            others.append(asyncio.create_task(self._keep("listen", parts.listener.run)))
        if parts.substrate is not None:
            others.append(asyncio.create_task(self._keep("substrate", parts.substrate.run)))
        self.started.set()
        self.entered.set()
        self._observe(Notice("info", "worker_started", self._introduction()))
        tracing = parts.shared.tracing
        if tracing is not None and (cause := tracing.inactive()) is not None:
            remedy = "start the process with opentelemetry-instrument, or set a tracer provider before the worker"
            self._observe(Notice("warning", "tracing_inactive", {"cause": cause, "remedy": remedy}))
        connections = parts.connections
        if (notice := unverified_notice(connections.address.dsn, connections.listen_address.dsn)) is not None:
            self._observe(notice)
        try:
            await self._until_stop()
        finally:
            grace_ends = asyncio.get_running_loop().time() + self._settings.grace
            self._report_stopping()
            await self._stop_claiming(claiming)
            if parts.substrate is not None:
                await parts.substrate.stop()
            await _end(claiming, *others)
            # Nothing pings these sessions any longer: in a long drain the server would end them as idle.
            unhearing = asyncio.ensure_future(self._close_wakeups())
            try:
                async with asyncio.timeout_at(grace_ends + _GOODBYE):
                    await parts.dispatcher.stop(max(0.0, grace_ends - asyncio.get_running_loop().time()))
                    await parts.maintenance.say_goodbye()
            except TimeoutError:
                details: dict[str, object] = {
                    "in_flight": len(parts.shared.in_flight),
                    "remedy": "the database does not answer; the events are claimed again when their leases expire",
                }
                self._observe(Notice("error", "stop_incomplete", details))
            finally:
                await _end(dispatching, settling, unhearing)
                if parts.substrate is not None:
                    await parts.substrate.close()
                await self._close()
                if unwatch is not None:
                    unwatch()
            parts.shared.reports.lost(parts.shared.in_flight.snapshot())
            parts.shared.tally.report()
            self._observe(Notice("info", "worker_stopped", {"worker_id": str(self._worker)}))

    async def _until_stop(self) -> None:
        """Wait for `stop`, or for a lifespan that ends although handlers need it."""
        ended = asyncio.create_task(self._parts.lifespans.ended())
        try:
            await self._stopped_or(ended)
        finally:
            ended.cancel()

    async def _stopped_or(self, task: asyncio.Task[None]) -> None:
        """Wait for `stop`, or for the end of a task."""
        stopped = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait((stopped, task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

    async def _stop_claiming(self, claiming: asyncio.Task[None]) -> None:
        connection = self._parts.connections.claim
        self._parts.claimer.stop()
        await asyncio.wait((claiming,), timeout=_CLAIM_PATIENCE if connection.reachable else _END_PATIENCE)
        if not claiming.done():
            connection.drop()

    async def _prepare(self) -> bool:
        """Wait for the database, refuse one that does not fit, record subscriptions. False when stopped meanwhile."""
        outage = self._parts.shared.outages.of(START)
        while not self.stop.is_set():
            attempt = asyncio.create_task(self.introduce())
            try:
                # A server that does not answer must not keep the worker from stopping.
                await self._stopped_or(attempt)
                await _end(attempt, patience=_CLAIM_PATIENCE)
                if attempt.cancelled() or not attempt.done():
                    break
                attempt.result()
                outage.over()
                return True
            except (*PASSING_FAULTS, *CONNECTION_FAULTS) as fault:
                self._parts.connections.claim.drop()
                wait = outage.begin(fault)
                self.entered.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self.stop.wait()
            finally:
                await _end(attempt)
        return False

    async def introduce(self) -> None:
        """Refuse a database that does not fit, and record subscriptions and schedules."""
        connections = self._parts.connections
        patience = asyncio.get_running_loop().call_later(_START_PATIENCE, self.entered.set)
        try:
            if not connections.address.reached:
                await connections.address.probe()
            connection = await connections.claim.use()
        finally:
            patience.cancel()
        self._parts.shared.deliveries.follow(await require_ready(connection, self._settings))
        # Meanwhile: the first settle would otherwise wait for a connection, and the handlers for the first settle.
        opening = asyncio.create_task(self._parts.settler.open())
        try:
            await self._declare(connection)
            await opening
        finally:
            await _end(opening)

    async def _declare(self, connection: asyncpg.Connection) -> None:
        """Record subscriptions and schedules, on the connection that claims."""
        connections, shared = self._parts.connections, self._parts.shared
        await connections.sources.start(connection)
        await self._parts.heartbeat.send(connection)  # and look at the database's clock, by which deliveries are due
        # Handlers that run in process are owed nothing; their lanes are served, for replays.
        owed = [handler for handler in self._registry if handler.via == "outbox"]
        relays = [] if self._parts.substrate is None else [self._parts.substrate.relay.handler]
        relaying = [replace(each, event_types=self._settings.relayed) for each in relays if self._settings.relayed]
        await shared.subscriptions.subscribe(connection, owed + relaying)
        await shared.flow.declare(connection, owed + relays)
        self._report_outdated(await shared.subscriptions.read(connection))
        await self._report_starved(connection, [handler.name for handler in owed])
        if self._parts.scheduler is not None:
            await self._parts.maintenance.introduce()
            await self._parts.scheduler.declare()

    def _report_outdated(self, subscriptions: Subscriptions) -> None:
        for handler_name, event_type in outdated(subscriptions, self._registry):
            details: dict[str, object] = {
                "handler_name": handler_name,
                "event_type": event_type,
                "remedy": "if it is no longer wanted: "
                f"holdfast handlers retire {handler_name} --event-type {shlex.quote(event_type)}",
            }
            self._observe(Notice("warning", "subscription_outdated", details))

    def _report_stopping(self) -> None:
        """Say what the end waits for."""
        running = self._parts.dispatcher.running()
        details: dict[str, object] = {
            "worker": self._settings.shown_name,
            "grace_s": self._settings.grace,
            "running": len(running),
            "handlers": sorted({delivery.handler.name for delivery in running}),
        }
        if running:
            details["remedy"] = "they have the grace to end; a second Ctrl-C or SIGTERM ends holdfast worker at once"
        self._observe(Notice("info", "worker_stopping", details))

    async def _report_starved(self, connection: asyncpg.Connection, handlers: Sequence[str]) -> None:
        """Say which handlers get their events from a broker whose address this worker was not given."""
        from holdfast.brokers.engines import NAMES  # a program that imports a worker needs no broker

        substrate = self._parts.substrate
        others = [each for each in NAMES if substrate is None or each != substrate.engine.name]
        carried = await self._parts.brokers.carried(connection, others, handlers)
        for handler_name, broker in carried.items():
            details: dict[str, object] = {
                "handler_name": handler_name,
                "broker": broker,
                "cause": f"{handler_name} is carried by {broker}, and this worker does not take from there",
                "remedy": f"start it with --substrate, or: holdfast handlers via outbox {handler_name}",
            }
            self._observe(Notice("warning", "handler_starved", details))

    async def _keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Run a loop, and start it again after a defect ends it: the others must not die with it."""
        while True:
            try:
                await loop()
                return
            except Exception as error:
                details: dict[str, object] = {"loop": name, "error": describe(error).text}
                self._observe(Notice("error", "loop_failed", details))
                await asyncio.sleep(1.0)

    async def _close_wakeups(self) -> None:
        await asyncio.gather(self._parts.sleeper.close(), self._parts.connections.listen.close())

    async def _close(self) -> None:
        closing = self._parts.lease_keeper.stop(), self._parts.sleeper.close(), self._parts.connections.close()
        await _end(*map(asyncio.ensure_future, closing), patience=_CLOSE_PATIENCE)

    def _introduction(self) -> dict[str, object]:
        transactional = sum(handler.transactional for handler in self._registry)
        return {
            "worker_id": str(self._worker),
            "worker": self._settings.shown_name,
            "generation": self._settings.generation,
            "channels": list(self._settings.served_channels),
            "handlers": sorted(handler.name for handler in self._registry),
            "schedules": sorted(schedule.name for schedule in self._registry.schedules),
            "connections_at_most": self._settings.connections_needed(transactional, bool(self._registry.schedules)),
        }


async def _end(*tasks: asyncio.Future[None], patience: float = 0.0) -> None:
    """Cancel the tasks that have not ended in time. One that refuses to be cancelled is left behind."""
    if patience:
        await asyncio.wait(tasks, timeout=patience)
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=_END_PATIENCE)
    for task in done:
        if not task.cancelled():
            task.exception()  # reported already, or no longer of interest
