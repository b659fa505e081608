"""A worker: claims events, runs their handlers, settles them. In a process of its own or beside a service.

Worker(dsn, registry).run()            until `stop` is called
async with Worker(dsn, registry): ...  beside something else, for example a FastAPI lifespan

The second form waits for the start, with which an error of the configuration is raised. If the database cannot be
reached, it does not wait: the worker goes on trying to connect, and logs that.
"""

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from types import TracebackType
from typing import NoReturn, Self
from uuid import UUID

import asyncpg

from holdfast.checks import function, instance
from holdfast.errors import ConfigurationError
from holdfast.failure import Redactor
from holdfast.generation import serving_generation
from holdfast.handler_tally import HandlerTally
from holdfast.handlers import HandlerRegistry, require_registry
from holdfast.handling.application.sources import Transactions
from holdfast.ids import uuid7
from holdfast.measurements import NO_DELIVERIES, Measurements
from holdfast.observability.health import Health
from holdfast.observability.logging import log_fact
from holdfast.observability.observers import Observers
from holdfast.observing import require_observers
from holdfast.postgres.faults import remedy_of
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Counters, Observer
from holdfast.tracing import Tracing, require_tracing
from holdfast.worker.draining import deliver_due
from holdfast.worker.health import HealthReader
from holdfast.worker.lifecycle import Lifecycle
from holdfast.worker.parts import Parts
from holdfast.worker.process import stopped_by_signals


class Worker:
    """Delivers events to the handlers of a registry until it is stopped.

    `transactions` is where handlers get a `tx` of SQLAlchemy, psycopg or Django from: the application's session
    factory, engine or pool, or several of them.
    """

    def __init__(
        self,
        dsn: str,
        registry: HandlerRegistry,
        settings: WorkerSettings | None = None,
        *,
        observers: Iterable[Observer] = (log_fact,),
        redact: Redactor | None = None,
        tracing: Tracing | None = None,
        transactions: Transactions = None,
    ) -> None:
        self.settings: WorkerSettings = WorkerSettings() if settings is None else settings
        relays = isinstance(settings, WorkerSettings) and settings.substrate is not None
        if not len(require_registry(registry)) and not relays:
            raise ConfigurationError("registry", "has no handlers", "register at least one with @registry.handler")
        if redact is not None:
            function("redact", redact, "pass a function of a text that returns a text")
        require_tracing(tracing)
        instance("settings", self.settings, WorkerSettings, "pass WorkerSettings(...)")
        self._arguments = dsn, registry, self.settings, require_observers(observers), redact, tracing, transactions
        self._running: asyncio.Task[None] | None = None  # while it is used with `async with`
        self._build()

    def _build(self) -> None:
        """Make the parts, for this process."""
        dsn, registry, settings, observers, redact, tracing, transactions = self._arguments
        self._process = os.getpid()
        self.id: UUID = uuid7()
        self._observers = Observers(observers)
        self._parts = Parts(dsn, self.id, registry, settings, self._observers, redact, tracing, transactions)
        self._lifecycle = Lifecycle(self._parts, self.id, registry)
        self._health = HealthReader(self._parts)
        self._begun = False

    def _begin(self) -> None:
        """Note that the worker starts. In a process that was forked meanwhile, it becomes a worker of its own."""
        _require_asyncio()
        if self._process != os.getpid():
            if self._begun:
                raise ConfigurationError(
                    "worker", "was started before this process was forked from its own", "make a new Worker here"
                )
            self._build()
        self._begun = True

    def __reduce__(self) -> NoReturn:
        raise ConfigurationError(
            "worker", "cannot be sent to another process", "make it there, from the same address and registry"
        )

    async def run(self, *, signals: bool = False) -> None:
        """Work until `stop` is called. With `signals`, SIGTERM and SIGINT stop it; a second one exits at once."""
        self._begin()
        signalled = stopped_by_signals(self.stop, self._lifecycle.stop.is_set) if signals else contextlib.nullcontext()
        with signalled:
            await self._live()

    async def _live(self) -> None:
        try:
            with serving_generation(self.settings.schema, self.settings.generation):
                await self._lifecycle.run()
        finally:
            await self._observers.flush()

    def stop(self) -> None:
        """Stop claiming, finish what runs within the grace, release the rest. `run` then returns."""
        self._lifecycle.stop.set()

    async def entered(self) -> None:
        """Wait until it has started, or has found that the database does not answer."""
        await self._lifecycle.entered.wait()

    async def drain(self) -> None:
        """Work until no event is due, then stop. Events that are delayed, or wait for a retry, stay.

        For tests, scripts and the last step of a deployment.
        """
        async with self:
            await self._unless_ended(self._lifecycle.started.wait())
            await deliver_due(self._parts, self._unless_ended, self._has_ended)

    def _has_ended(self) -> bool:
        return self._lifecycle.stop.is_set() or self._running is None or self._running.done()

    async def _unless_ended(self, awaited: Coroutine[None, None, object]) -> None:
        waiting = asyncio.create_task(awaited)
        ended = (waiting,) if self._running is None else (waiting, self._running)
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    async def __aenter__(self) -> Self:
        self._begin()
        self._running = asyncio.create_task(self._live())
        await self._unless_ended(self._lifecycle.entered.wait())
        if self._running.done():
            try:
                self._running.result()
            except asyncpg.PostgresError as error:
                remedy = remedy_of(error, "the worker's address")
                raise ConfigurationError("dsn", f"was refused by the server: {error}", remedy) from error
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._running is not None:
            await self._running

    def health(self) -> Health:
        """How this worker is now: whether it is live and ready, and why not. Any thread may call it, at any time."""
        return self._health.read(self._lifecycle.state if self._begun else "new")

    @property
    def counters(self) -> Counters:
        """What this worker has done since it started."""
        return self._parts.shared.counters

    def tally(self) -> dict[str, HandlerTally]:
        """Return what has become of each handler's deliveries since this worker started. Any thread may call it."""
        return self._parts.shared.tally.snapshot()

    def measurements(self) -> Measurements:
        """Return what this worker has done since it started, and its state. Any thread may call it."""
        _, registry, *_ = self._arguments
        tally, runs = self._parts.shared.tally, self._lifecycle.started.is_set() and not self._lifecycle.stop.is_set()
        return Measurements(
            handlers={handler.name: NO_DELIVERIES for handler in registry} | tally.snapshot(),
            nacked_terminal=tally.dead_letters.nacked_terminal.snapshot(),
            dlq_written=tally.dead_letters.dlq_written.snapshot(),
            counters=replace(self.counters),
            facts_dropped=self.facts_dropped,
            workers=int(runs),
            listeners=int(runs and self._parts.sleeper.possible),
            listening=int(runs and self.listening),
            in_flight=self.in_flight,
            concurrency=self.concurrency if runs else 0,
            brokers=() if self._parts.substrate is None else self._parts.substrate.answers(),
        )

    @property
    def facts_dropped(self) -> int:
        """How many facts did not reach an observer, because it blocked or raised."""
        return self._observers.dropped

    @property
    def in_flight(self) -> int:
        """How many deliveries this worker holds a lease on."""
        return len(self._parts.shared.in_flight)

    @property
    def concurrency(self) -> int:
        """How many events a handler without a limit of its own may run at once now; with "auto", the highest number."""
        return self._parts.dispatcher.concurrency.limit

    @property
    def listening(self) -> bool:
        """Whether notifications reach this worker."""
        return self._parts.sleeper.hears


def _require_asyncio() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            "worker",
            "is started outside a running asyncio event loop",
            "await it in asyncio.run(...); under trio, run it in a thread or a process of its own",
        ) from None
