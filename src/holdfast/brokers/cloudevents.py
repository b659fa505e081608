"""Events as CloudEvents 1.0.2, both ways.

Relays write the structured mode, or the binary mode if the broker's address asks for it. Workers read both modes, also
from foreign producers: the idempotency key of a foreign event is made of its `source` and `id`, its source begins with
`foreign:`, and data that is not a JSON object is wrapped in one. A message that cannot become an event raises a
`CloudEventError`, which never quotes data.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote
from uuid import UUID, uuid5

from holdfast.brokers.attributes import (
    HEADERS,
    SIGNATURE,
    Attributes,
    CloudEventError,
    as_name,
    checked_headers,
    integer,
    json_value,
    key_attribute,
    moment_attribute,
    name_attribute,
    optional,
    own_headers,
    refusal,
    required,
    scalar,
    trace_context,
    uuid_of,
)
from holdfast.checks import LONGEST_TEXT, text
from holdfast.envelope import EventEnvelope
from holdfast.errors import PublishError
from holdfast.payload import require_storable

STRUCTURED: Final = "application/cloudevents+json"
JSON: Final = "application/json"
SPECVERSION: Final = "1.0"
# The attribute that only relays write: how often the event was sent again on request.
CYCLE: Final = "hfcycle"
# The header of the binary mode with the signed bytes before the data, from which workers restore what was signed.
HEAD: Final = "hf-head"

_PLAIN_CLASS: Final = "operations"
_PLAIN_PRIORITY: Final = 1
# What a URI may contain besides letters and digits: a source is a URI reference.
_URI: Final = "-._~:/?#[]@!$&'()*+,;="

# Sources of foreign events begin with it, so that nobody at a broker can use the name of a real producer.
_APART: Final = "foreign:"
# Foreign events get new ids, made in this namespace from source and id: two producers may use the same id.
_FOREIGN: Final = UUID("6f6c6466-6173-5465-8c6f-756465766e74")
# The limit that the outbox itself has for every producer.
_LARGEST_PAYLOAD: Final = 512 * 1024
_PREFIXES: Final = ("ce-", "ce_", "cloudevents:", "cloudevents_")
# Attributes with a place in the envelope; every other attribute of a foreign event becomes a header.
_UNDERSTOOD: Final = frozenset(
    (
        *("specversion", "id", "source", "type", "time", "datacontenttype", "data", "data_base64", "subject"),
        *("partitionkey", "expirytime", "traceparent", "tracestate"),
    )
)
# Attributes that few events have, in the order in which `read_signed` takes them.
_SOMETIMES: Final = ("traceparent", "tracestate", "expirytime", HEADERS)
_JSON_TYPE = re.compile(r"[\w.-]+/(?:[\w.-]+\+)?json", re.IGNORECASE | re.ASCII)

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode


class CarriedEvent(NamedTuple):
    """An event as a broker carries it: the envelope, and the other columns that a row for it needs."""

    envelope: EventEnvelope
    headers: Mapping[str, str] = MappingProxyType({})
    ordering_key: str | None = None
    fairness_key: str | None = None
    priority: int = _PLAIN_PRIORITY
    content_class: str = _PLAIN_CLASS
    expires_at: datetime | None = None
    # How often the relay was asked to send the event again.
    cycle: int = 0
    foreign: bool = False


class Binding(NamedTuple):
    """How a protocol names and writes the attributes of an event in the binary mode."""

    prefix: str
    percent_encoded: bool = False


NATS: Final = Binding("ce-", percent_encoded=True)
KAFKA: Final = Binding("ce_")
AMQP: Final = Binding("cloudEvents_")


def structured(event: CarriedEvent, data: str | None = None) -> bytes:
    """Return an event as one JSON text; `data` is its payload as JSON, if the caller has it already."""
    try:
        head = _encode(_attributes(event))
        payload = _encode(event.envelope.payload) if data is None else data
        return f'{head[:-1]},"data":{payload}}}'.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _unwritable(error) from None


def binary(event: CarriedEvent, binding: Binding, data: str | None = None) -> tuple[dict[str, str], bytes]:
    """Return an event in the binary mode of a binding: its attributes as headers, its payload as JSON."""
    headers = {"content-type": JSON}
    for name, value in _attributes(event).items():
        if name != "datacontenttype":
            text = value if isinstance(value, str) else str(value)
            headers[binding.prefix + name] = quote(text, safe=_URI) if binding.percent_encoded else text
    try:
        return headers, (_encode(event.envelope.payload) if data is None else data).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _unwritable(error) from None


def divided(signed: bytes, event: CarriedEvent, binding: Binding, data: str) -> tuple[dict[str, str], bytes]:
    """Return a signed event in the binary mode, with a header from which `undivided` restores the signed bytes."""
    headers, body = binary(event, binding, data)
    headers[HEAD] = base64.b64encode(signed[: -len(body) - 1]).decode()
    return headers, body


def undivided(body: bytes, headers: Mapping[str, str]) -> tuple[bytes, Mapping[str, str]]:
    """Return the signed, structured form of a message that `divided` made; return any other message unchanged.

    The attributes among the headers are dropped: only the restored bytes are signed, so only they are read.
    """
    try:
        head = base64.b64decode(headers[HEAD], validate=True)
    except (KeyError, ValueError):
        return body, headers
    return b"".join((head, body, b"}")), {"content-type": STRUCTURED}


def decoded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers with percent-encoded attributes, as NATS has them, in plain text."""
    return {
        name: unquote(value) if "%" in value and name[:3].lower() == "ce-" else value for name, value in headers.items()
    }


def _attributes(event: CarriedEvent) -> dict[str, str | int]:
    envelope = event.envelope
    found: dict[str, str | int] = {
        "specversion": SPECVERSION,
        "id": str(envelope.event_id),
        "source": quote(envelope.source, safe=_URI),
        "type": envelope.event_type,
        "time": timestamp(envelope.occurred_at),
        "datacontenttype": JSON,
        CYCLE: event.cycle,
        "eventversion": envelope.event_version,
        "idempotencykey": envelope.idempotency_key,
    }
    if envelope.domain_id is not None:
        found["subject"] = str(envelope.domain_id)
    if envelope.target is not None:
        found["target"] = envelope.target
    if envelope.trace_context is not None:
        # After a space: the tracestate.
        found["traceparent"], _, state = envelope.trace_context.partition(" ")
        if state:
            found["tracestate"] = state
    if event.ordering_key is not None:
        found["partitionkey"] = event.ordering_key
    if event.fairness_key is not None:
        found["fairnesskey"] = event.fairness_key
    if event.priority != _PLAIN_PRIORITY:
        found["priority"] = event.priority
    if event.content_class != _PLAIN_CLASS:
        found["contentclass"] = event.content_class
    if event.expires_at is not None:
        found["expirytime"] = timestamp(event.expires_at)
    if event.headers:
        # All headers in one attribute: CloudEvents allows only lower-case letters and digits in attribute names.
        found[HEADERS] = _encode(dict(event.headers))
    return found


def timestamp(moment: datetime) -> str:
    """Return a moment as RFC 3339 writes it."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _unwritable(error: Exception) -> CloudEventError:
    problem = f"the event cannot be written as JSON ({type(error).__name__})"
    return CloudEventError(problem, "publish values that docs/payloads.md lists")


def read(body: bytes, headers: Mapping[str, str], *, now: datetime, apart: Callable[[str], str] = str) -> CarriedEvent:
    """Return the event of a message in either mode; `now` is the time of an event without one.

    Protocols that percent-encode pass `decoded_headers`. `apart` makes the idempotency and ordering keys of foreign
    events, so that they never equal those of published events.
    """
    try:
        given, payload = _parsed(body, headers)
        if given.pop("specversion", None) != SPECVERSION:
            raise CloudEventError("the message is no CloudEvent of version 1.0", "send specversion 1.0")
        # The rules of the outbox: a payload that it would refuse when the event is parked is refused here.
        require_storable(payload, _LARGEST_PAYLOAD)
        return _ours(given, payload) if CYCLE in given else _foreign(given, payload, now, apart)
    except PublishError as error:
        raise CloudEventError(f"{error.field} {error.problem}", error.remedy) from None


def read_signed(body: bytes) -> CarriedEvent:
    """Return the event of a message that a relay has signed, without the checks of `read`.

    Its values come from a row, so the database has checked them; checking them again would cost as much as the rest
    of taking a message.
    """
    try:
        given = json_value("the message", body)
        found = given.get
        source, subject = given["source"], found("subject")
        trace, state, expires_at, headers = (found(name) for name in _SOMETIMES)
        envelope = EventEnvelope.trusted(
            {
                "event_id": UUID(given["id"]),
                "event_type": given["type"],
                "event_version": given["eventversion"],
                "occurred_at": datetime.fromisoformat(given["time"]),
                "source": unquote(source) if "%" in source else source,
                "target": found("target"),
                "domain_id": None if subject is None else UUID(subject),
                "payload": given["data"],
                "idempotency_key": given["idempotencykey"],
                "trace_context": trace if state is None else f"{trace} {state}",
            }
        )
        return CarriedEvent(
            envelope,
            {} if headers is None else json.loads(headers),
            found("partitionkey"),
            found("fairnesskey"),
            found("priority", _PLAIN_PRIORITY),
            found("contentclass", _PLAIN_CLASS),
            None if expires_at is None else datetime.fromisoformat(expires_at),
            given[CYCLE],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"the relay has signed an event that this release cannot read ({type(error).__name__})"
        raise CloudEventError(problem, "upgrade workers before relays") from None


def _parsed(body: bytes, headers: Mapping[str, str]) -> tuple[Attributes, dict[str, Any]]:
    """Return the attributes of an event and its payload."""
    if headers.get("content-type") == STRUCTURED:
        return _parsed_structured(body)
    content_type, found = None, {}
    for name, value in headers.items():
        lower = name.lower()
        if lower in ("content-type", "cloudevents:datacontenttype", "cloudevents_datacontenttype"):
            content_type = value
        elif lower.startswith(_PREFIXES):
            found[lower[_after_prefix(lower) :]] = value
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind.startswith("application/cloudevents"):
        if kind != STRUCTURED:
            raise CloudEventError(f"the message is of the type {kind[:80]}", f"send {STRUCTURED}, one event in each")
    elif "specversion" in found:
        if content_type is not None:
            found["datacontenttype"] = content_type
        return found, _payload_of_bytes(body, kind or None)
    return _parsed_structured(body)


def _after_prefix(name: str) -> int:
    return next(len(prefix) for prefix in _PREFIXES if name.startswith(prefix))


def _parsed_structured(body: bytes) -> tuple[Attributes, dict[str, Any]]:
    found = json_value("the message", body)
    if not isinstance(found, dict):
        raise CloudEventError("the message is no JSON object", "send a CloudEvent in the JSON format")
    if None in found.values():  # the same as absent
        found = {name: value for name, value in found.items() if value is not None}
    if "data_base64" in found:
        if "data" in found:
            raise CloudEventError("the event has data and data_base64", "send one of the two")
        try:
            content = base64.b64decode(found["data_base64"], validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise CloudEventError("data_base64 is no base64", "encode the data anew") from None
        kind = found.get("datacontenttype")
        return found, _payload_of_bytes(content, kind.partition(";")[0] if isinstance(kind, str) else JSON)
    if "data" not in found:
        return found, {}
    data = found["data"]
    return found, data if isinstance(data, dict) else {"data": data}


def _payload_of_bytes(content: bytes, kind: str | None) -> dict[str, Any]:
    if not content:
        return {}
    if kind is not None and _JSON_TYPE.fullmatch(kind.strip()):
        data = json_value("data", content)
    else:
        try:
            data = content.decode()
        except UnicodeDecodeError:
            return {"data_base64": base64.b64encode(content).decode()}
        if "\0" in data:
            return {"data_base64": base64.b64encode(content).decode()}
    return data if isinstance(data, dict) else {"data": data}


def _ours(given: Attributes, payload: dict[str, Any]) -> CarriedEvent:
    try:
        identity = UUID(given["id"])
        subject = given.get("subject")
        domain_id = None if subject is None else UUID(subject)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CloudEventError("id or subject is no UUID", f"leave out {CYCLE} in events of other systems") from None
    source = required(given, "source")
    envelope = EventEnvelope.trusted(
        {
            "event_id": identity,
            "event_type": name_attribute("type", given.get("type")),
            "event_version": integer(given, "eventversion", 1, 1),
            "occurred_at": moment_attribute("time", given.get("time")),
            "source": name_attribute("source", unquote(source) if "%" in source else source),
            "target": optional(given, "target", name_attribute),
            "domain_id": domain_id,
            "payload": payload,
            "idempotency_key": text("idempotencykey", given.get("idempotencykey", str(identity)), error=refusal),
            "trace_context": trace_context(given),
        }
    )
    return CarriedEvent(
        envelope,
        headers=own_headers(given),
        ordering_key=optional(given, "partitionkey", key_attribute),
        fairness_key=optional(given, "fairnesskey", key_attribute),
        priority=integer(given, "priority", 0, _PLAIN_PRIORITY, 2),
        content_class=optional(given, "contentclass", name_attribute) or _PLAIN_CLASS,
        expires_at=optional(given, "expirytime", moment_attribute),
        cycle=integer(given, CYCLE, 0, 0),
    )


def _foreign(given: Attributes, payload: dict[str, Any], now: datetime, apart: Callable[[str], str]) -> CarriedEvent:
    if SIGNATURE in given:
        raise CloudEventError(f"the event has {SIGNATURE} and no {CYCLE}", f"leave out {SIGNATURE}: relays write it")
    source, identity, kind = (required(given, name) for name in ("source", "id", "type"))
    if any(char.isspace() for char in source):
        raise CloudEventError("source is no URI reference", "write spaces as %20")
    # A source has no space, so two different pairs of source and id never make the same key.
    key = f"{source} {identity}"
    named = apart(key)
    ordering_key = optional(given, "partitionkey", key_attribute)
    headers = {name: scalar(name, value) for name, value in given.items() if name not in _UNDERSTOOD}
    headers |= {"ce_source": source, "ce_id": identity}
    subject = given.get("subject")
    domain_id = uuid_of(subject)
    if subject is not None and domain_id is None:
        headers["subject"] = scalar("subject", subject)
    name = as_name(kind)
    if name != kind:
        headers["ce_type"] = kind
    envelope = EventEnvelope.trusted(
        {
            "event_id": uuid5(_FOREIGN, key),
            "event_type": name,
            "event_version": 1,
            "occurred_at": optional(given, "time", moment_attribute) or now,
            "source": as_name(f"{_APART}{source}"),
            "target": None,
            "domain_id": domain_id,
            "payload": payload,
            "idempotency_key": named if len(named) <= LONGEST_TEXT else hashlib.sha256(named.encode()).hexdigest(),
            "trace_context": trace_context(given),
        }
    )
    return CarriedEvent(
        envelope,
        headers=checked_headers(headers),
        # Made apart too: a foreign dead letter at the head of a published key would block its events.
        ordering_key=None if ordering_key is None else apart(ordering_key),
        expires_at=optional(given, "expirytime", moment_attribute),
        foreign=True,
    )
