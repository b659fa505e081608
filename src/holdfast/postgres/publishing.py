"""The steps of publishing: what a publisher asks of the database, whichever driver carries it there."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

from pydantic_core import from_json

from holdfast.checks import whole
from holdfast.context import current_context
from holdfast.deprecation import warn_if_deprecated
from holdfast.encoding import PayloadObject
from holdfast.envelope import EventEnvelope
from holdfast.errors import FieldError
from holdfast.generation import environment_generation, worker_generation
from holdfast.ids import uuid7, uuid7s
from holdfast.measurements import published
from holdfast.new_event import NewEvent, require_event
from holdfast.observing import DirectObservers, is_sampled
from holdfast.outbox_row import Origin, OutboxRow, PlainRow, envelope_of, inherited_headers, origin, plain, prepare
from holdfast.outcome import Delay, delay_seconds
from holdfast.payload import encode, encode_payload
from holdfast.telemetry import LONGEST_CORRELATION, Fact, Notice, Published, trace_id_of
from holdfast.tracing import Span, Tracing
from holdfast.typed_events import TypedEvent

# A dict, a pydantic model or a dataclass, with values as docs/payloads.md lists them.
Payload: TypeAlias = dict[str, Any] | PayloadObject

# A statement with a hundred thousand rows would stall every other session for long.
_MOST_ROWS = 5_000
# How long the database's current generation counts, in seconds. A deployment takes longer.
_CURRENT_FOR = 1.0
# The defaults that publish_many in publish.sql fills in.
_DEFAULTS: dict[str, str | None] = {"event_version": "1", "content_class": "operations", "priority": "1"}

T = TypeVar("T")
# A trace context and headers, for events that have none.
Inherited: TypeAlias = tuple[str | None, dict[str, str] | None]
Written: TypeAlias = tuple[list[UUID], list[OutboxRow]]


class Command(NamedTuple):
    """A statement to run, with its values."""

    statement: str
    values: Mapping[str, object]


# Yields the statements to run, one at a time, and is sent the answer to each. The same steps serve every driver.
Steps = Generator[Command, Any, T]


def log_notice(fact: Fact) -> None:
    """The default observer of a publisher: it has one thing to say, that an event type is past its deadline."""
    if isinstance(fact, Notice):
        import structlog  # slow to import, and rarely needed

        getattr(structlog.get_logger("holdfast"), fact.level)(fact.name, **fact.details)


class PublishingSteps:
    """The steps of one publisher's methods, and the generation and channel of its events."""

    def __init__(
        self,
        source: str,
        schema: str,
        generation: int | None,
        channel: str | None,
        payload_limit: int,
        observe: DirectObservers,
        tracing: Tracing | None = None,
    ) -> None:
        self._observe = observe
        self._reported = observe.share(Published)  # of the events, by their ids
        self._source = source
        self._schema = schema
        self._channel = channel
        self._generation = generation
        self._fallback = environment_generation() if generation is None else generation
        self._current: tuple[int | None, float] = None, 0.0  # the database's own, and until when that counts
        self._origins = {self._fallback: origin(source, self._fallback, self._channel)}
        self._payload_limit = whole("payload_limit", payload_limit, 1)
        self._tracing = tracing

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
            found = self._origins[generation] = origin(self._source, generation, self._channel)
        return found

    def _look_up(self) -> Steps[Origin]:
        """Ask the database for its current generation."""
        generation = int((yield Command("read_current_generation", {})))
        self._current = generation, time.monotonic() + _CURRENT_FOR
        return self._origin_of(generation)

    def publish(self, given: NewEvent | TypedEvent) -> Steps[EventEnvelope]:
        """Write one event, unless a pending one holds its key."""
        event = require_event(given)
        identity = event.event_id or uuid7()
        if self._tracing is None:
            return (yield from self._publish(event, identity, self._inherited()))
        with self._tracing.publish([event], identity) as span:
            return (yield from self._publish(event, identity, self._inherited(span)))

    def _publish(self, event: NewEvent, identity: UUID, inherited: Inherited) -> Steps[EventEnvelope]:
        now = datetime.now(UTC)
        text, payload = encode(event.payload, self._payload_limit)
        origin = self._origin
        row = self.row(event, inherited, now.isoformat(), identity, origin, text)
        envelope = envelope_of(event, payload, row, identity, now)
        if origin.generation is None:
            origin = yield from self._look_up()
            row = row._replace(generation=origin.generation, channel=row.channel or origin.channel)
        if event.key is not None:
            holder = yield self._hold_key(event, row)
            if holder != row.id:
                return envelope.model_copy(update={"event_id": UUID(str(holder))})
        if event.event_id is None:
            yield Command("publish_one", row._asdict())
        elif not (yield Command("publish_given", self._columns([row], row.occurred_at, origin))):
            raise _taken(str(identity))
        published.add(event.event_type)
        if self._reported:
            self._report(identity, event.event_type, origin, row)
        return envelope

    def publish_plain(self, event_type: str, payload: Payload) -> Steps[EventEnvelope]:
        """Write one event without options and outside of a handler, in the shortest way."""
        row, envelope = self.plain(event_type, payload)
        if row.generation is None:
            row = yield from self.placed(row)
        yield Command("publish_plain", row._asdict())
        return self.recorded(row, envelope)

    def placed(self, row: PlainRow) -> Steps[PlainRow]:
        """Return the row with the database's current generation, and the channel of that."""
        origin = yield from self._look_up()
        return row._replace(generation=origin.generation, channel=origin.channel)

    def plain(self, event_type: str, payload: Payload) -> tuple[PlainRow, EventEnvelope]:
        """Return row and envelope of an event without options; without a generation it has to be looked up."""
        found = plain(event_type, payload, self._origin, self._payload_limit)
        warn_if_deprecated(event_type, self._observe)
        return found

    def recorded(self, row: PlainRow, envelope: EventEnvelope) -> EventEnvelope:
        """Count and report an event without options, after it was written. Returns its envelope."""
        published.add(row.event_type)
        if self._reported:
            self._report(envelope.event_id, row.event_type, row)
        return envelope

    def publish_many(self, given: Iterable[NewEvent | TypedEvent]) -> Steps[list[UUID]]:
        """Check all events, then write them in few statements. Returns their ids."""
        events = [event if type(event) is NewEvent else require_event(event) for event in given]
        if self._tracing is None and current_context.get() is None and all(event.is_plain for event in events):
            return (yield from self._write_plain(events))
        return (yield from self._publish_all(events))[0]

    def publish_rows(self, given: Iterable[NewEvent | TypedEvent]) -> Steps[list[OutboxRow]]:
        """Do the same, and return the rows."""
        return (yield from self._publish_all(given))[1]

    def _publish_all(self, given: Iterable[NewEvent | TypedEvent]) -> Steps[Written]:
        events = [require_event(event) for event in given]
        if self._tracing is None or not events:
            return (yield from self._write(events, self._inherited()))
        with self._tracing.publish(events) as span:
            return (yield from self._write(events, self._inherited(span)))

    def _write_plain(self, events: Sequence[NewEvent]) -> Steps[list[UUID]]:
        """Write events without options and outside of a handler: their rows are three columns."""
        now = datetime.now(UTC).isoformat()
        types = [event.event_type for event in events]
        counts = Counter(types)
        for event_type in counts:
            warn_if_deprecated(event_type, self._observe)
        limit = self._payload_limit
        payloads = [encode_payload(event.payload, limit) for event in events]
        ids = uuid7s(len(events))
        origin = self._origin
        if events and origin.generation is None:
            origin = yield from self._look_up()
        shared = {
            "now": now,
            "source": origin.source,
            "channel": origin.channel,
            "generation": origin.generation,
        }
        for start in range(0, len(events), _MOST_ROWS):
            chunk = slice(start, start + _MOST_ROWS)
            columns: dict[str, object] = {
                "id": list(map(str, ids[chunk])),
                "event_type": types[chunk],
                "payload": payloads[chunk],
            }
            yield Command("publish_many_plain", shared | columns)
            if self._reported:
                for identity, event_type in zip(ids[chunk], types[chunk], strict=True):
                    self._report(identity, event_type, origin)
        for event_type, count in counts.items():
            published.add(event_type, count)
        return ids

    def _write(self, events: Sequence[NewEvent], shared: Inherited) -> Steps[Written]:
        now = datetime.now(UTC).isoformat()
        for event in events:
            if event.key is not None:
                raise FieldError("key", "is given to publish_many", "publish events with a key one by one")
        ids = [event.event_id or uuid7() for event in events]
        origin = self._origin
        rows = [self.row(event, shared, now, identity, origin) for event, identity in zip(events, ids, strict=True)]
        given_ids = [event.event_id for event in events if event.event_id is not None]
        if len(set(given_ids)) < len(given_ids):
            raise _taken(next(str(each) for each, times in Counter(given_ids).items() if times > 1))
        statement = "publish_given" if given_ids else "publish_many"
        if rows and origin.generation is None:
            origin = yield from self._look_up()
        for start in range(0, len(rows), _MOST_ROWS):
            chunk = rows[start : start + _MOST_ROWS]
            written = yield Command(statement, self._columns(chunk, now, origin))
            if given_ids and written != len(chunk):
                raise _some_taken(len(chunk) - written, len(chunk))
            if self._reported:
                for identity, row in zip(ids[start : start + _MOST_ROWS], chunk, strict=True):
                    self._report(identity, row.event_type, origin, row)
        for event_type, count in Counter(event.event_type for event in events).items():
            published.add(event_type, count)
        return ids, rows

    def _report(self, identity: UUID, event_type: str, origin: Origin | PlainRow, row: OutboxRow | None = None) -> None:
        """Report an event that was recorded, if it is among those to report; one without options has no row here."""
        if not is_sampled(identity, self._reported):
            return
        generation = None if origin.generation is None else int(origin.generation)
        if row is None:
            fact = Published(identity, event_type, origin.source, None, None, generation, str(identity), None)
        else:
            headers = from_json(row.headers) if row.headers else {}
            correlation = (headers.get("correlation_id") or row.id)[:LONGEST_CORRELATION]
            domain_id = None if row.domain_id is None else UUID(row.domain_id)
            trace_id = trace_id_of(row.trace_context)
            fact = Published(
                identity, event_type, row.source, row.target, domain_id, generation, correlation, trace_id
            )  # fmt: skip
        self._observe(fact)

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
        return self.row(NewEvent("holdfast.check", {}, key=key, delay=delay, available_at=available_at))

    def cancel(self, key: str) -> Steps[bool]:
        """Cancel the pending event that holds the key."""
        return self._move(Command("outbox_cancel", {"source": self._source, "key": self._keyed(key).dedupe_key}))

    def reschedule(self, key: str, delay: Delay | None, available_at: datetime | None) -> Steps[bool]:
        """Move the pending event that holds the key to another time."""
        row = self._keyed(key, delay=delay, available_at=available_at)
        values = {"source": self._source, "key": row.dedupe_key, "available_at": row.available_at, "delay": row.delay}
        return self._move(Command("reschedule_key", values))

    def _move(self, command: Command) -> Steps[bool]:
        moved = yield command
        return bool(moved)

    def _hold_key(self, event: NewEvent, row: OutboxRow) -> Command:
        values: dict[str, object] = {
            "source": row.source,
            "key": row.dedupe_key,
            "id": row.id,
            "reschedule": "true" if event.on_duplicate == "reschedule" else "false",
            "available_at": row.available_at,
            "delay": None if event.delay is None else str(delay_seconds(event.delay)),
        }
        return Command("hold_key", values)

    def row(
        self,
        event: NewEvent,
        shared: Inherited | None = None,
        now: str | None = None,
        identity: UUID | None = None,
        origin: Origin | None = None,
        encoded: str | None = None,
    ) -> OutboxRow:
        """Return the row of an event."""
        warn_if_deprecated(event.event_type, self._observe)
        trace_context, inherited = shared or self._inherited()
        source = origin or self._origin
        return prepare(event, source, self._payload_limit, trace_context, inherited, now, identity, encoded)

    def _inherited(self, span: Span | None = None) -> Inherited:
        """Return trace context and headers for events that have none: of the span, or of the event being handled."""
        cause = current_context.get()
        own = None if span is None else span.trace_context
        if cause is None:
            return own, None
        return own or cause.trace_context, inherited_headers(cause.event_id, cause.headers)


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
