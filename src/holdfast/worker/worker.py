"""A worker: claims events, runs their handlers, settles them. In a process of its own or beside a service.

Worker(dsn, registry).run()            until it is told to stop
async with Worker(dsn, registry): ...  beside something else, for example a FastAPI lifespan
"""

import asyncio
import contextlib
import shlex
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Self
from uuid import UUID

from holdfast.envelope import uuid7
from holdfast.errors import ConfigurationError
from holdfast.failure import Redactor, describe
from holdfast.handlers import HandlerRegistry
from holdfast.handling.sessions import SILENCE, Sessions
from holdfast.observability.logging import log_fact
from holdfast.postgres.connection import CONNECTION_FAULTS, PASSING_FAULTS, Address, ReservedConnection
from holdfast.postgres.deliveries import Deliveries, Subscriptions
from holdfast.postgres.fleet import Fleet
from holdfast.postgres.queries import Queries
from holdfast.postgres.schedules import Schedules
from holdfast.postgres.wakeup.sleeper import Sleeper
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Counters, Fact, Notice, Observer
from holdfast.worker.claimer import Claimer
from holdfast.worker.dispatcher import Dispatcher
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.in_flight import InFlight
from holdfast.worker.lanes import outdated
from holdfast.worker.listener import PING_INTERVAL, Listener
from holdfast.worker.maintenance import Maintenance
from holdfast.worker.outage import Outages
from holdfast.worker.process import exit_now
from holdfast.worker.readiness import require_ready
from holdfast.worker.scheduler import Scheduler
from holdfast.worker.settler import Settler
from holdfast.worker.sweeper import Sweeper
from holdfast.worker.transactions import Transactions

# A database that does not answer must not keep a worker from stopping. Together these are less than five seconds.
_CLAIM_PATIENCE = 2.0
_GOODBYE = 2.5  # beyond the grace
_END_PATIENCE = 0.5
_CLOSE_PATIENCE = 1.0


class Worker:
    """Everything of one worker process; each part is one loop in one module of this package."""

    def __init__(
        self,
        dsn: str,
        registry: HandlerRegistry,
        settings: WorkerSettings | None = None,
        *,
        observers: Iterable[Observer] = (log_fact,),
        redact: Redactor | None = None,
    ) -> None:
        if not len(registry):
            raise ConfigurationError("registry", "has no handlers", "register at least one with @registry.handler")
        self.settings = settings = settings or WorkerSettings()
        self.id: UUID = uuid7()
        self.counters = Counters()
        self._address = address = Address(dsn)
        self._registry = registry
        self._observers = tuple(observers)
        self._stop = asyncio.Event()
        self._started = asyncio.Event()
        self._beside: asyncio.Task[None] | None = None

        queries = Queries(settings.schema)
        self._deliveries = Deliveries(
            queries, address, worker=self.id, generation=settings.generation, lease=settings.lease
        )
        self._in_flight = InFlight()
        self._outages = outages = Outages(self._observe)
        handlers = list(registry)
        # A statement that takes longer than this is a sign of trouble, and must end before the lease does.
        limit = settings.lease / 3
        # A claim that a crash of the server undoes is a claim that was not made: its token settles nothing.
        self._claim_connection = ReservedConnection(address, "claim", statement_timeout=limit, durable=False)
        self._settle_connection = ReservedConnection(address, "settle", statement_timeout=limit)
        self._maintenance_connection = ReservedConnection(address, "maintenance", statement_timeout=limit)
        self._settler = Settler(
            self._settle_connection,
            self._deliveries,
            self._in_flight,
            self.counters,
            self._observe,
            outages,
            lease=settings.lease,
            settle_after=settings.settle_after,
            archive=settings.dead_letters == "archive",
            # They are due before the moment until which the claimer means to sleep.
            on_postponed=lambda: self._claimer.wake(),
        )
        self._sessions = Sessions(
            address,
            size=settings.connections,
            patience=settings.lease,
            statement_timeout=max(handler.timeout for handler in handlers) + SILENCE,
        )
        self._transactions = Transactions(
            self._sessions, self._deliveries, self._settler, self.counters, self._observe, outages
        )
        self._dispatcher = Dispatcher(
            self._settler,
            self._in_flight,
            self._transactions,
            self.counters,
            self._observe,
            concurrency=settings.concurrency,
            threads=settings.threads,
            lease=settings.lease,
            shortest_timeout=min(handler.timeout for handler in handlers),
            redact=redact,
        )
        self._listen_address = Address(settings.listen_dsn) if settings.listen_dsn else address
        self._guard: Sleeper | None = None
        self._listener: Listener | None = None
        if settings.listen:
            # A process that is frozen while it sleeps makes producers notify: the server ends it as idle.
            idle = 5 * PING_INTERVAL
            self._guard = Sleeper(
                ReservedConnection(self._listen_address, "guard", idle_timeout=idle),
                queries,
                self.id,
                hears=lambda: self.listening,
                on_asleep=lambda: self._claimer.wake(True),
            )
            self._listener = Listener(
                ReservedConnection(self._listen_address, "listen", statement_timeout=limit, idle_timeout=idle),
                queries,
                settings.served_channels,
                self.id,
                self.counters,
                outages,
                poll_interval=settings.poll_interval,
                wake=lambda rescan: self._claimer.wake(rescan),
                stop=self._stopped,
                may_listen=self._may_listen,
                lost=self._deafened,
                pinged=self._guard.ping,
            )
        self._claimer = Claimer(
            self._claim_connection,
            self._deliveries,
            self._dispatcher,
            self._in_flight,
            handlers,
            settings.served_channels,
            self.counters,
            outages,
            guard=self._guard,
            batch=settings.batch,
            lease=settings.lease,
            poll_interval=settings.poll_interval,
        )
        self._heartbeat = Heartbeat(
            address,
            self._deliveries,
            self._in_flight,
            self._observe,
            outages,
            lease=settings.lease,
            lost=self._dispatcher.cancel,
            running=self._dispatcher.running,
            last_turn=lambda: self._dispatcher.beat,
        )
        self._maintenance = Maintenance(
            self._maintenance_connection,
            self._deliveries,
            Fleet(queries),
            self._observe,
            settings,
            self.id,
            sorted(handler.name for handler in handlers),
            Sweeper(queries, self.id, self._observe) if settings.sweep else None,
        )
        self._schedule_connection = ReservedConnection(address, "schedule", statement_timeout=limit)
        self._scheduler: Scheduler | None = None
        if registry.schedules:
            self._scheduler = Scheduler(
                self._schedule_connection,
                Schedules(queries, address, settings.generation),
                registry.schedules,
                self.counters,
                self._observe,
                outages,
            )

    # --- using it -------------------------------------------------------------------------------------

    async def run(self, *, signals: bool = False) -> None:
        """Work until `stop` is called. With `signals`, SIGTERM and SIGINT stop it; a second one exits at once."""
        if signals:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled, number)
        try:
            await self._run()
        finally:
            if signals:
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Stop claiming, finish what runs within the grace, give the rest back. `run` then returns."""
        self._stop.set()

    async def drain(self) -> None:
        """Work until nothing is due any more, then stop. What is delayed, or waits for a retry, stays.

        For tests, scripts and the last step of a deployment.
        """
        async with self:
            claimed = -1
            while claimed != self.counters.claimed:
                claimed = self.counters.claimed
                await self._unless_ended(self._claimer.rest())
                await self._unless_ended(self._in_flight.none.wait())
                if self._stop.is_set() or self._beside is None or self._beside.done():
                    return

    async def _unless_ended(self, awaited: Coroutine[None, None, object]) -> None:
        waiting = asyncio.create_task(awaited)
        ended = (waiting,) if self._beside is None else (waiting, self._beside)
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    async def __aenter__(self) -> Self:
        self._beside = asyncio.create_task(self._run())
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait((self._beside, started), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._beside.done():
            self._beside.result()
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._beside is not None:
            await self._beside

    @property
    def in_flight(self) -> int:
        """How many deliveries this worker holds a lease on."""
        return len(self._in_flight)

    @property
    def listening(self) -> bool:
        return self._listener is not None and self._listener.healthy

    # --- running it -----------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            exit_now(number)
        self.stop()

    def _stopped(self, identity: UUID) -> None:
        # Anybody may send a notification: only the database's word stops a handler.
        delivery = self._in_flight.get(identity)
        if delivery is not None:
            self._heartbeat.doubt(delivery)

    def _deafened(self, silent: bool) -> None:
        """The listener has lost its connection, or got no answer on it. Then the others have become useless too."""
        if self._guard is not None:
            self._guard.reset()
        if silent:
            self._claim_connection.drop()
            self._settle_connection.drop()
            self._maintenance_connection.drop()
            self._schedule_connection.drop()
            self._sessions.drop(PING_INTERVAL)  # at least that long ago it did still answer

    def _observe(self, fact: Fact) -> None:
        for observer in self._observers:
            # Whoever looks on must not be able to stop the work.
            with contextlib.suppress(Exception):
                observer(fact)

    async def _run(self) -> None:
        prepared = False
        try:
            prepared = await self._prepare()
        finally:
            if not prepared:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GOODBYE):
                        await self._maintenance.say_goodbye()
                await self._close()
        if not prepared:
            return
        self._heartbeat.start()
        settling = asyncio.create_task(self._keep("settle", self._settler.run))
        dispatching = asyncio.create_task(self._keep("dispatch", self._dispatcher.run))
        claiming = asyncio.create_task(self._keep("claim", self._claimer.run))
        others = [asyncio.create_task(self._keep("maintain", self._maintenance.run))]
        if self._scheduler is not None:
            others.append(asyncio.create_task(self._keep("schedule", self._scheduler.run)))
        if self._listener is not None:
            others.append(asyncio.create_task(self._keep("listen", self._listener.run)))
        self._started.set()
        self._observe(Notice("info", "worker_started", self._introduction()))
        try:
            await self._stop.wait()
        finally:
            grace_ends = asyncio.get_running_loop().time() + self.settings.grace
            self._claimer.stop()
            self._dispatcher.nudge()
            patience = _CLAIM_PATIENCE if self._claim_connection.reachable else _END_PATIENCE
            await asyncio.wait((claiming,), timeout=patience)
            if not claiming.done():
                self._claim_connection.drop()
            await _end(claiming, *others)
            try:
                async with asyncio.timeout_at(grace_ends + _GOODBYE):
                    await self._dispatcher.stop(max(0.0, grace_ends - asyncio.get_running_loop().time()))
                    await self._maintenance.say_goodbye()
            except TimeoutError:
                remedy = "the database does not answer; the leases give the events back"
                self._observe(Notice("error", "stop_incomplete", {"in_flight": len(self._in_flight), "remedy": remedy}))
            finally:
                await _end(dispatching, settling)
                await self._close()
            self._observe(Notice("info", "worker_stopped", {"worker_id": str(self.id)}))

    async def _prepare(self) -> bool:
        """Wait for the database, refuse one that does not fit, record subscriptions. False when told to stop."""
        outage = self._outages.of("start")
        while not self._stop.is_set():
            try:
                await self._address.probe()
                connection = await self._claim_connection.use()
                policies = await require_ready(connection, self.settings)
                self._deliveries.deletes_delivered = any(
                    policy.deletes_at_once for (entity, _), policy in policies.items() if entity == "outbox_row"
                )
                # Reactions in the producer's process are owed nothing; their lanes are served, for replays.
                owed = [handler for handler in self._registry if handler.via == "outbox"]
                await self._deliveries.subscribe(connection, owed)
                self._report_outdated(await self._deliveries.subscriptions(connection))
                if self._scheduler is not None:
                    await self._maintenance.introduce()
                    await self._scheduler.declare()
                outage.over()
                return True
            except (*PASSING_FAULTS, *CONNECTION_FAULTS) as fault:
                self._claim_connection.drop()
                try:
                    async with asyncio.timeout(outage.begin(fault)):
                        await self._stop.wait()
                except TimeoutError:
                    pass
        return False

    async def _may_listen(self) -> bool:
        """Behind a transaction pooler nothing can be listened for: say so once, and poll."""
        if self._listen_address is not self._address:
            await self._listen_address.probe()
        if not self._listen_address.pooled:
            return True
        self._claimer.guard = None
        details: dict[str, object] = {
            "cause": "the connection goes through a transaction pooler, where nothing can be listened for",
            "action": f"polling every {self.settings.poll_interval:g} s",
            "remedy": "give listen_dsn (HOLDFAST_LISTEN_DSN) a direct connection",
        }
        self._observe(Notice("error", "listener_pooled", details))
        return False

    def _report_outdated(self, subscriptions: Subscriptions) -> None:
        for handler_name, event_type in outdated(subscriptions, self._registry):
            details: dict[str, object] = {
                "handler_name": handler_name,
                "event_type": event_type,
                "remedy": "if it is not wanted any more: "
                f"holdfast handlers retire {handler_name} --event-type {shlex.quote(event_type)}",
            }
            self._observe(Notice("warning", "interest_outdated", details))

    async def _keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """A loop that ends by a defect is told and started again: the others must not die with it."""
        while True:
            try:
                await loop()
                return
            except Exception as error:
                details: dict[str, object] = {"loop": name, "error": describe(error).text}
                self._observe(Notice("error", "loop_failed", details))
                await asyncio.sleep(1.0)

    async def _close(self) -> None:
        closing = [
            self._heartbeat.stop(),
            self._sessions.close(),
            *(
                each.close()
                for each in (
                    self._claim_connection,
                    self._settle_connection,
                    self._maintenance_connection,
                    self._schedule_connection,
                )
            ),
        ]
        if self._listener is not None:
            closing.append(self._listener.close())
        if self._guard is not None:
            closing.append(self._guard.close())
        await _end(*map(asyncio.ensure_future, closing), patience=_CLOSE_PATIENCE)

    def _introduction(self) -> dict[str, object]:
        transactional = any(handler.transactional for handler in self._registry)
        return {
            "worker_id": str(self.id),
            "generation": self.settings.generation,
            "channels": list(self.settings.served_channels),
            "handlers": sorted(handler.name for handler in self._registry),
            "schedules": sorted(schedule.name for schedule in self._registry.schedules),
            "connections_at_most": self.settings.connections_needed(transactional, bool(self._registry.schedules)),
        }


async def _end(*tasks: asyncio.Future[None], patience: float = 0.0) -> None:
    """Cancel what has not ended in time. What refuses to be cancelled is left behind."""
    if patience:
        await asyncio.wait(tasks, timeout=patience)
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=_END_PATIENCE)
    for task in done:
        if not task.cancelled():
            task.exception()  # told already, or of no subscriptions any more
