"""Reactions in the producer's own process: the rung below the outbox, with the same handlers.

    reactions = Reactions(dsn, registry)

    async with reactions:                     # or `with reactions:` in a program without an event loop
        async with connection.transaction():
            event = await publisher.publish(connection, "order.placed", {"order_id": 17})
        reactions.react(event)                # after the commit; SQLAlchemy sessions do it by themselves

They run the handlers that are registered with `via="in_process"`, each once, in the background: a commit neither waits
for them nor fails with them. A reaction that fails becomes a dead letter like any other. Reactions that a process had
not begun when it died are never run: where that matters, register the handler with `via="outbox"`.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Self

from pydantic_core import from_json

from holdfast.checks import function, instance, number
from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError
from holdfast.failure import Redactor, describe
from holdfast.handlers import Handler, HandlerRegistry, Via, require_registry
from holdfast.handling.application.sources import Sources, Transactions
from holdfast.handling.background_loop import BackgroundLoop
from holdfast.handling.lifespans import Lifespans
from holdfast.handling.runner import HandlerRunner
from holdfast.handling.sessions import SILENCE, Sessions
from holdfast.handling.threads import Threads
from holdfast.observability.logging import log_fact
from holdfast.observability.observers import Observers
from holdfast.observing import require_observers
from holdfast.payload import encode_payload
from holdfast.postgres import migrate
from holdfast.postgres.connection import Address, ReservedConnection
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.postgres.queries import Queries
from holdfast.postgres.reactions import ReactionStatements
from holdfast.postgres.statements import NamedStatements
from holdfast.postgres.transport import unverified_notice
from holdfast.reactions.attempts import Attempts, Result
from holdfast.reactions.recorder import Recorder
from holdfast.reactions.reports import Reports
from holdfast.reactions.unfinished import Unfinished
from holdfast.telemetry import Counters, Notice, Observer
from holdfast.tracing import Tracing, require_tracing

_STATEMENT_TIMEOUT = 10.0
_RECORD_PATIENCE = 3.0  # to record the reactions that did not end within the grace


class Stopped(Exception):
    """The process ended before the reaction did."""


class Reactions:
    """Runs in-process reactions while it is open. One for each process; threads may share it."""

    def __init__(
        self,
        dsn: str,
        registry: HandlerRegistry,
        *,
        schema: str = "core",
        concurrency: int = 10,
        connections: int = 2,
        threads: int = 8,
        grace: float = 10.0,
        observers: Iterable[Observer] = (log_fact,),
        redact: Redactor | None = None,
        tracing: Tracing | None = None,
        transactions: Transactions = None,
    ) -> None:
        for name, value in (("concurrency", concurrency), ("connections", connections), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(name, f"is {value!r}", "give a whole number of 1 or more")
        number("grace", grace, 0, 3_600)
        if redact is not None:
            function("redact", redact, "pass a function of a text that returns a text")
        self.counters = Counters()
        self._registry = require_registry(registry)
        self._schema = schema
        self._sources = Sources(transactions, schema)
        self._sources.serve(handler for handler in registry if handler.via == "in_process")
        self._address = Address(dsn)
        self._statements = ReactionStatements(NamedStatements(Queries(schema), self._address))
        self._concurrency = concurrency
        self._connections = connections
        self._most_threads = threads
        self._grace = grace
        self._observe = Observers(require_observers(observers))
        self._reports = Reports(self._observe)
        self._redact = redact
        self._tracing = require_tracing(tracing)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: int | None = None
        self._lock = threading.Lock()  # for the loop: any thread may hand it an event
        self._unfinished = Unfinished()
        self._background: BackgroundLoop | None = None

    # --- using it -------------------------------------------------------------------------------------

    def wanted(self, event_type: str, target: str | None = None) -> list[Handler]:
        """The handlers that react to such an event in this process."""
        return self._wanted("in_process", event_type, target)

    def _wanted(self, via: Via, event_type: str, target: str | None) -> list[Handler]:
        return [
            handler
            for handler in self._registry
            if handler.via == via and target in (None, handler.domain_context) and handler.wants(event_type)
        ]

    def require_open(self) -> asyncio.AbstractEventLoop:
        """Return the loop on which reactions run; raise an error if they do not run."""
        if self._loop is None:
            raise ConfigurationError(
                "reactions", "are not running", "write: async with reactions, or with reactions, around the program"
            )
        return self._loop

    def react(self, event: EventEnvelope, headers: Mapping[str, str] | None = None) -> None:
        """Run the reactions to an event whose transaction has committed. Returns at once, from any thread."""
        instance("event", event, EventEnvelope, "pass what publish returned")
        handlers = self.wanted(event.event_type, event.target)
        if not handlers:
            return
        # Copied as a worker would read it from the outbox: the producer may change its objects later.
        payload = from_json(encode_payload(event.payload, limit=2**31))
        event = event.model_copy(update={"payload": payload})
        with self._lock:
            loop = self.require_open()
            loop.call_soon_threadsafe(self._begin, self._unfinished.accept(), event, dict(headers or {}), handlers)

    async def drain(self, timeout: float | None = None) -> None:
        """Wait until every event accepted so far is handled and recorded. May be called on any event loop.

        Raises TimeoutError after `timeout` seconds; without one, only the handlers' own time limits end the wait.
        """
        drained = self._unfinished.drained()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wrap_future(drained)
        except TimeoutError:
            raise self._too_slow() from None

    def drain_sync(self, timeout: float | None = None) -> None:
        """`drain` for code without an event loop: blocks its thread."""
        if threading.get_ident() == self._loop_thread:
            raise ConfigurationError(
                "reactions", "run on this very thread, which would wait for itself", "write: await reactions.drain()"
            )
        try:
            self._unfinished.drained().result(timeout)
        except TimeoutError:
            raise self._too_slow() from None

    def _too_slow(self) -> TimeoutError:
        return TimeoutError(f"the reactions to {len(self._unfinished)} events have not ended in time")

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise ConfigurationError("reactions", "are running already", "open them once for each process")
        self._places = asyncio.Semaphore(self._concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = Threads(self._most_threads)
        # Commits need not be durable: a crash of the server can undo only the record that a reaction is done.
        self._connection = ReservedConnection(
            self._address, "react", statement_timeout=_STATEMENT_TIMEOUT, durable=False
        )
        self._recorder = Recorder(self._statements, self._connection, self._registry, self._observe, self._redact)
        handlers = [handler for handler in self._registry if handler.via == "in_process"]
        longest = max((handler.timeout for handler in handlers), default=0.0)
        self._sessions = Sessions(
            self._address, size=self._connections, patience=60.0, statement_timeout=longest + SILENCE
        )
        self._lifespans = Lifespans(handlers, self._observe, self._redact)
        self._runner = HandlerRunner(
            self._sessions,
            self._sources,
            self._threads,
            self._lifespans.states,
            self._observe,
            transaction_threads=self._connections,
        )
        self._attempts = Attempts(self._statements, self._runner, self._tracing, self._redact)
        try:
            if handlers:
                await self._address.probe()
                await migrate.require_compatible(await self._connection.use(), self._schema)
                await self._sources.start(await self._connection.use())
                await self._lifespans.start()
        except BaseException:
            await self._close()  # a context that was not entered is not left
            raise
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        if handlers and (notice := unverified_notice(self._address.dsn)) is not None:
            self._observe(notice)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Accept no more events, and let reactions end within the grace; those that do not have failed."""
        with self._lock:
            self._loop = None
        try:
            with contextlib.suppress(TimeoutError):
                await self.drain(self._grace)
            for task in self._tasks:
                task.cancel()
            with contextlib.suppress(TimeoutError):
                await self.drain(_RECORD_PATIENCE)
        finally:
            for task in self._tasks:
                task.cancel()
            await self._close()

    async def _close(self) -> None:
        try:
            self._runner.close()
            await self._sources.stop()
            await self._sessions.close()
            await self._connection.close()
        finally:
            await self._end_lifespans()

    async def _end_lifespans(self) -> None:
        try:
            await self._lifespans.stop()
        finally:
            await self._observe.flush()
            self._loop_thread = None
            self._unfinished.abandon()

    def __enter__(self) -> Self:
        background = BackgroundLoop(self, "holdfast-reactions")
        background.start()
        self._background = background
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.end()

    # --- one event ------------------------------------------------------------------------------------

    def _begin(self, number: int, event: EventEnvelope, headers: dict[str, str], handlers: list[Handler]) -> None:
        task = asyncio.get_running_loop().create_task(self._react(event, headers, handlers))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, number))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._unfinished.finish(number)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._observe(Notice("error", "reaction_lost", {"error": describe(error, self._redact).text}))

    async def _react(self, event: EventEnvelope, headers: dict[str, str], handlers: list[Handler]) -> None:
        results: dict[str, Result] = {handler.name: Stopped("the process was stopped") for handler in handlers}
        took: dict[str, float] = {}
        try:
            async with self._places:
                if event.idempotency_key != str(event.event_id):
                    handlers = await self._unhandled(event, handlers, results)
                await asyncio.gather(*(self._attempt(each, event, headers, results, took) for each in handlers))
        except asyncio.CancelledError:
            pass  # the grace is over; reactions that have not ended have failed
        alone = not self._wanted("outbox", event.event_type, event.target)
        recorded = await self._recorder.record(event, headers, results, alone=alone)
        if self._loop_thread is None:
            await self._connection.close()  # a reaction that outlived its cancellation has opened it again
        duplicates = sum(result is None for result in results.values())
        self.counters.delivered += len(recorded.done) - duplicates
        self.counters.duplicates += duplicates
        self.counters.failed += len(recorded.failed)
        self._reports.handled(event, headers, results, took)
        self._reports.failed(event, headers, recorded.failed, took)

    async def _unhandled(
        self, event: EventEnvelope, handlers: list[Handler], results: dict[str, Result]
    ) -> list[Handler]:
        """Leave out handlers that have handled the key: a producer that chooses keys may publish one twice."""
        names = [handler.name for handler in handlers]
        try:
            unhandled = await self._recorder.unhandled(event, names)
        except (*CONNECTION_FAULTS, *PASSING_FAULTS) as fault:
            results.update({handler.name: fault for handler in handlers})
            return []
        results.update({name: None for name in names if name not in unhandled})
        return [handler for handler in handlers if handler.name in unhandled]

    async def _attempt(
        self,
        handler: Handler,
        event: EventEnvelope,
        headers: dict[str, str],
        results: dict[str, Result],
        took: dict[str, float],
    ) -> None:
        started = time.monotonic()
        try:
            results[handler.name] = await self._attempts.run(handler, event, headers)
        finally:
            took[handler.name] = time.monotonic() - started
