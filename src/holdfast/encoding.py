"""The encoding of payloads: what becomes of values that JSON does not have. docs/payloads.md has it as a table.

It is what pydantic writes with `model_dump(mode="json", by_alias=True)`, also for values outside of a model. What is
not in the table stays as it is, and is refused by the code that writes the JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeAlias
from uuid import UUID

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from holdfast.errors import PayloadError
from holdfast.paths import Steps, path

MAX_DEPTH = 100
TOO_DEEP = (f"is nested deeper than {MAX_DEPTH} levels, or contains itself", "flatten it")
REFERENCE = "store the data elsewhere and publish a reference to it"

SCALARS = frozenset((str, int, float, bool, type(None)))
ARRAYS = (list, tuple)

_AS_TEXT = (date, time, timedelta, UUID)  # a datetime is a date
_NAIVE = (
    "is a datetime without a time zone, which others would read as another moment",
    "pass an aware one, like datetime.now(UTC), or text: value.isoformat()",
)
_UNREADABLE = 'make value.model_dump(mode="json") work, or pass a dict'


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


# What may be a payload beside a dict.
PayloadObject: TypeAlias = BaseModel | _Dataclass


def is_object(value: object) -> bool:
    """Return whether a value is written as a JSON object although it is no dict: a model, or a dataclass."""
    return isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def has_encoding(value: object) -> bool:
    """Return whether the table has a line for a value that JSON does not have."""
    return isinstance(value, (Enum, Decimal, *_AS_TEXT)) or is_object(value)


def json_values(payload: object, limit: int) -> Any:
    """Return the payload with the values of the table replaced by those of JSON; a `PayloadError` names a bad one."""
    return _converted(payload, None, 1, iter(range(limit)), limit)


def _converted(value: Any, steps: Steps, depth: int, room: Iterator[int], limit: int) -> Any:
    if type(value) in SCALARS:
        return value
    while isinstance(value, Enum):
        value = value.value
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise PayloadError(path(steps), "is NaN or infinite", "pass None or text")
        return str(value)
    if isinstance(value, _AS_TEXT):
        return _text(value, steps)
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return value
        children: Any = value.items()
    elif isinstance(value, ARRAYS):
        children = enumerate(value)
    elif is_object(value):
        if isinstance(value, BaseModel) or hasattr(type(value), "__pydantic_serializer__"):
            return _dumped(value, steps)
        children = _fields(value, steps)
    else:
        return value
    if depth > MAX_DEPTH:
        raise PayloadError(path(steps), *TOO_DEEP)
    found = []
    for step, child in children:
        # Each value takes a byte at least. Few objects that contain each other often are more than memory can hold.
        if next(room, None) is None:
            raise PayloadError("payload", f"has more values than the {limit} bytes allowed", REFERENCE)
        found.append((step, _converted(child, (step, steps), depth + 1, room, limit)))
    return [child for _, child in found] if isinstance(value, ARRAYS) else dict(found)


def _text(value: Any, steps: Steps) -> str:
    if isinstance(value, datetime):
        offset = value.utcoffset()
        if offset is None:
            raise PayloadError(path(steps), *_NAIVE)
        if offset % timedelta(minutes=1):  # local mean time, before there were zones: ISO 8601 has no seconds there
            value = value.astimezone(UTC)
    return str(to_jsonable_python(value))


def _fields(value: Any, steps: Steps) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(value):
        try:
            yield field.name, getattr(value, field.name)
        except Exception as error:
            problem = f"cannot be read ({type(error).__name__})"
            raise PayloadError(path((field.name, steps)), problem, "set it, or pass a dict") from None


def _dumped(model: Any, steps: Steps) -> Any:
    """Return a model, or a dataclass of pydantic's, as its own serializer writes it."""
    try:
        written = _dump(model, mode="json")
        # Only the values themselves say whether a text without an offset was a datetime.
        as_they_are = _dump(model, mode="python", warnings="none")
    except Exception as error:
        # Without the error's text, which quotes the value.
        raise PayloadError(
            path(steps), f"cannot be written by {type(model).__name__} ({type(error).__name__})", _UNREADABLE
        ) from None
    _require_aware(as_they_are, written, steps)
    return written


def _dump(model: Any, **options: Any) -> Any:
    if isinstance(model, BaseModel):
        return model.model_dump(by_alias=True, **options)
    return type(model).__pydantic_serializer__.to_python(model, by_alias=True, **options)


def _require_aware(value: object, written: object, steps: Steps) -> None:
    """Refuse a datetime without a time zone, unless its model writes it in some other form."""
    if isinstance(value, datetime):
        if value.utcoffset() is None and written == to_jsonable_python(value):
            raise PayloadError(path(steps), *_NAIVE)
    elif isinstance(value, dict) and isinstance(written, dict):
        for key, child in value.items():
            if isinstance(key, str) and key in written:
                _require_aware(child, written[key], (key, steps))
    elif isinstance(value, list | tuple | set | frozenset) and isinstance(written, list):
        for index, (child, text) in enumerate(zip(value, written, strict=False)):
            _require_aware(child, text, (index, steps))
