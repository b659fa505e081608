"""The outbox of a test: the real one, in a database of its own, with a clock that the test moves.

`drain` and `advance` run the claims, attempts and settlements of a worker; time that a delivery waits for is not spent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar, Unpack, cast

from pydantic_core import from_json

from holdfast.checks import moment
from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError
from holdfast.handlers import HandlerRegistry, require_registry
from holdfast.handling.application.sources import Transactions
from holdfast.new_event import EventOptions, NewEvent
from holdfast.postgres.publisher import Publisher
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Fact, Notice
from holdfast.testing.assertions import OutboxAssertions, Payload
from holdfast.testing.databases import TestDatabase
from holdfast.testing.delivering import Delivering, PutOffForEver, WarmConnections, WithoutEnd, quick
from holdfast.testing.faults import Crash, Duplicate, Fault, LostAnswer, LostLease
from holdfast.testing.loop import in_event_loop, kit_loop
from holdfast.testing.matching import matches, shown
from holdfast.testing.pools import OpenPools
from holdfast.testing.records import DeliveryRecord, Drained, PublishedEvent, RequestRecord, without_end
from holdfast.testing.running import find_handler
from holdfast.typed_events import TypedEvent
from holdfast.worker.connections import Connections

T = TypeVar("T")

_REACTION_PATIENCE = 5.0


class PostgresOutbox(OutboxAssertions):
    """What `Outbox` and `AsyncOutbox` share: reading, the clock, and faults. These calls block for a moment."""

    def __init__(
        self,
        database: TestDatabase,
        registry: HandlerRegistry | None = None,
        settings: WorkerSettings | None = None,
        transactions: Transactions = None,
    ) -> None:
        self._transactions = transactions
        self._database = database
        self._registry = registry
        self._registries = () if registry is None else (registry,)
        self._settings = quick(settings or WorkerSettings(), database.schema)
        self._faults: list[Fault] = []
        self._notices: list[str] = []  # errors that workers have reported
        self._pools = OpenPools()

    @property
    def dsn(self) -> str:
        """The address of the database."""
        return self._database.dsn

    # --- reading --------------------------------------------------------------------------------------

    def published(self) -> list[PublishedEvent]:
        """Return every event that was published and committed, in that order."""
        return _wait(self._published())

    async def _published(self) -> list[PublishedEvent]:
        return [published_event(row) for row in await self._database.fetch("published")]

    def deliveries(self) -> list[DeliveryRecord]:
        """Return the deliveries: each event at each of its handlers, with its state."""
        return _wait(self._deliveries())

    async def _deliveries(self) -> list[DeliveryRecord]:
        events = {each.event_id: each.envelope for each in await self._published()}
        names = ("handler_name", "status", "attempts", "failure_reason", "last_error", "available_at", "archived")
        return [
            DeliveryRecord(events[row["event_id"]], *(row[name] for name in names))
            for row in await self._database.fetch("deliveries")
            if row["event_id"] in events
        ]

    def handled(self) -> list[tuple[str, EventEnvelope]]:
        """Return the pairs of a handler and an event that it has handled, also by reactions in the application."""
        return _wait(self._handled())

    async def _handled(self) -> list[tuple[str, EventEnvelope]]:
        events: dict[tuple[str, str], EventEnvelope] = {}
        for each in await self._published():
            events.setdefault((each.envelope.source, each.envelope.idempotency_key), each.envelope)
        rows = await self._database.fetch("handled")
        keys = [(row["handler_name"], (row["source"], row["idempotency_key"])) for row in rows]
        return [(name, events[key]) for name, key in keys if key in events]

    def request(self, key: str, *, scope: str | None = None) -> RequestRecord:
        """Return what the request with this idempotency key did: the stored response, and the events it published."""
        return _wait(self._request(key, scope))

    async def _request(self, key: str, scope: str | None) -> RequestRecord:
        rows = await self._database.fetch("request", key=key, scope=scope)
        if len(rows) != 1:
            stored = [
                f"\n  {row['key']!r} of {row['scope']!r}: {row['response_status_code']}"
                for row in await self._database.fetch("requests")
            ]
            problem = f"{len(rows)} scopes have" if rows else "No request has"
            raise AssertionError(f"{problem} stored a response for {key!r}. Stored are:{''.join(stored) or ' none.'}")
        (row,) = rows
        of_request = set(row["events"])
        return RequestRecord(
            key,
            row["scope"],
            row["response_status_code"],
            row["status"] == "Failed",
            [(str(name), str(value)) for name, value in from_json(row["response_headers"] or "[]")],
            row["response_body"] or b"",
            [each.envelope for each in await self._published() if each.event_id in of_request],
        )

    async def _until_reacted(self, handler: str, payload: Payload, times: int, within: float) -> bool:
        """Wait until a reaction has handled so many events; return False if it fails, or takes too long."""
        deadline = time.monotonic() + within
        while True:
            handled = await self._handled()
            if sum(name == handler and matches(payload, event.payload) for name, event in handled) >= times:
                return True
            failed = any(each.failed and each.handler_name == handler for each in await self._deliveries())
            if failed or time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.005)

    def describe(self) -> str:
        """Return a readable list of what is in the outbox, and of what workers had to report."""
        return "\n".join([super().describe(), *(f"Notice: {notice}" for notice in self._notices)])

    def _observe(self, fact: Fact) -> None:
        if isinstance(fact, Notice) and fact.level == "error":
            self._notices.append(f"{fact.name} {shown(fact.details)}")

    def _delivering(self, registry: HandlerRegistry, connections: Connections | None = None) -> Delivering:
        return Delivering(
            self._database,
            registry,
            self._settings,
            self._faults,
            (self._observe,),
            connections,
            self._transactions,
            self._pools,
        )

    # --- what a test does by itself -------------------------------------------------------------------

    def publish(
        self,
        event: str | NewEvent | TypedEvent,
        payload: Any = None,
        *,
        source: str = "test",
        committed: bool = True,
        **options: Unpack[EventOptions],
    ) -> EventEnvelope:
        """Publish an event in a transaction of its own, as another service would; if not `committed`, roll it back."""
        publisher = self._publisher(source)

        async def publish(connection: Any) -> EventEnvelope:
            async with _ended(connection, committed):
                if isinstance(event, NewEvent):
                    envelope = await publisher.publish_event(connection, event)
                elif isinstance(event, str):
                    envelope = await publisher.publish(connection, event, {} if payload is None else payload, **options)
                else:
                    envelope = await publisher.publish(connection, event, **options)
            return cast(EventEnvelope, envelope)

        return _wait(self._database.use(publish))

    def cancel(self, key: str, *, source: str = "test") -> bool:
        """Cancel the pending event that was published with `key`; false when there is none."""
        return self._in_transaction(lambda tx: self._publisher(source).cancel(tx, key))

    def reschedule(self, key: str, *, delay: float, source: str = "test") -> bool:
        """Move the pending event that was published with `key`; false when there is none."""
        return self._in_transaction(lambda tx: self._publisher(source).reschedule(tx, key, delay=delay))

    def _publisher(self, source: str) -> Publisher:
        return Publisher(source, schema=self._database.schema, generation=self._settings.generation)

    def _in_transaction(self, work: Callable[[Any], Any]) -> bool:
        async def run(connection: Any) -> bool:
            async with connection.transaction():
                return bool(await work(connection))

        return _wait(self._database.use(run))

    def fetch(self, query: str, *values: object) -> list[Any]:
        """Return the rows of a query of the test's own, as asyncpg does."""
        return _wait(self._database.use(lambda connection: connection.fetch(query, *values)))

    def execute(self, statement: str, *values: object) -> None:
        """Run a statement of the test's own, which commits by itself."""
        _wait(self._database.use(lambda connection: connection.execute(statement, *values)))

    # --- the clock ------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time of the database's clock."""
        found: datetime = _wait(self._database.value("now"))
        return found

    def freeze(self, at: datetime | str | None = None) -> datetime:
        """Stop the database's clock, at a moment or where it is. `advance` and `drain` still move it."""
        wanted = datetime.fromisoformat(at) if isinstance(at, str) else at
        if wanted is not None:
            moment("freeze.at", wanted, error=ConfigurationError)
        found: datetime = _wait(self._database.value("freeze", at=wanted))
        return found

    def move_clock(self, **by: float) -> datetime:
        """Move the database's clock and deliver nothing, as if no worker had run. Takes what timedelta takes."""
        if timedelta(**by) < timedelta(0):
            raise ConfigurationError("move_clock", "is negative", "the clock goes forward only; freeze(at) sets it")
        found: datetime = _wait(self._database.value("move", to=self.now + timedelta(**by)))
        return found

    # --- faults ---------------------------------------------------------------------------------------

    def crash_after_effect(self, handler: str) -> None:
        """Let the worker die after this handler has returned and before its delivery is settled; another takes over.

        The handler is called again. What it wrote with `tx` is rolled back, everything else it did stays.
        """
        self._arm(Crash(handler))

    def lose_commit_answer(self, handler: str) -> None:
        """Let the connection break after the handler's delivery is committed, before the worker gets the answer."""
        self._arm(LostAnswer(handler))

    def duplicate_delivery(self, handler: str) -> None:
        """Deliver the handler's next event a second time after it was delivered, as if the settlement had been lost.

        A handler that takes `tx` is not called again: that it has handled the event was committed with its writes.
        """
        self._arm(Duplicate(handler))

    def expire_lease(self, handler: str) -> None:
        """Let the handler's lease expire after its work, so that another worker delivers before it returns."""
        self._arm(LostLease(handler))

    def _arm(self, fault: Fault) -> None:
        if self._registry is not None:
            find_handler(self._registry, fault.handler)
        self._faults.append(fault)

    @property
    def faults_left(self) -> list[str]:
        """The faults that no delivery has met yet."""
        return [str(fault) for fault in self._faults if not fault.over]

    # --- delivering -----------------------------------------------------------------------------------

    def _handlers(self, registry: HandlerRegistry | None) -> HandlerRegistry:
        registry = self._registry if registry is None else registry
        if registry is None:
            remedy = "pass drain(registry), or name it in pytest's options: holdfast_registry = app.handlers:registry"
            raise ConfigurationError("registry", "is not known", remedy)
        if not len(require_registry(registry)):
            raise ConfigurationError("registry", "has no handlers", "register at least one with @registry.handler")
        self._registries = (*self._registries, registry)
        return registry

    def _endless(self, problem: PutOffForEver | WithoutEnd) -> AssertionError:
        if isinstance(problem, WithoutEnd):
            return AssertionError(without_end(each.envelope.event_type for each in self.published()))
        return AssertionError(
            "A delivery was put off a hundred times, and still is; use drain(due_only=True), or advance(...).\n"
            + self.describe()
        )

    def close(self) -> None:
        """Close the pools that were opened for handlers. A test has no need to: the fixture does."""
        self._pools.close()


class Outbox(PostgresOutbox):
    """The outbox of a test that is a plain function. Handlers run on an event loop of the kit's, or in threads."""

    warm = WarmConnections()

    def drain(self, registry: HandlerRegistry | None = None, *, due_only: bool = False) -> Drained:
        """Deliver all events: those that are due, and, moving the clock, those that wait for a retry or a delay.

        With `due_only`, only what is due now. Returns when nothing is left that one of the handlers wants.
        """
        return self._deliver("drain", self._handlers(registry), None, due_only)

    def advance(self, *, registry: HandlerRegistry | None = None, **by: float) -> Drained:
        """Let time pass, as in `advance(hours=3)`: deliver each event when it is due, and fire schedules."""
        return self._deliver("advance", self._handlers(registry), timedelta(**by))

    def assert_reacted(
        self, handler: str, payload: Payload = None, *, times: int = 1, within: float = _REACTION_PATIENCE
    ) -> None:
        """Wait until a reaction in the application's process has handled events with this in their payload.

        A commit does not wait for its reactions; this does, for so many seconds, unless the reaction fails.
        """
        __tracebackhide__ = True
        if not _wait(self._until_reacted(handler, payload, times, within)):
            self.assert_handled(handler, payload, times=times)

    def _deliver(self, method: str, registry: HandlerRegistry, by: timedelta | None, due_only: bool = False) -> Drained:
        if in_event_loop():
            remedy = f"use the fixture async_outbox, and write: await async_outbox.{method}(...)"
            raise ConfigurationError(f"outbox.{method}", "is called in an asynchronous test", remedy)

        async def deliver() -> Drained:
            connections = await self.warm.of(self.dsn, registry, self._settings, self._transactions)
            async with self._delivering(registry, connections) as workers:
                return await (workers.drain(due_only) if by is None else workers.advance(by))

        try:
            return _wait(deliver())
        except (PutOffForEver, WithoutEnd) as problem:
            raise self._endless(problem) from None


class AsyncOutbox(PostgresOutbox):
    """The outbox of an `async def` test. Handlers run on the test's own event loop."""

    async def drain(self, registry: HandlerRegistry | None = None, *, due_only: bool = False) -> Drained:
        """Deliver all events: those that are due, and, moving the clock, those that wait for a retry or a delay.

        With `due_only`, only what is due now. Returns when nothing is left that one of the handlers wants.
        """
        async with self._delivering(self._handlers(registry)) as workers:
            try:
                return await workers.drain(due_only)
            except (PutOffForEver, WithoutEnd) as problem:
                raise self._endless(problem) from None

    async def advance(self, *, registry: HandlerRegistry | None = None, **by: float) -> Drained:
        """Let time pass, as in `advance(hours=3)`: deliver each event when it is due, and fire schedules."""
        async with self._delivering(self._handlers(registry)) as workers:
            try:
                return await workers.advance(timedelta(**by))
            except WithoutEnd as problem:
                raise self._endless(problem) from None

    async def assert_reacted(
        self, handler: str, payload: Payload = None, *, times: int = 1, within: float = _REACTION_PATIENCE
    ) -> None:
        """Wait until a reaction in the application's process has handled events with this in their payload.

        A commit does not wait for its reactions; this does, for so many seconds, unless the reaction fails.
        """
        __tracebackhide__ = True
        if not await self._until_reacted(handler, payload, times, within):
            self.assert_handled(handler, payload, times=times)


def _wait(coroutine: Coroutine[Any, Any, T]) -> T:
    return kit_loop().run(coroutine)


@asynccontextmanager
async def _ended(connection: Any, committed: bool) -> AsyncIterator[None]:
    """A transaction that is committed, or rolled back although nothing has failed."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    except BaseException:
        await transaction.rollback()
        raise
    await (transaction.commit() if committed else transaction.rollback())


def published_event(row: Any) -> PublishedEvent:
    """Return the event of a row of the statement `published`."""
    names = ("event_id", "event_type", "event_version", "occurred_at", "source", "target", "domain_id")
    envelope = EventEnvelope.trusted(
        {
            **{name: row[name] for name in names},
            "payload": from_json(row["payload"] or "{}"),
            "idempotency_key": row["idempotency_key"],
            "trace_context": row["trace_context"],
        }
    )
    return PublishedEvent(envelope, from_json(row["headers"] or "{}"), row["available_at"])
