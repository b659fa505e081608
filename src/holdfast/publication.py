"""A new event on its way into the outbox: everything is checked here, before any SQL.

An error inside SQL would abort the caller's transaction; one raised here leaves it usable.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, Self
from uuid import UUID

from holdfast.deprecation import warn_if_deprecated
from holdfast.envelope import EventEnvelope, uuid7
from holdfast.errors import FieldError
from holdfast.outcome import Delay, delay_seconds
from holdfast.payload import PAYLOAD_LIMIT, encode_payload

HEADERS_LIMIT = 16 * 1024
MAX_HEADERS = 64

_LONGEST_NAME = 200
_LONGEST_TEXT = 255
_LARGEST_GENERATION = 2**63 - 1
_LARGEST_VERSION = 2**31 - 1
_NAME = re.compile(r"[!-)+-.0-~]{1,200}").fullmatch
_TEXT = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+").fullmatch
_CHANNEL = re.compile(r"[a-z_][a-z0-9_]{0,62}").fullmatch
_UNSCHEDULED = (None, None, None, None)
# Stored inside the headers, but with arguments of their own.
_NAMED_HEADERS = ("correlation_id", "causation_id")

# What the database accepts: a day less at both ends, so that every time zone can show the moment.
_EARLIEST = datetime(1, 1, 2, tzinfo=UTC)
_LATEST = datetime(9999, 12, 31, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class NewEvent:
    """What publish takes besides the transaction.

    `delay` and `expires_in` count from the database's clock at publishing, `available_at` and
    `expires_at` are moments. `key` names a pending event, to cancel or reschedule it later.

    >>> NewEvent("order.placed", {"order_id": "o-1"}, delay=60).priority
    1
    """

    event_type: str
    payload: dict[str, Any] = field(repr=False)
    _: KW_ONLY
    event_id: UUID | None = None
    event_version: int = 1
    occurred_at: datetime | None = None
    target: str | None = None
    domain_id: UUID | None = None
    idempotency_key: str | None = None
    trace_context: str | None = None
    content_class: str = "operations"
    channel: str | None = None
    headers: Mapping[str, str] | None = None
    correlation_id: str | None = None
    causation_id: str | None = None
    ordering_key: str | None = None
    priority: int = 1
    delay: Delay | None = None
    available_at: datetime | None = None
    expires_in: Delay | None = None
    expires_at: datetime | None = None
    key: str | None = None
    on_duplicate: Literal["ignore", "reschedule"] = "ignore"

    def __post_init__(self) -> None:
        # One `is None` for each argument that is usually left out: this runs on every publish.
        _require_name(self, "event_type")
        _require_name(self, "content_class")
        if self.target is not None:
            _require_name(self, "target")
        if self.idempotency_key is not None:
            _require_text(self, "idempotency_key")
        if self.trace_context is not None:
            _require_text(self, "trace_context")
        if self.correlation_id is not None:
            _require_text(self, "correlation_id")
        if self.causation_id is not None:
            _require_text(self, "causation_id")
        if self.ordering_key is not None:
            _require_text(self, "ordering_key")
        if self.key is not None:
            _require_text(self, "key")
        if self.event_id is not None:
            _require_uuid("event_id", self.event_id)
        if self.domain_id is not None:
            _require_uuid("domain_id", self.domain_id)
        if self.event_version != 1 or type(self.event_version) is not int:
            _require_int("event_version", self.event_version, 1, _LARGEST_VERSION, "start at 1 and count up")
        if self.priority != 1 or type(self.priority) is not int:
            _require_int("priority", self.priority, 0, 2, "use 0 for urgent, 1 for normal, 2 for low")
        if self.occurred_at is not None:
            _moment("occurred_at", self.occurred_at)
        if self.channel is not None:
            _require_channel(self.channel)
        if self.headers is not None:
            _require_headers(self.headers)
        if self.on_duplicate != "ignore":
            self._check_on_duplicate()
        if (self.delay, self.available_at, self.expires_in, self.expires_at) != _UNSCHEDULED:
            self._check_schedule()

    @classmethod
    def from_envelope(cls, envelope: EventEnvelope, **options: Any) -> Self:
        """The event of an envelope; `options` are further arguments, or replace the envelope's fields."""
        fields = {name: getattr(envelope, name) for name in EventEnvelope.model_fields if name != "source"}
        return cls(**(fields | options))

    def _check_on_duplicate(self) -> None:
        if self.on_duplicate != "reschedule":
            raise FieldError("on_duplicate", "is unknown", 'use "ignore" or "reschedule"')
        if self.key is None:
            raise FieldError("on_duplicate", "has no key to compare", "give key= as well")

    def _check_schedule(self) -> None:
        for relative, absolute in (("delay", "available_at"), ("expires_in", "expires_at")):
            if getattr(self, relative) is not None and getattr(self, absolute) is not None:
                raise FieldError(relative, f"is given together with {absolute}", "give one of the two")
        now = datetime.now(UTC)
        opens = _when("delay", self.delay, "available_at", self.available_at, now) or now
        closes = _when("expires_in", self.expires_in, "expires_at", self.expires_at, now)
        if closes is not None and closes <= max(opens, now):
            name = "expires_at" if self.expires_in is None else "expires_in"
            raise FieldError(name, "ends before the event is available", "let it expire later")


def _when(relative: str, delay: Delay | None, absolute: str, moment: datetime | None, now: datetime) -> datetime | None:
    if delay is not None:
        return now + timedelta(seconds=_seconds(relative, delay))
    return None if moment is None else _moment(absolute, moment)


def _require_name(event: NewEvent, name: str) -> None:
    value = getattr(event, name)
    if type(value) is not str or not _NAME(value):
        object.__setattr__(event, name, _checked_name(name, value))


def _checked_name(name: str, value: object) -> str:
    text = _checked_text(name, value)
    remedy = "write dotted lower case, like order.placed"
    # Bytes, not characters: two names and a key must fit into one index entry.
    if len(text.encode()) > _LONGEST_NAME:
        raise FieldError(name, f"has more than {_LONGEST_NAME} bytes", "choose a shorter name")
    if not text.isprintable() or any(char.isspace() or char in "/*" for char in text):
        raise FieldError(name, "contains white space, '/', '*' or something unprintable", remedy)
    return text


def _require_text(event: NewEvent, name: str) -> None:
    value = getattr(event, name)
    if type(value) is not str or not 0 < len(value) <= _LONGEST_TEXT or not _TEXT(value):
        object.__setattr__(event, name, _checked_text(name, value))


def _checked_text(name: str, value: object, longest: int = _LONGEST_TEXT) -> str:
    if not isinstance(value, str):
        raise FieldError(name, f"is {type(value).__name__}, not str", "pass text")
    if not value:
        raise FieldError(name, "is empty", "pass text of at least one character")
    if len(value) > longest:
        raise FieldError(name, f"has {len(value)} characters, {longest} are allowed", "shorten or hash it")
    if not _TEXT(value):
        remedy = "remove control characters, NUL and lone surrogates"
        raise FieldError(name, "contains a character that cannot be stored", remedy)
    # An enum member is a str too, but drivers would write its name instead of its value.
    return str.__str__(value)


def _require_uuid(name: str, value: object) -> None:
    if not isinstance(value, UUID):
        raise FieldError(name, f"is {type(value).__name__}, not UUID", "pass uuid.UUID(value)")


def _require_int(name: str, value: object, low: int, high: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(name, f"is {type(value).__name__}, not int", remedy)
    if not low <= value <= high:
        raise FieldError(name, f"is outside {low} to {high}", remedy)


def _require_channel(channel: object) -> None:
    if not isinstance(channel, str) or not _CHANNEL(channel):
        remedy = "use 1 to 63 lower-case letters, digits and _, not starting with a digit"
        raise FieldError("channel", "is not a channel name", remedy)


def _moment(name: str, value: datetime) -> datetime:
    if not isinstance(value, datetime):
        raise FieldError(name, f"is {type(value).__name__}, not datetime", "pass an aware datetime")
    if value.utcoffset() is None:
        raise FieldError(name, "has no time zone", "pass an aware datetime, like datetime.now(UTC)")
    if not _EARLIEST <= value < _LATEST:
        raise FieldError(name, "is outside the years 1 to 9999", "pass a moment that a calendar can show")
    return value.astimezone(UTC)


def _seconds(name: str, value: Delay) -> float:
    try:
        return delay_seconds(value)
    except ValueError as error:
        remedy = "give seconds or a timedelta between zero and ten years"
        raise FieldError(name, str(error), remedy) from None


def _require_headers(headers: Mapping[str, str]) -> None:
    if not isinstance(headers, Mapping):
        raise FieldError("headers", f"is {type(headers).__name__}, not a mapping", "pass a dict of text")
    if len(headers) > MAX_HEADERS:
        raise FieldError("headers", f"has {len(headers)} entries", f"keep to {MAX_HEADERS}")
    for name, value in headers.items():
        if name in _NAMED_HEADERS:
            raise FieldError(f"headers.{name}", "has an argument of its own", f"use {name}=")
        text = _checked_text("headers", name)
        _checked_text(f"headers.{text}", value, longest=HEADERS_LIMIT)
    _encoded_headers(headers)


def _encoded_headers(headers: Mapping[str, str]) -> str:
    text = json.dumps(dict(headers), ensure_ascii=False)
    size = len(text.encode())
    if size > HEADERS_LIMIT:
        problem = f"has {size} bytes of JSON with what it inherits, {HEADERS_LIMIT} are allowed"
        raise FieldError("headers", problem, "put the data into the payload")
    return text


class OutboxRow(NamedTuple):
    """What the library writes of an event: every column as text, cast in SQL; None is the default.

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
    dedupe_key: str | None
    expires_at: str | None
    expires_in: str | None

    def __repr__(self) -> str:
        return f"OutboxRow(id={self.id!r}, event_type={self.event_type!r})"  # payloads stay out of logs


class Origin(NamedTuple):
    """What is the same for all events of a publisher, checked once."""

    source: str
    generation: str
    channel: str


def origin(source: str, generation: int, channel: str) -> Origin:
    """Check where events come from and where they go by default."""
    _require_int("generation", generation, 0, _LARGEST_GENERATION, "pass the number of the deployment, 0 without")
    _require_channel(channel)
    return Origin(_checked_name("source", source), str(int(generation)), channel)


def prepare(
    event: NewEvent,
    origin: Origin,
    payload_limit: int = PAYLOAD_LIMIT,
    trace_context: str | None = None,
    inherited: Mapping[str, str] | None = None,
    now: str | None = None,
    identity: UUID | None = None,
) -> OutboxRow:
    """Check what is left to check and turn an event into its row.

    `trace_context` applies where the event has none; `inherited` are headers of the event that is being handled,
    see `inherited_headers`; `now` is the time for events that do not say when they occurred, `identity` the id of one
    that has none.
    """
    warn_if_deprecated(event.event_type)
    row_id = str(identity or event.event_id or uuid7())
    headers = _headers_of(event, inherited)
    # By position: naming twenty-one fields would cost more than everything else here.
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
            encode_payload(event.payload, payload_limit),
            event.idempotency_key or row_id,
            event.trace_context or trace_context,
            None if headers is None else _encoded_headers(headers),
            None if event.available_at is None else _iso(event.available_at),
            None if event.delay is None else f"{delay_seconds(event.delay):.6f}",
            "1" if event.priority == 1 else str(int(event.priority)),
            event.ordering_key,
            event.key,
            None if event.expires_at is None else _iso(event.expires_at),
            None if event.expires_in is None else f"{delay_seconds(event.expires_in):.6f}",
        )
    )


def envelope_of(event: NewEvent, row: OutboxRow, identity: UUID, now: datetime) -> EventEnvelope:
    """The envelope under which handlers will see the event of a row that was prepared with `identity` and `now`."""
    return EventEnvelope.trusted(
        {
            "event_id": identity,
            "event_type": event.event_type,
            "event_version": event.event_version,
            "occurred_at": event.occurred_at or now,
            "source": row.source,
            "target": event.target,
            "domain_id": event.domain_id,
            "payload": event.payload,
            "idempotency_key": row.idempotency_key,
            "trace_context": row.trace_context,
        }
    )


def plain(
    event_type: str, payload: dict[str, Any], origin: Origin, payload_limit: int = PAYLOAD_LIMIT
) -> tuple[dict[str, str], EventEnvelope]:
    """An event that has nothing but a type and a payload, as most do, and that no other event caused: the columns which
    the database does not fill in itself, and its envelope. The checks are the same, without the twenty columns.
    """
    if type(event_type) is not str or not _NAME(event_type):
        event_type = _checked_name("event_type", event_type)
    warn_if_deprecated(event_type)
    identity, now = uuid7(), datetime.now(UTC)
    row_id = str(identity)
    columns = {
        "id": row_id,
        "event_type": event_type,
        "occurred_at": now.isoformat(),
        "source": origin.source,
        "channel": origin.channel,
        "generation": origin.generation,
        "payload": encode_payload(payload, payload_limit),
    }
    envelope = {
        "event_id": identity,
        "event_type": event_type,
        "event_version": 1,
        "occurred_at": now,
        "source": origin.source,
        "target": None,
        "domain_id": None,
        "payload": payload,
        "idempotency_key": row_id,
        "trace_context": None,
    }
    return columns, EventEnvelope.trusted(envelope)


def inherited_headers(event_id: UUID, headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers that events published while handling this one inherit.

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
