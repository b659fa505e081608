"""Publishing: events are written in the caller's transaction, and exist if and only if it commits.

    publisher = Publisher(source="shop")

    async with connection.transaction():
        await connection.execute("INSERT INTO orders ...")
        await publisher.publish(connection, "order.placed", {"order_id": 17})

With a synchronous connection or session the same methods are called without `await`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, Unpack, overload
from uuid import UUID

import structlog

from holdfast.checks import whole
from holdfast.context import current_context
from holdfast.deprecation import warn_if_deprecated
from holdfast.encoding import PayloadObject
from holdfast.envelope import EventEnvelope
from holdfast.errors import FieldError
from holdfast.generation import environment_generation, worker_generation
from holdfast.ids import uuid7
from holdfast.new_event import EventOptions, NewEvent, require_event, unknown_option
from holdfast.outbox_row import Origin, OutboxRow, envelope_of, inherited_headers, origin, plain, prepare
from holdfast.outcome import Delay, delay_seconds
from holdfast.payload import PAYLOAD_LIMIT, encode
from holdfast.postgres.drivers import (
    AsyncAlone,
    AsyncTransaction,
    Driver,
    SyncTransaction,
    driver_of,
    require_alone,
)
from holdfast.postgres.queries import Queries
from holdfast.postgres.refusals import refusal_of
from holdfast.telemetry import Notice
from holdfast.typed_events import TypedEvent

# A dict, a pydantic model or a dataclass, with values as docs/payloads.md lists them.
Payload: TypeAlias = dict[str, Any] | PayloadObject
_NONE: Final = object()

T = TypeVar("T")

# A statement with a hundred thousand rows would stall every other session for long.
_MOST_ROWS = 5_000
# How long the database's current generation counts, in seconds. A deployment takes longer.
_CURRENT_FOR = 1.0
# The defaults that publish_many in publish.sql fills in.
_DEFAULTS: dict[str, str | None] = {"event_version": "1", "content_class": "operations", "priority": "1"}


class _Command(NamedTuple):
    statement: str
    values: Mapping[str, object]


# Yields the statements to run, one at a time, and is sent the answer to each. The same steps serve every driver.
_Steps = Generator[_Command, Any, T]

_logger = structlog.get_logger("holdfast")


def _log(notice: Notice) -> None:
    getattr(_logger, notice.level)(notice.name, **notice.details)


class Publisher:
    """Writes events into the outbox. It holds no connection and no state: make one per source and share it.

    Without `generation`, events get that of the worker in this process, else that of `HOLDFAST_GENERATION`, else the
    current one of the database, which is looked up at most once a second: a program that writes to several databases
    makes a publisher for each.
    """

    def __init__(
        self,
        source: str,
        *,
        schema: str = "core",
        generation: int | None = None,
        channel: str | None = None,
        payload_limit: int = PAYLOAD_LIMIT,
    ) -> None:
        self.source = source
        self._queries = Queries(schema)
        self._schema = schema
        self._channel = channel or None
        self._generation = generation
        self._fallback = environment_generation() if generation is None else generation
        self._current: tuple[int | None, float] = None, 0.0  # the database's own, and until when that counts
        self._origins = {self._fallback: origin(source, self._fallback, self._channel)}
        self._payload_limit = whole("payload_limit", payload_limit, 1)

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
            return self.publish_event(tx, _of_class(event_type, options))
        if not options and current_context.get() is None:
            return self._run(tx, self._publish_plain(event_type, payload))
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
        event = _of_class(event_type, options) if payload is _NONE else _new(event_type, payload, options)
        if event.key is not None:
            raise FieldError("key", "is given to publish_alone", "publish events with a key in a transaction")
        return self._run(connection, self._publish(event), alone=True)

    @overload
    def publish_event(self, tx: SyncTransaction, event: NewEvent) -> EventEnvelope: ...
    @overload
    def publish_event(self, tx: AsyncTransaction, event: NewEvent) -> Coroutine[Any, Any, EventEnvelope]: ...
    def publish_event(self, tx: Any, event: NewEvent) -> Any:
        """Publish an event that was made before and return its envelope."""
        return self._run(tx, self._publish(event))

    def row_of(self, event: NewEvent) -> OutboxRow:
        """Return the row that publishing the event at this moment writes."""
        return self._row(require_event(event))

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
        if not isinstance(events, Iterable):
            raise FieldError("events", f"is {type(events).__name__}", "pass a list of NewEvent")
        return self._run(tx, self._publish_many(events))

    @overload
    def cancel(self, tx: SyncTransaction, key: str) -> bool: ...
    @overload
    def cancel(self, tx: AsyncTransaction, key: str) -> Coroutine[Any, Any, bool]: ...
    def cancel(self, tx: Any, key: str) -> Any:
        """Cancel the pending event that was published with `key` and return whether there was one."""
        values = {"source": self.source, "key": self._keyed(key).dedupe_key}
        return self._run(tx, self._move(_Command("outbox_cancel", values)))

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
        row = self._keyed(key, delay=delay, available_at=available_at)
        values = {"source": self.source, "key": row.dedupe_key, "available_at": row.available_at, "delay": row.delay}
        return self._run(tx, self._move(_Command("reschedule_key", values)))

    def bind(self, tx: AsyncTransaction) -> BoundPublisher:
        """Return an `EventPublisher` for code that must not know about transactions."""
        return BoundPublisher(self, tx)

    @property
    def _origin(self) -> Origin:
        """The columns that are the same for all events which are published at this moment, as far as they are known."""
        generation = self._fallback
        if self._generation is None:
            served = worker_generation(self._schema)
            generation = generation if served is None else served
            if generation is None and time.monotonic() < self._current[1]:
                generation = self._current[0]
        return self._origin_of(generation)

    def _origin_of(self, generation: int | None) -> Origin:
        found = self._origins.get(generation)
        if found is None:
            found = self._origins[generation] = origin(self.source, generation, self._channel)
        return found

    # --- the steps ------------------------------------------------------------------------------------

    def _run(self, tx: Any, steps: _Steps[T], *, alone: bool = False) -> Any:
        driver = driver_of(tx)
        if alone:
            require_alone(tx, driver)
        else:
            driver.require_transaction(tx)
        if driver.asynchronous:
            return self._run_async(tx, driver, steps)
        answer: object = None
        while True:
            try:
                command = steps.send(answer)
            except StopIteration as end:
                return end.value
            try:
                answer = driver.run(tx, self._queries, command.statement, command.values)
            except Exception as error:
                if (refusal := refusal_of(error, self._queries.schema)) is not None:
                    raise refusal from error
                raise

    async def _run_async(self, tx: Any, driver: Driver, steps: _Steps[T]) -> T:
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
            except Exception as error:
                if (refusal := refusal_of(error, self._queries.schema)) is not None:
                    raise refusal from error
                raise

    def _look_up(self) -> _Steps[Origin]:
        """Ask the database for its current generation."""
        generation = int((yield _Command("read_current_generation", {})))
        self._current = generation, time.monotonic() + _CURRENT_FOR
        return self._origin_of(generation)

    def _publish(self, event: NewEvent) -> _Steps[EventEnvelope]:
        identity, now = require_event(event).event_id or uuid7(), datetime.now(UTC)
        text, payload = encode(event.payload, self._payload_limit)
        origin = self._origin
        row = self._row(event, None, now.isoformat(), identity, origin, text)
        envelope = envelope_of(event, payload, row, identity, now)
        if origin.generation is None:
            origin = yield from self._look_up()
            row = row._replace(generation=origin.generation, channel=row.channel or origin.channel)
        if event.key is not None:
            holder = yield self._hold_key(event, row)
            if holder != row.id:
                return envelope.model_copy(update={"event_id": UUID(str(holder))})
        if event.event_id is None:
            yield _Command("publish_one", row._asdict())
        elif not (yield _Command("publish_given", self._columns([row], row.occurred_at, origin))):
            raise _taken(str(identity))
        return envelope

    def _publish_plain(self, event_type: str, payload: Payload) -> _Steps[EventEnvelope]:
        origin = self._origin
        columns, envelope = plain(event_type, payload, origin, self._payload_limit)
        warn_if_deprecated(event_type, _log)
        if origin.generation is None:
            origin = yield from self._look_up()
            columns |= {"generation": origin.generation, "channel": origin.channel}
        yield _Command("publish_plain", columns)
        return envelope

    def _publish_many(self, given: Iterable[NewEvent | TypedEvent]) -> _Steps[list[UUID]]:
        now = datetime.now(UTC).isoformat()
        events = [require_event(event) for event in given]
        for event in events:
            if event.key is not None:
                raise FieldError("key", "is given to publish_many", "publish events with a key one by one")
        ids = [event.event_id or uuid7() for event in events]
        shared, origin = self._inherited(), self._origin
        rows = [self._row(event, shared, now, identity, origin) for event, identity in zip(events, ids, strict=True)]
        given_ids = [event.event_id for event in events if event.event_id is not None]
        if len(set(given_ids)) < len(given_ids):
            raise _taken(next(str(each) for each, times in Counter(given_ids).items() if times > 1))
        statement = "publish_given" if given_ids else "publish_many"
        if rows and origin.generation is None:
            origin = yield from self._look_up()
        for start in range(0, len(rows), _MOST_ROWS):
            chunk = rows[start : start + _MOST_ROWS]
            written = yield _Command(statement, self._columns(chunk, now, origin))
            if given_ids and written != len(chunk):
                raise _some_taken(len(chunk) - written, len(chunk))
        return ids

    def _columns(self, rows: Sequence[OutboxRow], now: str, origin: Origin) -> dict[str, object]:
        """Return the rows as columns. A column of defaults only, as most are, is left to the statement."""
        columns = dict(zip(OutboxRow._fields, map(list, zip(*rows, strict=True)), strict=True))
        defaults = _DEFAULTS | {"occurred_at": now, "channel": origin.channel}
        values: dict[str, object] = {
            name: None if column.count(defaults.get(name)) == len(rows) else column for name, column in columns.items()
        }
        if columns["idempotency_key"] == columns["id"]:
            values["idempotency_key"] = None
        return values | {
            "now": now,
            "default_channel": origin.channel,
            "source": origin.source,
            "generation": origin.generation,
        }

    def _keyed(self, key: str, *, delay: Delay | None = None, available_at: datetime | None = None) -> OutboxRow:
        """Return the row of an event with these values, so that they are checked like those of any event."""
        if key is None:
            raise FieldError("key", "is None", "pass the key that the event was published with")
        return self._row(NewEvent("holdfast.check", {}, key=key, delay=delay, available_at=available_at))

    def _move(self, command: _Command) -> _Steps[bool]:
        moved = yield command
        return bool(moved)

    def _hold_key(self, event: NewEvent, row: OutboxRow) -> _Command:
        values: dict[str, object] = {
            "source": row.source,
            "key": row.dedupe_key,
            "id": row.id,
            "reschedule": "true" if event.on_duplicate == "reschedule" else "false",
            "available_at": row.available_at,
            "delay": None if event.delay is None else str(delay_seconds(event.delay)),
        }
        return _Command("hold_key", values)

    def _row(
        self,
        event: NewEvent,
        shared: tuple[str | None, dict[str, str] | None] | None = None,
        now: str | None = None,
        identity: UUID | None = None,
        origin: Origin | None = None,
        encoded: str | None = None,
    ) -> OutboxRow:
        if event.ordering_key is not None:
            raise FieldError("ordering_key", "is not supported by this version", "leave it out")
        warn_if_deprecated(event.event_type, _log)
        trace_context, inherited = shared or self._inherited()
        source = origin or self._origin
        return prepare(event, source, self._payload_limit, trace_context, inherited, now, identity, encoded)

    def _inherited(self) -> tuple[str | None, dict[str, str] | None]:
        """Return trace context and headers of the event that is being handled, if one is."""
        cause = current_context.get()
        if cause is None:
            return None, None
        return cause.trace_context, inherited_headers(cause.event_id, cause.headers)


def _taken(identity: str) -> FieldError:
    return FieldError(
        "event_id",
        f"{identity} is taken: an event with this id was published before",
        "publish each envelope once; for a new event with the same content, leave event_id out",
    )


def _some_taken(missing: int, count: int) -> FieldError:
    return FieldError(
        "event_id",
        f"is taken for {missing} of {count} events, and the others are written",
        "roll back, or publish only envelopes that were not published before",
    )


def _new(event_type: str, payload: Payload, options: EventOptions) -> NewEvent:
    try:
        return NewEvent(event_type, payload, **options)
    except TypeError as error:
        raise unknown_option(options) or error from None


def _of_class(event: Any, options: EventOptions) -> NewEvent:
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
        await self._publisher._run(self._tx, self._publisher._publish(event))
