"""The row of an event: what a publisher writes into the outbox, checked to the end before any SQL."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from holdfast.checks import LARGEST, whole
from holdfast.envelope import EventEnvelope
from holdfast.errors import FieldError
from holdfast.ids import uuid7
from holdfast.names import channel_name, event_name, is_plain_event_name
from holdfast.new_event import NewEvent, encoded_headers
from holdfast.outcome import delay_seconds
from holdfast.payload import PAYLOAD_LIMIT, encode, encode_payload
from holdfast.settings import channel_of


class OutboxRow(NamedTuple):
    """The columns of an event that a publisher writes: each as text, cast in SQL; None is the column's default.

    `delay` and `expires_in` are seconds which the database adds to its own clock. A tuple, because thousands of
    rows become columns of one statement.
    """

    id: str
    event_type: str
    event_version: str
    occurred_at: str
    source: str
    target: str | None
    content_class: str
    channel: str | None
    generation: str | None
    domain_id: str | None
    payload: str
    idempotency_key: str
    trace_context: str | None
    headers: str | None
    available_at: str | None
    delay: str | None
    priority: str
    ordering_key: str | None
    fairness_key: str | None
    dedupe_key: str | None
    expires_at: str | None
    expires_in: str | None

    def __repr__(self) -> str:
        return f"OutboxRow(id={self.id!r}, event_type={self.event_type!r})"  # payloads stay out of logs


class Origin(NamedTuple):
    """The columns that are the same for all events of a publisher, checked once."""

    source: str
    generation: str | None
    channel: str | None


def origin(source: str, generation: int | None = None, channel: str | None = None) -> Origin:
    """Check the source of a publisher's events, the generation that publishes them and their default channel.

    Without a generation the database fills in its current one; without a channel it is the generation's own.
    """
    if generation is not None:
        remedy = "pass the number of the deployment, 0 without"
        whole("generation", generation, 0, LARGEST, remedy=remedy, error=FieldError)
        channel = channel_of(int(generation)) if channel is None else channel
    if channel is not None:
        channel_name("channel", channel, error=FieldError)
    number = None if generation is None else str(int(generation))
    return Origin(event_name("source", source, error=FieldError), number, channel)


def prepare(
    event: NewEvent,
    origin: Origin,
    payload_limit: int = PAYLOAD_LIMIT,
    trace_context: str | None = None,
    inherited: Mapping[str, str] | None = None,
    now: str | None = None,
    identity: UUID | None = None,
    encoded: str | None = None,
) -> OutboxRow:
    """Return the row of an event; its payload and its headers are checked here.

    `trace_context` applies where the event has none; `inherited` are headers of the event that is being handled,
    see `inherited_headers`; `now` is the time for events that do not say when they occurred, `identity` the id of one
    that has none; `encoded` is the payload, if it was encoded and checked before.
    """
    row_id = str(identity or event.event_id or uuid7())
    headers = _headers_of(event, inherited)
    # By position: naming twenty-two fields would cost more than everything else here.
    return OutboxRow._make(
        (
            row_id,
            event.event_type,
            "1" if event.event_version == 1 else str(int(event.event_version)),
            _iso(event.occurred_at) if event.occurred_at else now or _iso(datetime.now(UTC)),
            origin.source,
            event.target,
            event.content_class,
            event.channel or origin.channel,
            origin.generation,
            None if event.domain_id is None else str(event.domain_id),
            encode_payload(event.payload, payload_limit) if encoded is None else encoded,
            event.idempotency_key or row_id,
            event.trace_context or trace_context,
            None if headers is None else encoded_headers(headers),
            None if event.available_at is None else _iso(event.available_at),
            None if event.delay is None else f"{delay_seconds(event.delay):.6f}",
            "1" if event.priority == 1 else str(int(event.priority)),
            event.ordering_key,
            event.fairness_key,
            event.key,
            None if event.expires_at is None else _iso(event.expires_at),
            None if event.expires_in is None else f"{delay_seconds(event.expires_in):.6f}",
        )
    )


def envelope_of(
    event: NewEvent, payload: dict[str, Any], row: OutboxRow, identity: UUID, now: datetime
) -> EventEnvelope:
    """Return the envelope that handlers get for a row that was prepared with `identity` and `now`."""
    return EventEnvelope.trusted(
        {
            "event_id": identity,
            "event_type": event.event_type,
            "event_version": event.event_version,
            "occurred_at": event.occurred_at or now,
            "source": row.source,
            "target": event.target,
            "domain_id": event.domain_id,
            "payload": payload,
            "idempotency_key": row.idempotency_key,
            "trace_context": row.trace_context,
        }
    )


class PlainRow(NamedTuple):
    """The columns of an event that has a type and a payload only: those that the database does not fill in itself.

    They stand in the order of the statement `publish_plain`.
    """

    id: str
    event_type: str
    occurred_at: str
    source: str
    channel: str | None
    generation: str | None
    payload: str


def plain(
    event_type: str, payload: object, origin: Origin, payload_limit: int = PAYLOAD_LIMIT
) -> tuple[PlainRow, EventEnvelope]:
    """Return row and envelope of an event that has a type and a payload only, as most do, and no event as cause.

    The checks are the same as for other events.
    """
    if type(event_type) is not str or not is_plain_event_name(event_type):
        event_type = event_name("event_type", event_type, error=FieldError)
    identity, now = uuid7(), datetime.now(UTC)
    row_id = str(identity)
    text, values = encode(payload, payload_limit)
    source, generation, channel = origin
    row = PlainRow(row_id, event_type, now.isoformat(), source, channel, generation, text)
    envelope = {
        "event_id": identity,
        "event_type": event_type,
        "event_version": 1,
        "occurred_at": now,
        "source": source,
        "target": None,
        "domain_id": None,
        "payload": values,
        "idempotency_key": row_id,
        "trace_context": None,
    }
    return row, EventEnvelope.trusted(envelope)


def inherited_headers(event_id: UUID, headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers for events that are published while this one is handled.

    The correlation id names the first event of the chain, the causation id the one being handled.
    """
    inherited = dict(headers or ())
    inherited["correlation_id"] = inherited.get("correlation_id") or str(event_id)
    inherited["causation_id"] = str(event_id)
    return inherited


def _headers_of(event: NewEvent, inherited: Mapping[str, str] | None) -> dict[str, str] | None:
    if inherited is None and event.headers is None and event.correlation_id is None and event.causation_id is None:
        return None
    headers = dict(inherited or ())
    if event.headers is not None:
        headers.update(event.headers)
    if event.correlation_id is not None:
        headers["correlation_id"] = event.correlation_id
    if event.causation_id is not None:
        headers["causation_id"] = event.causation_id
    return headers or None


def _iso(moment: datetime) -> str:
    return (moment if moment.tzinfo is UTC else moment.astimezone(UTC)).isoformat()
