"""Payloads as JSON text that Postgres stores as it is, or an error that names the value it cannot store."""

import json
import re
from decimal import Decimal
from math import isfinite
from typing import Any

from pydantic_core import from_json, to_json

from holdfast.encoding import ARRAYS, MAX_DEPTH, REFERENCE, SCALARS, TOO_DEEP, has_encoding, is_object, json_values
from holdfast.errors import PayloadError
from holdfast.paths import Steps, path

PAYLOAD_LIMIT = 256 * 1024

# check_circular is off: a limit of the depth finds cycles.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode
# The database measures the text of a jsonb, which has a space after each separator.
_encode_as_jsonb = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode

# A text this short cannot contain a number with more than 4,300 digits, which Python would refuse to read.
_SHORT = 4_096
# Types that `to_json` writes as `_encode` does; so it does with floats that have no exponent.
_PLAIN = SCALARS - {float}

_CONTAINERS = (dict, *ARRAYS)
_EXPONENT = re.compile(r"[0-9]e[+-]?[0-9]")
# How many times longer jsonb may write a number, at most: it writes 5e-324 without an exponent.
_WORST_GROWTH = 64
_SURROGATE = re.compile(r"[\ud800-\udfff]")

_PLAIN_VALUES = "pass text, numbers, bools, None, lists, dicts, or a value that docs/payloads.md lists"
_WRAPPED = 'wrap it, e.g. {"value": value}'
_AN_OBJECT = "pass the object that it is the JSON of, e.g. json.loads(value)"
_CURES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((bytes, bytearray, memoryview), "encode it as text, e.g. base64.b64encode(value).decode()"),
    ((set, frozenset), "pass a list, e.g. sorted(value)"),
)


def encode_payload(payload: Any, limit: int = PAYLOAD_LIMIT) -> str:
    """Return the payload as JSON text that Postgres will accept; a `PayloadError` names a bad value.

    >>> encode_payload({"order_id": "o-1", "lines": [1, 2]})
    '{"order_id":"o-1","lines":[1,2]}'
    """
    if type(payload) is dict and _room(payload, _SHORT, 1) > 0 and (quick := _quick(payload, limit)):
        return quick
    given = payload
    try:
        if not _survey(payload, limit):
            payload = json_values(payload, limit)
            if not isinstance(payload, dict):
                raise PayloadError("payload", f"is {type(given).__name__}, which is not an object in JSON", _WRAPPED)
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
    # A space after each separator makes a text at most twice as long.
    doubtful = size * 2 > limit or (size * 2 * _WORST_GROWTH > limit and _EXPONENT.search(text))
    if doubtful:
        size = len(_encode_as_jsonb(payload).encode())
        if size <= limit and _EXPONENT.search(text):
            size += _growth_in_jsonb(payload)
    if size > limit:
        raise PayloadError("payload", f"has {size} bytes of JSON, {limit} are allowed", REFERENCE)
    return text


def _room(node: Any, room: int, depth: int) -> int:
    """Return how much of `room` is left after the values of a dict or list; 0 or less if it may not be plain.

    Plain is what consists of the very types that JSON has, is not too deep, and has fewer values than `room`.
    """
    room -= len(node)
    if room <= 0 or depth > MAX_DEPTH:
        return 0
    if type(node) is dict:
        for key in node:
            if type(key) is not str:
                return 0
        node = node.values()
    elif type(node) is not list:
        return 0
    for child in node:
        kind = type(child)
        if kind in _PLAIN:
            continue
        if kind is float:
            # Other floats are not finite, or `to_json` writes their exponent otherwise, which would change hashes.
            if not (1e-4 <= abs(child) < 1e16 or child == 0):
                return 0
        elif (kind is not dict and kind is not list) or (room := _room(child, room, depth + 1)) <= 0:
            return 0
    return room


def _quick(payload: dict[str, Any], limit: int) -> str | None:
    """Return a plain payload as text, written in one go; None if it is long, or the database may not accept it."""
    try:
        written = to_json(payload)
    except Exception:
        return None
    size = len(written)
    if size > _SHORT or b"\\u0000" in written or size * 2 > limit:
        return None
    text = written.decode()
    return None if size * 2 * _WORST_GROWTH > limit and _EXPONENT.search(text) else text


def require_storable(payload: dict[str, Any], limit: int) -> None:
    """Refuse a payload that was read from JSON, and that Postgres would not store; a `PayloadError` names the value."""
    text = to_json(payload, inf_nan_mode="constants")
    # JSON has no other values to refuse. Separators and numbers can make so short a text no longer than the limit.
    doubtful = 2 * _WORST_GROWTH * len(text) > limit or text.count(b"{") + text.count(b"[") > MAX_DEPTH
    if doubtful or b"\\u0000" in text or b"Infinity" in text:
        encode_payload(payload, limit)


def encode(payload: Any, limit: int = PAYLOAD_LIMIT) -> tuple[str, dict[str, Any]]:
    """Return the payload as JSON text, and a copy as handlers get it: the caller may change the object later."""
    text = encode_payload(payload, limit)
    return text, from_json(text)


def _survey(payload: object, limit: int) -> bool:
    """Refuse values that json.dumps would convert silently, or never finish; return whether JSON has all others."""
    if not isinstance(payload, dict):
        if is_object(payload):
            return False
        raise _no_object(payload)
    level: list[Any] = [payload]
    plain = True
    depth = count = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RecursionError
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                "".join(node)  # TypeError for a key that is not text, which json.dumps would convert
                node = node.values()
            # Each value takes a byte at least. A few lists that contain each other many times are more
            # values than memory can hold, so they are counted before they are written out.
            count += len(node)
            if count > limit:
                raise PayloadError("payload", f"has more values than the {limit} bytes allowed", REFERENCE)
            for child in node:
                if type(child) not in SCALARS:
                    if isinstance(child, _CONTAINERS):
                        below.append(child)
                    else:
                        plain = False
        level = below
    return plain


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
        elif isinstance(node, ARRAYS):
            stack.extend(node)
    return growth


def _fault(payload: dict[str, Any], limit: int) -> PayloadError | None:
    """Return the error for the first value that cannot be stored, with its path."""
    visits = iter(range(max(limit, 1_000) + 1))

    def problem_in(value: Any, steps: Steps, depth: int) -> PayloadError | None:
        if next(visits, None) is None:
            return None
        if problem := _problem(value):
            return PayloadError(path(steps), *problem)
        if isinstance(value, dict):
            children: Any = value.items()
            for key in value:
                if not isinstance(key, str):
                    problem = (f"has a key of type {type(key).__name__}", "use text for keys, e.g. str(key)")
                    return PayloadError(path(steps), *problem)
                if problem := _problem(key):
                    return PayloadError(path(steps), f"has a key that {problem[0]}", problem[1])
        elif isinstance(value, ARRAYS):
            children = enumerate(value)
        else:
            return None
        if depth > MAX_DEPTH:
            return PayloadError(path(steps), *TOO_DEEP)
        for step, child in children:
            if found := problem_in(child, (step, steps), depth + 1):
                return found
        return None

    try:
        return problem_in(payload, None, 1)
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
    elif value is not None and not isinstance(value, _CONTAINERS) and not has_encoding(value):
        return f"is {type(value).__name__}, which has no encoding", _cure(value, _PLAIN_VALUES)
    return None


def _no_object(payload: object) -> PayloadError:
    """Return the error for a payload that is no object in JSON."""
    if isinstance(payload, type):
        return PayloadError("payload", f"is the class {payload.__name__}", "pass an object of it")
    written = isinstance(payload, str | bytes | bytearray) and payload.lstrip()[:1] in ("{", b"{")
    remedy = _AN_OBJECT if written else _cure(payload, _WRAPPED)
    return PayloadError("payload", f"is {type(payload).__name__}, not dict", remedy)


def _cure(value: object, otherwise: str) -> str:
    return next((cure for types, cure in _CURES if isinstance(value, types)), otherwise)
