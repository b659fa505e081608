"""The envelope that producers and handlers share, the ids of events, and the JSON text of a payload."""

import json
import os
import re
import time
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from enum import Enum
from math import isfinite
from threading import Lock
from typing import Annotated, Any, TypeAlias
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from holdfast.errors import FieldError, PayloadError

PAYLOAD_LIMIT = 256 * 1024
MAX_DEPTH = 100

_Text = Annotated[str, Field(min_length=1)]


class EventEnvelope(BaseModel):
    """What a handler receives: ten fields, the same on every transport.

    Fields that a newer producer adds are ignored, so old consumers keep working.
    """

    # A refused payload must not surface in logs through the error that refuses it.
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    event_id: UUID
    event_type: _Text
    event_version: Annotated[int, Field(ge=1)]
    occurred_at: AwareDatetime
    source: _Text
    target: str | None = None
    domain_id: UUID | None = None
    payload: dict[str, Any] = Field(repr=False)
    idempotency_key: _Text
    trace_context: str | None = None

    def __hash__(self) -> int:
        return hash(self.event_id)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RANDOM_BITS = 74
_RANDOM = (1 << _RANDOM_BITS) - 1
_POOL_BYTES = 10 * 400
_VERSION_AND_VARIANT = 0x7 << 76 | 0b10 << 62
_LOW = (1 << 62) - 1
# A step this long keeps neighbouring ids unguessable and leaves room for 2^42 of them in one millisecond.
_STEP = (1 << 32) - 1


class _Clockwork:
    """Strictly increasing values of 48 bits of milliseconds and 74 random bits."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last = 0
        self._pool = b""
        self._used = 0

    def next(self, milliseconds: int) -> int:
        with self._lock:
            used = self._used
            if used >= len(self._pool):
                # One system call for hundreds of ids: a call for each would cost more than the rest.
                self._pool = os.urandom(_POOL_BYTES)
                used = 0
            self._used = used + 10
            random = int.from_bytes(self._pool[used : used + 10], "big") & _RANDOM
            value = milliseconds << _RANDOM_BITS | random
            if value <= self._last:
                # The same millisecond, or the clock was set back: go on from the last id.
                value = self._last + 1 + (random & _STEP)
            self._last = value
            return value


_clockwork = _Clockwork()


def _renew() -> None:
    # A forked child would repeat its parent's random bytes, and may have inherited a held lock.
    global _clockwork
    _clockwork = _Clockwork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def uuid7() -> UUID:
    """A UUIDv7 (RFC 9562), greater than every one made before it in this process."""
    value = _clockwork.next(time.time_ns() // 1_000_000)
    high = value >> 62
    return UUID(int=(high >> 12) << 80 | (high & 0xFFF) << 64 | value & _LOW | _VERSION_AND_VARIANT)


def uuid7_time(uuid: UUID) -> datetime:
    """The moment, to the millisecond, at which a UUIDv7 was made."""
    if uuid.version != 7:
        raise FieldError("uuid", f"has version {uuid.version} and carries no time", "pass a UUIDv7")
    try:
        return _EPOCH + timedelta(milliseconds=uuid.int >> 80)
    except OverflowError:
        raise FieldError("uuid", "carries a time past the year 9999", "pass an id made by uuid7()") from None


# jsonb prints the same separators, so the database measures the same size. Cycles are caught by depth.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode

_SCALARS = frozenset((str, int, float, bool, type(None)))
_ARRAYS = (list, tuple)
_EXPONENT = re.compile(r"[0-9]e[+-]?[0-9]")
# jsonb prints 5e-324 without exponent: the worst that can happen to the length of a number.
_WORST_GROWTH = 64
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]{1,40}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")

_REFERENCE = "store the data elsewhere and publish a reference to it"
_PLAIN_VALUES = "pass text, numbers, bools, None, lists and dicts only"
_CURES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((bytes, bytearray, memoryview), "encode it as text, e.g. base64.b64encode(value).decode()"),
    ((set, frozenset), "pass a list, e.g. sorted(value)"),
    ((datetime, date, clock_time), "pass value.isoformat()"),
    (timedelta, "pass value.total_seconds()"),
    ((Decimal, UUID), "pass str(value)"),
    (Enum, "pass value.value"),
    (BaseModel, 'pass value.model_dump(mode="json")'),
)


def encode_payload(payload: dict[str, Any], limit: int = PAYLOAD_LIMIT) -> str:
    """The payload as JSON text that Postgres will accept, or a `PayloadError` that names the bad value.

    >>> encode_payload({"order_id": "o-1", "lines": [1, 2]})
    '{"order_id": "o-1", "lines": [1, 2]}'
    """
    try:
        _survey(payload, limit)
        text = _encode(payload)
        size = len(text) if text.isascii() else len(text.encode())
    except (PayloadError, MemoryError):
        raise
    except Exception as error:
        generic = PayloadError("payload", f"cannot be written as JSON ({type(error).__name__})", _PLAIN_VALUES)
        raise _fault(payload, limit) or generic from None
    if "\\u0000" in text and (fault := _fault(payload, limit)):
        raise fault
    if size <= limit < size * _WORST_GROWTH and _EXPONENT.search(text):
        size += _growth_in_jsonb(payload)
    if size > limit:
        raise PayloadError("payload", f"has {size} bytes of JSON, {limit} are allowed", _REFERENCE)
    return text


def _survey(payload: object, limit: int) -> None:
    """Refuse what json.dumps would quietly convert or never finish."""
    if not isinstance(payload, dict):
        problem = f"is {type(payload).__name__}, not dict"
        raise PayloadError("payload", problem, _cure(payload, 'wrap it, e.g. {"value": value}'))
    level: list[Any] = [payload]
    depth = count = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RecursionError
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                "".join(node)  # TypeError for a key that is not text, which json.dumps would convert
                children: Any = node.values()
            elif isinstance(node, _ARRAYS):
                children = node
            else:
                continue  # whatever it is, the encoder refuses it
            # Each value takes a byte at least. A few lists that contain each other many times are more
            # values than memory can hold, so they are counted before they are written out.
            count += len(node)
            if count > limit:
                raise PayloadError("payload", f"has more values than the {limit} bytes allowed", _REFERENCE)
            below += [child for child in children if type(child) not in _SCALARS]
        level = below


def _growth_in_jsonb(payload: dict[str, Any]) -> int:
    growth = 0
    stack: list[Any] = [payload]
    while stack:
        node = stack.pop()
        if isinstance(node, float):
            text = float.__repr__(node)
            growth += len(format(Decimal(text), "f")) - len(text)
        elif isinstance(node, dict):
            stack.extend(node.values())
        elif isinstance(node, _ARRAYS):
            stack.extend(node)
    return growth


# The way to a value, innermost step first; it becomes text only for the value that is refused.
_Steps: TypeAlias = "tuple[str | int, _Steps] | None"


def _fault(payload: dict[str, Any], limit: int) -> PayloadError | None:
    """The first value that cannot be stored, with its path."""
    visits = iter(range(max(limit, 1_000) + 1))

    def look(value: Any, steps: _Steps, depth: int) -> PayloadError | None:
        if next(visits, None) is None:
            return None
        if problem := _problem(value):
            return PayloadError(_path(steps), *problem)
        if isinstance(value, dict):
            children: Any = value.items()
            for key in value:
                if not isinstance(key, str):
                    problem = (f"has a key of type {type(key).__name__}", "use text for keys, e.g. str(key)")
                    return PayloadError(_path(steps), *problem)
                if problem := _problem(key):
                    return PayloadError(_path(steps), f"has a key that {problem[0]}", problem[1])
        elif isinstance(value, _ARRAYS):
            children = enumerate(value)
        else:
            return None
        if depth > MAX_DEPTH:
            problem = (f"is nested deeper than {MAX_DEPTH} levels, or contains itself", "flatten it")
            return PayloadError(_path(steps), *problem)
        for step, child in children:
            if found := look(child, (step, steps), depth + 1):
                return found
        return None

    try:
        return look(payload, None, 1)
    except Exception:
        return None  # a container that cannot even be read has no better name than "payload"


def _problem(value: object) -> tuple[str, str] | None:
    if isinstance(value, str):
        if "\0" in value:
            return "contains a NUL character", "remove it, or encode binary data as base64"
        if _SURROGATE.search(value):
            return "contains a lone surrogate", "decode the text with the right encoding"
    elif isinstance(value, float):
        if not isfinite(value):
            return "is NaN or infinite", "pass None or text"
    elif isinstance(value, int):
        try:
            int.__repr__(value)
        except ValueError:
            return "has too many digits", "pass text"
    elif value is not None and not isinstance(value, (dict, *_ARRAYS)):
        return f"is {type(value).__name__}, which JSON does not have", _cure(value, _PLAIN_VALUES)
    return None


def _cure(value: object, otherwise: str) -> str:
    return next((cure for types, cure in _CURES if isinstance(value, types)), otherwise)


def _path(steps: _Steps) -> str:
    parts = []
    while steps is not None:
        step, steps = steps
        if isinstance(step, int):
            parts.append(f"[{step}]")
        else:
            parts.append(f".{step}" if _PLAIN_KEY.fullmatch(step) else f"[{step[:40]!r}]")
    return "payload" + "".join(reversed(parts))
