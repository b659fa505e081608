"""A new event on its way into the outbox: everything is checked here, before any SQL.

An error inside SQL would abort the caller's transaction; one raised here leaves it usable.
"""

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, Self, TypedDict, Unpack
from uuid import UUID

from holdfast.checks import LONGEST_TEXT, instance, moment, storable, text, whole
from holdfast.encoding import PayloadObject
from holdfast.envelope import EventEnvelope
from holdfast.errors import FieldError
from holdfast.names import channel_name, event_name, is_plain_event_name
from holdfast.outcome import Delay, require_delay
from holdfast.typed_events import TypedEvent, declared_type, is_typed_event

HEADERS_LIMIT = 16 * 1024
MAX_HEADERS = 64

LONGEST_KEY = 800  # bytes of an ordering key or a fairness key

OnDuplicate = Literal["ignore", "reschedule"]

_LARGEST_VERSION = 2**31 - 1
_UNSCHEDULED = (None, None, None, None)
# Headers that have arguments of their own, and cannot be given as headers.
_NAMED_HEADERS = ("correlation_id", "causation_id")


class EventOptions(TypedDict, total=False):
    """The options of `publish` and `NewEvent` besides event type and payload; `NewEvent` has their defaults."""

    event_id: UUID | None
    event_version: int
    occurred_at: datetime | None
    target: str | None
    domain_id: UUID | None
    idempotency_key: str | None
    trace_context: str | None
    content_class: str
    channel: str | None
    headers: Mapping[str, str] | None
    correlation_id: str | None
    causation_id: str | None
    ordering_key: str | None
    fairness_key: str | None
    priority: int
    delay: Delay | None
    available_at: datetime | None
    expires_in: Delay | None
    expires_at: datetime | None
    key: str | None
    on_duplicate: OnDuplicate


_set = object.__setattr__  # fills the fields of a frozen event while it is made


@dataclass(frozen=True, init=False)
class NewEvent:
    """An event to publish, with all its options.

    `delay` and `expires_in` count from the database's clock at publishing, `available_at` and
    `expires_at` are moments. `key` names a pending event, to cancel or reschedule it later.

    >>> NewEvent("order.placed", {"order_id": "o-1"}, delay=60).priority
    1
    """

    event_type: str
    payload: dict[str, Any] | PayloadObject = field(repr=False)
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
    fairness_key: str | None = None
    priority: int = 1
    delay: Delay | None = None
    available_at: datetime | None = None
    expires_in: Delay | None = None
    expires_at: datetime | None = None
    key: str | None = None
    on_duplicate: OnDuplicate = "ignore"

    # Whether it has nothing but a type and a payload, as most events do.
    is_plain: ClassVar[bool] = True

    # Options that are left out stay attributes of the class: to set and to check all of them would take longer than
    # everything else that publish_many does for an event.
    def __init__(
        self, event_type: str, payload: dict[str, Any] | PayloadObject, **options: Unpack[EventOptions]
    ) -> None:
        _set(self, "event_type", event_type)
        _set(self, "payload", payload)
        if type(event_type) is not str or not is_plain_event_name(event_type):
            _refuse_class(event_type)
            _require_name(self, "event_type")
        if options:
            _set(self, "is_plain", False)
            for name, value in options.items():
                if name not in EventOptions.__annotations__:
                    raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}")
                _set(self, name, value)
            self._check_options()

    def _check_options(self) -> None:
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
            _require_key(self, "ordering_key")
        if self.fairness_key is not None:
            _require_key(self, "fairness_key")
            if self.ordering_key is not None:
                remedy = "give one of the two: events in order are in turn over their keys already"
                raise FieldError("fairness_key", "is given together with ordering_key", remedy)
        if self.key is not None:
            _require_text(self, "key")
        if self.event_id is not None:
            _require_uuid("event_id", self.event_id)
        if self.domain_id is not None:
            _require_uuid("domain_id", self.domain_id)
        if self.event_version != 1 or type(self.event_version) is not int:
            remedy = "start at 1 and count up"
            whole("event_version", self.event_version, 1, _LARGEST_VERSION, remedy=remedy, error=FieldError)
        if self.priority != 1 or type(self.priority) is not int:
            remedy = "use 0 for urgent, 1 for normal, 2 for low"
            whole("priority", self.priority, 0, 2, remedy=remedy, error=FieldError)
        if self.occurred_at is not None:
            moment("occurred_at", self.occurred_at, error=FieldError)
        if self.channel is not None:
            channel_name("channel", self.channel, error=FieldError)
        if self.headers is not None:
            _require_headers(self.headers)
        if self.on_duplicate != "ignore":
            self._check_on_duplicate()
        if (self.delay, self.available_at, self.expires_in, self.expires_at) != _UNSCHEDULED:
            self._check_schedule()

    @classmethod
    def of(cls, event: TypedEvent, **options: Unpack[EventOptions]) -> Self:
        """Return the event for an object of an event class: the class declares the type, the object is the payload."""
        if isinstance(event, type):
            raise FieldError("event", f"is the class {event.__name__}", "pass an object of it")
        event_type, version = declared_type(type(event))
        fields: dict[str, Any] = {"event_version": version, **options}
        try:
            return cls(event_type, event, **fields)  # type: ignore[arg-type]
        except TypeError as error:
            raise unknown_option(options) or error from None

    @classmethod
    def from_envelope(cls, envelope: EventEnvelope, **options: Unpack[EventOptions]) -> Self:
        """Return the event of an envelope; `options` are added, or replace the envelope's fields."""
        instance("envelope", envelope, EventEnvelope, "pass an EventEnvelope", error=FieldError)
        fields: dict[str, Any] = {
            name: getattr(envelope, name) for name in EventEnvelope.model_fields if name != "source"
        }
        fields.update(options)
        try:
            return cls(**fields)
        except TypeError as error:
            raise unknown_option(options) or error from None

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


def require_event(event: object) -> NewEvent:
    """Return the event to publish for a `NewEvent` or an object of an event class; refuse any other value."""
    if type(event) is not NewEvent and is_typed_event(event):
        return NewEvent.of(event)
    remedy = 'pass NewEvent("order.placed", {...}), or an object of an event class'
    return instance("event", event, NewEvent, remedy, error=FieldError)


def unknown_option(options: Mapping[str, object]) -> FieldError | None:
    """Return the error for the first unknown name among `options`; it suggests the most similar known one."""
    unknown = next((name for name in options if name not in EventOptions.__annotations__), None)
    if unknown is None:
        return None
    nearest = get_close_matches(unknown, EventOptions.__annotations__, n=1)
    remedy = f"write {nearest[0]}=" if nearest else f"use one of {', '.join(EventOptions.__annotations__)}"
    return FieldError(unknown, "is not an option of an event", remedy)


def _when(relative: str, delay: Delay | None, absolute: str, at: datetime | None, now: datetime) -> datetime | None:
    if delay is not None:
        return now + timedelta(seconds=require_delay(relative, delay, error=FieldError))
    return None if at is None else moment(absolute, at, error=FieldError)


def _refuse_class(value: object) -> None:
    """Refuse an event class, or an object of one, where the type alone is meant."""
    if isinstance(value, type) or is_typed_event(value):
        cls, is_one = (value, "is the class") if isinstance(value, type) else (type(value), "is an object of")
        remedy = (
            f"write {cls.__name__}.event_type" if isinstance(getattr(cls, "event_type", None), str) else "pass text"
        )
        raise FieldError("event_type", f"{is_one} {cls.__name__}", remedy)


def _require_name(event: NewEvent, name: str) -> None:
    value = getattr(event, name)
    if type(value) is not str or not is_plain_event_name(value):
        _set(event, name, event_name(name, value, error=FieldError))


def _require_text(event: NewEvent, name: str) -> None:
    value = getattr(event, name)
    if type(value) is not str or not 0 < len(value) <= LONGEST_TEXT or not storable(value):
        _set(event, name, text(name, value, error=FieldError))


def _require_key(event: NewEvent, name: str) -> None:
    _require_text(event, name)
    length = len(getattr(event, name).encode())
    if length > LONGEST_KEY:
        remedy = f"keep to {LONGEST_KEY}: use the id of what must be in order, or a hash of it"
        raise FieldError(name, f"has {length} bytes", remedy)


def _require_uuid(name: str, value: object) -> None:
    if not isinstance(value, UUID):
        raise FieldError(name, f"is {type(value).__name__}, not UUID", "pass uuid.UUID(value)")


def _require_headers(headers: Mapping[str, str]) -> None:
    if not isinstance(headers, Mapping):
        raise FieldError("headers", f"is {type(headers).__name__}, not a mapping", "pass a dict of text")
    if len(headers) > MAX_HEADERS:
        raise FieldError("headers", f"has {len(headers)} entries", f"keep to {MAX_HEADERS}")
    for name, value in headers.items():
        if name in _NAMED_HEADERS:
            raise FieldError(f"headers.{name}", "has an argument of its own", f"use {name}=")
        header = text("headers", name, error=FieldError)
        text(f"headers.{header}", value, HEADERS_LIMIT, error=FieldError)
    encoded_headers(headers)


def encoded_headers(headers: Mapping[str, str]) -> str:
    """Return headers as JSON; refuse headers that are too long."""
    encoded = json.dumps(dict(headers), ensure_ascii=False)
    size = len(encoded.encode())
    if size > HEADERS_LIMIT:
        problem = f"has {size} bytes of JSON with what it inherits, {HEADERS_LIMIT} are allowed"
        raise FieldError("headers", problem, "put the data into the payload")
    return encoded
