"""Checks of the attributes of CloudEvents that a broker delivers; each error names the attribute that is wrong."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import quote
from uuid import UUID

from pydantic_core import from_json

from holdfast.checks import LONGEST_TEXT, moment, storable, text, whole
from holdfast.errors import RemediedError
from holdfast.names import LONGEST_NAME, event_name, is_plain_event_name
from holdfast.new_event import HEADERS_LIMIT, LONGEST_KEY, MAX_HEADERS, encoded_headers

T = TypeVar("T")
Attributes: TypeAlias = dict[str, Any]

HEADERS: Final = "hfheaders"
# The attribute with the relay's signature: see signing.py.
SIGNATURE: Final = "hfsignature"

_LARGEST_INTEGER: Final = 2**31 - 1
# Characters that names in the outbox may have besides letters and digits.
_PLAIN: Final = "!\"#$%&'()+,-.:;<=>?@[\\]^_`{|}~"
# The punctuation of a timestamp as relays write it, 2025-03-01T12:00:00.000001Z: these skip the slower pattern.
_OURS: Final = ("-", "T", ".", "Z")
_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d):(\d\d)(?:\.(\d+))?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


class CloudEventError(RemediedError):
    """A message cannot be read as an event, or an event cannot be written as a CloudEvent."""


def json_value(what: str, content: bytes) -> Any:
    """Return the value of a JSON text."""
    try:
        return from_json(content, allow_inf_nan=False)
    except ValueError:
        raise CloudEventError(f"{what} is no JSON that can be read", "send JSON in UTF-8") from None


def refusal(field: str, problem: str, remedy: str) -> CloudEventError:
    """Return the error for an attribute: the `error` argument of the checks in holdfast.checks."""
    return CloudEventError(f"{field} {problem}", remedy)


def required(given: Attributes, name: str) -> str:
    """Return an attribute that CloudEvents requires."""
    value = given.get(name)
    if not isinstance(value, str) or not storable(value):
        raise CloudEventError(f"{name} is missing, empty or no text", "send what CloudEvents 1.0 requires")
    return value


def optional(given: Attributes, name: str, check: Callable[[str, object], T]) -> T | None:
    """Return an attribute after its check, or None where the event has none."""
    value = given.get(name)
    return None if value is None else check(name, value)


def name_attribute(field: str, value: object) -> str:
    """Return an attribute of a relay's event that has to be a name."""
    if type(value) is str and is_plain_event_name(value):
        return value
    return event_name(field, value, error=refusal, composed=False)


def key_attribute(field: str, value: object) -> str:
    """Return an ordering key or a fairness key."""
    key = text(field, value, LONGEST_KEY, error=refusal)
    if len(key.encode()) > LONGEST_KEY:
        raise CloudEventError(f"{field} has more than {LONGEST_KEY} bytes", "shorten or hash it")
    return key


def as_name(value: str) -> str:
    """Return a foreign type or source as a name for the outbox; characters that it refuses are percent-encoded."""
    if is_plain_event_name(value):
        return value
    name = quote(value, safe=_PLAIN)
    if len(name) > LONGEST_NAME:
        digest = hashlib.sha256(value.encode()).hexdigest()[:32]
        name = f"{name[: LONGEST_NAME - 33]}~{digest}"
    return name


def uuid_of(value: object) -> UUID | None:
    """Return the UUID that a text spells, or None for any other value."""
    if not isinstance(value, str):
        return None
    try:
        return UUID(value)
    except ValueError:
        return None


def integer(given: Attributes, name: str, low: int, otherwise: int, high: int = _LARGEST_INTEGER) -> int:
    """Return an attribute that is a whole number, also when it is written as text, as in the binary mode."""
    value = given.get(name, otherwise)
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 10:
        value = int(value)
    return whole(name, value, low, high, error=refusal)


def moment_attribute(field: str, value: object) -> datetime:
    """Return a timestamp of RFC 3339."""
    if type(value) is str and len(value) == 27 and (value[7], value[10], value[19], value[26]) == _OURS:
        with contextlib.suppress(ValueError):
            return moment(field, datetime.fromisoformat(value), error=refusal)
    found = _RFC3339.fullmatch(value) if isinstance(value, str) and len(value) <= 64 else None
    if found is None:
        raise CloudEventError(f"{field} is no timestamp", "write it as RFC 3339 does, like 2025-03-01T12:00:00Z")
    day, minute, second, fraction, zone = found.groups()
    # Python has neither leap seconds nor nanoseconds.
    second, micro = ("59", "999999") if second == "60" else (second, f"{fraction or '0':0<6.6}")
    try:
        when = datetime.fromisoformat(f"{day}T{minute}:{second}.{micro}{zone.upper()}")
    except ValueError:
        raise CloudEventError(f"{field} is no moment of any calendar", "write it as RFC 3339 does") from None
    return moment(field, when, error=refusal)


def trace_context(given: Attributes) -> str | None:
    """Return the trace that an event belongs to: a traceparent, and after a space the tracestate."""
    parent, state = given.get("traceparent"), given.get("tracestate")
    # A trace that cannot be continued is no reason to refuse the event.
    if not isinstance(parent, str) or not parent or len(parent) > LONGEST_TEXT or not storable(parent):
        return None
    whole_context = f"{parent} {state}"
    usable = isinstance(state, str) and state and len(whole_context) <= LONGEST_TEXT and storable(state)
    return whole_context if usable else parent


def own_headers(given: Attributes) -> dict[str, str]:
    """Return the headers that a relay's event carries in one attribute."""
    encoded = given.get(HEADERS)
    if encoded is None:
        return {}
    found = json_value(HEADERS, encoded.encode(errors="replace")) if isinstance(encoded, str) else None
    if not isinstance(found, dict):
        raise CloudEventError(f"{HEADERS} is no JSON object", "send text for each header")
    return checked_headers(found)


def checked_headers(headers: dict[str, Any]) -> dict[str, str]:
    """Return headers that the outbox can store."""
    if len(headers) > MAX_HEADERS + 2:  # correlation and causation are stored beside those of the event
        raise CloudEventError(f"the event has {len(headers)} headers", f"keep to {MAX_HEADERS}")
    for name, value in headers.items():
        text("a header's name", name, error=refusal)
        text(f"the header {name}", value, HEADERS_LIMIT, error=refusal)
    encoded_headers(headers)
    return headers


def scalar(name: str, value: object) -> str:
    """Return an attribute's value as text; refuse lists and objects."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    raise CloudEventError(f"the attribute {name[:80]!a} is neither text nor a number", "put structures into data")
