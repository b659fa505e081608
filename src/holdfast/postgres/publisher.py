"""Publishing: events are written in the caller's transaction, and exist if and only if it commits.

    publisher = Publisher(source="shop")

    async with connection.transaction():
        await connection.execute("INSERT INTO orders ...")
        await publisher.publish(connection, "order.placed", {"order_id": 17})

With a synchronous connection or session the same methods are called without `await`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TypeVar, Unpack, overload
from uuid import UUID

from holdfast.context import current_context
from holdfast.envelope import EventEnvelope
from holdfast.errors import FieldError
from holdfast.new_event import EventOptions, NewEvent, require_event, unknown_option
from holdfast.observing import DirectObservers, require_observers
from holdfast.outbox_row import OutboxRow
from holdfast.outcome import Delay
from holdfast.payload import PAYLOAD_LIMIT
from holdfast.postgres.drivers import (
    AsyncAlone,
    AsyncTransaction,
    Driver,
    SyncTransaction,
    driver_of,
    require_alone,
    run_asyncpg,
)
from holdfast.postgres.publishing import Payload, PublishingSteps, Steps, log_notice
from holdfast.postgres.queries import Queries
from holdfast.postgres.refusals import refusal_of
from holdfast.telemetry import Observer
from holdfast.tracing import Tracing, require_tracing
from holdfast.typed_events import TypedEvent, is_typed_event

_NONE: Final = object()
T = TypeVar("T")


class Publisher:
    """Writes events into the outbox. It holds no connection and no state: make one per source and share it.

    Without `generation`, events get that of the worker in this process, else that of `HOLDFAST_GENERATION`, else the
    current one of the database, which is looked up at most once a second: a program that writes to several databases
    makes a publisher for each. With `tracing` a publish is a span, and the event carries its trace context.

    Observers are called at once, in the caller's thread, and get `Published` when an event is recorded: whether the
    transaction commits is not known then.
    """

    def __init__(
        self,
        source: str,
        *,
        schema: str = "core",
        generation: int | None = None,
        channel: str | None = None,
        payload_limit: int = PAYLOAD_LIMIT,
        observers: Iterable[Observer] = (log_notice,),
        tracing: Tracing | None = None,
    ) -> None:
        require_tracing(tracing)
        self.source, self.schema = source, schema
        self._queries = Queries(schema)
        observe = DirectObservers(require_observers(observers), log_notice)
        self._steps = PublishingSteps(source, schema, generation, channel or None, payload_limit, observe, tracing)
        self._traced = tracing is not None

    @overload
    def publish(
        self, tx: SyncTransaction, event_type: str, payload: Payload, **options: Unpack[EventOptions]
    ) -> EventEnvelope: ...
    @overload
    def publish(
        self, tx: AsyncTransaction, event_type: str, payload: Payload, **options: Unpack[EventOptions]
    ) -> Coroutine[Any, Any, EventEnvelope]: ...
    @overload
    def publish(self, tx: SyncTransaction, event: TypedEvent, /, **options: Unpack[EventOptions]) -> EventEnvelope: ...
    @overload
    def publish(
        self, tx: AsyncTransaction, event: TypedEvent, /, **options: Unpack[EventOptions]
    ) -> Coroutine[Any, Any, EventEnvelope]: ...
    def publish(self, tx: Any, event_type: Any, payload: Any = _NONE, **options: Unpack[EventOptions]) -> Any:
        """Publish one event and return its envelope: a type and a payload, or an object of an event class.

        With `key`, the envelope has the id of the event that holds the key: this one, or a pending one.
        """
        if payload is _NONE:
            return self.publish_event(tx, _of_class(tx, event_type, options))
        if not isinstance(event_type, str):
            _refuse_payload(event_type)
        if not options and self._is_plain:
            return self._run_plain(tx, event_type, payload)
        return self.publish_event(tx, _new(event_type, payload, options))

    @overload
    def publish_alone(
        self, connection: SyncTransaction, event_type: str, payload: Payload, **options: Unpack[EventOptions]
    ) -> EventEnvelope: ...
    @overload
    def publish_alone(
        self, connection: AsyncAlone, event_type: str, payload: Payload, **options: Unpack[EventOptions]
    ) -> Coroutine[Any, Any, EventEnvelope]: ...
    @overload
    def publish_alone(
        self, connection: SyncTransaction, event: TypedEvent, /, **options: Unpack[EventOptions]
    ) -> EventEnvelope: ...
    @overload
    def publish_alone(
        self, connection: AsyncAlone, event: TypedEvent, /, **options: Unpack[EventOptions]
    ) -> Coroutine[Any, Any, EventEnvelope]: ...
    def publish_alone(
        self, connection: Any, event_type: Any, payload: Any = _NONE, **options: Unpack[EventOptions]
    ) -> Any:
        """Publish one event without a change that it belongs to, in a statement that commits by itself.

        The connection has no open transaction and begins none: an asyncpg connection or pool, or a connection of
        psycopg or Django in autocommit mode.
        """
        if payload is not _NONE:
            _refuse_payload(event_type)
            if not options and self._is_plain:
                return self._run_plain(connection, event_type, payload, alone=True)
        event = _of_class(connection, event_type, options) if payload is _NONE else _new(event_type, payload, options)
        if event.key is not None:
            raise FieldError("key", "is given to publish_alone", "publish events with a key in a transaction")
        return self._run(connection, self._steps.publish(event), alone=True)

    @overload
    def publish_event(self, tx: SyncTransaction, event: NewEvent | TypedEvent) -> EventEnvelope: ...
    @overload
    def publish_event(
        self, tx: AsyncTransaction, event: NewEvent | TypedEvent
    ) -> Coroutine[Any, Any, EventEnvelope]: ...
    def publish_event(self, tx: Any, event: NewEvent | TypedEvent) -> Any:
        """Publish an event that was made before and return its envelope."""
        return self._run(tx, self._steps.publish(event))

    @property
    def _is_plain(self) -> bool:
        """Whether events without options have nothing but a type and a payload."""
        return not self._traced and current_context.get() is None

    def row_of(self, event: NewEvent | TypedEvent) -> OutboxRow:
        """Return the row that publishing the event at this moment writes."""
        return self._steps.row(require_event(event))

    @overload
    def publish_many(self, tx: SyncTransaction, events: Iterable[NewEvent | TypedEvent]) -> list[UUID]: ...
    @overload
    def publish_many(
        self, tx: AsyncTransaction, events: Iterable[NewEvent | TypedEvent]
    ) -> Coroutine[Any, Any, list[UUID]]: ...
    def publish_many(self, tx: Any, events: Iterable[NewEvent | TypedEvent]) -> Any:
        """Publish thousands of events in few statements and return their ids. All are checked before one is written.

        Only the database knows whether an `event_id` is taken: then the others are written, and an error is raised.
        """
        return self._run(tx, self._steps.publish_many(_several(events)), "publish_many")

    @overload
    def publish_rows(self, tx: SyncTransaction, events: Iterable[NewEvent | TypedEvent]) -> list[OutboxRow]: ...
    @overload
    def publish_rows(
        self, tx: AsyncTransaction, events: Iterable[NewEvent | TypedEvent]
    ) -> Coroutine[Any, Any, list[OutboxRow]]: ...
    def publish_rows(self, tx: Any, events: Iterable[NewEvent | TypedEvent]) -> Any:
        """Do what `publish_many` does, and return the rows as they were written."""
        return self._run(tx, self._steps.publish_rows(_several(events)), "publish_rows")

    @overload
    def cancel(self, tx: SyncTransaction, key: str) -> bool: ...
    @overload
    def cancel(self, tx: AsyncTransaction, key: str) -> Coroutine[Any, Any, bool]: ...
    def cancel(self, tx: Any, key: str) -> Any:
        """Cancel the pending event that was published with `key` and return whether there was one."""
        return self._run(tx, self._steps.cancel(key), "cancel")

    @overload
    def reschedule(
        self, tx: SyncTransaction, key: str, *, delay: Delay | None = None, available_at: datetime | None = None
    ) -> bool: ...
    @overload
    def reschedule(
        self, tx: AsyncTransaction, key: str, *, delay: Delay | None = None, available_at: datetime | None = None
    ) -> Coroutine[Any, Any, bool]: ...
    def reschedule(self, tx: Any, key: str, *, delay: Delay | None = None, available_at: datetime | None = None) -> Any:
        """Move the pending event that was published with `key` to another time and return whether there was one."""
        return self._run(tx, self._steps.reschedule(key, delay, available_at), "reschedule")

    def bind(self, tx: AsyncTransaction) -> BoundPublisher:
        """Return an `EventPublisher` for code that must not know about transactions."""
        return BoundPublisher(self, tx)

    def _run_plain(self, tx: Any, event_type: str, payload: Payload, *, alone: bool = False) -> Any:
        driver = driver_of(tx)
        if driver.run is not run_asyncpg:
            return self._run(tx, self._steps.publish_plain(event_type, payload), alone=alone)
        if alone:
            require_alone(tx, driver)
        else:
            driver.require_transaction(tx)
        return self._publish_plain(tx, driver, event_type, payload)

    async def _publish_plain(self, tx: Any, driver: Driver, event_type: str, payload: Payload) -> EventEnvelope:
        """Publish an event without options by means of asyncpg: as the steps do, and without what they cost."""
        row, envelope = self._steps.plain(event_type, payload)
        if row.generation is None:
            row = await self._run_async(tx, driver, self._steps.placed(row))
        try:
            await tx.fetchval(self._queries.asyncpg("publish_plain").sql, *row)
        except Exception as error:
            if (refusal := self._refusal(error)) is error:
                raise
            raise refusal from error
        return self._steps.recorded(row, envelope)

    _publish_plain.__qualname__ = "publish"  # the name in Python's warning if it is never awaited

    def _run(self, tx: Any, steps: Steps[T], method: str = "publish", *, alone: bool = False) -> Any:
        driver = driver_of(tx)
        if alone:
            require_alone(tx, driver)
        else:
            driver.require_transaction(tx)
        if driver.asynchronous:
            coroutine = self._run_async(tx, driver, steps)
            # Of this name Python warns if it is never awaited.
            coroutine.__qualname__ = method  # type: ignore[attr-defined]
            return coroutine
        answer: object = None
        while True:
            try:
                command = steps.send(answer)
            except StopIteration as end:
                return end.value
            try:
                answer = driver.run(tx, self._queries, command.statement, command.values)
            except BaseException as error:
                steps.throw(self._refusal(error))

    async def _run_async(self, tx: Any, driver: Driver, steps: Steps[T]) -> T:
        run = driver.run
        answer: object = None
        while True:
            try:
                command = steps.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                answer = await run(tx, self._queries, command.statement, command.values)
            except BaseException as error:
                steps.throw(self._refusal(error))

    def _refusal(self, error: BaseException) -> BaseException:
        """Return what an error of the database means for a producer, if that is known; the error itself otherwise."""
        refusal = refusal_of(error, self._queries.schema) if isinstance(error, Exception) else None
        if refusal is None:
            return error
        refusal.__cause__ = error
        return refusal


def _new(event_type: str, payload: Payload, options: EventOptions) -> NewEvent:
    try:
        return NewEvent(event_type, payload, **options)
    except TypeError as error:
        raise unknown_option(options) or error from None


def _several(events: Iterable[NewEvent | TypedEvent]) -> Iterable[NewEvent | TypedEvent]:
    # A pydantic model is iterable, over its fields; so is a payload.
    if not isinstance(events, Iterable) or isinstance(events, str | Mapping | NewEvent) or is_typed_event(events):
        remedy = "pass a list of NewEvent, or of objects of event classes; for one event, use publish"
        raise FieldError("events", f"is {type(events).__name__}", remedy)
    return events


def _refuse_payload(event: object) -> None:
    """Refuse an event that is made already in place of an event type, beside a payload."""
    if isinstance(event, NewEvent | EventEnvelope) or is_typed_event(event):
        problem = f"is given beside an object of {type(event).__name__}, which has its own"
        raise FieldError("payload", problem, "write publish(tx, event), or publish(tx, event_type, payload)")


def _of_class(tx: object, event: Any, options: EventOptions) -> NewEvent:
    if isinstance(tx, str):
        remedy = "write publish(tx, event_type, payload), with the connection or session of your transaction"
        raise FieldError("tx", "is missing", remedy)
    if isinstance(event, str):
        raise FieldError("payload", "is missing", "pass a dict, a pydantic model or a dataclass")
    if isinstance(event, NewEvent):
        raise FieldError("event_type", "is a NewEvent", "write publish_event(tx, event)")
    if isinstance(event, EventEnvelope):
        raise FieldError("event_type", "is an EventEnvelope", "write bind(tx).publish(envelope)")
    return NewEvent.of(event, **options)


class BoundPublisher:
    """A publisher and the transaction it writes to, as the protocol `EventPublisher`."""

    def __init__(self, publisher: Publisher, tx: AsyncTransaction) -> None:
        self._publisher = publisher
        self._tx = tx

    async def publish(self, envelope: EventEnvelope) -> None:
        """Publish an event in the transaction; the publisher must have its source."""
        event = NewEvent.from_envelope(envelope)
        if envelope.source != self._publisher.source:
            raise FieldError("source", f"is not {self._publisher.source!r}", "publish with that source's publisher")
        await self._publisher.publish_event(self._tx, event)
