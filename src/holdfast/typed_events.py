"""Event classes: a pydantic model or a dataclass whose objects are events, because it declares their type.

    class OrderPlaced(BaseModel):
        event_type: ClassVar[str] = "order.placed"
        order_id: int
        total: Decimal

`publish` takes an object of such a class in place of an event type and a payload, `registry.handler` the class in place
of the event type, and a handler annotates the event with `EventEnvelope[OrderPlaced]`.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, ClassVar, Protocol, TypeGuard

from pydantic import BaseModel

from holdfast.encoding import is_object
from holdfast.errors import FieldError


class TypedEvent(Protocol):
    """What an event class has besides its fields. `event_version`, a `ClassVar[int]`, is 1 without."""

    event_type: ClassVar[str]


def is_typed_event(value: object) -> TypeGuard[TypedEvent]:
    """Return whether a value is an object that can be published as it is."""
    return isinstance(getattr(type(value), "event_type", None), str) and is_object(value)


@lru_cache(maxsize=1024)
def declared_type(cls: type[Any]) -> tuple[str, int]:
    """Return the event type and the version that an event class declares."""
    declared, names = getattr(cls, "event_type", None), _fields(cls)
    if names is None:
        problem = f"is asked of {cls.__name__}, which is neither a pydantic model nor a dataclass"
    elif "event_type" in names:
        problem = f"is a field of {cls.__name__}, and so a part of its payload"
    elif not isinstance(declared, str):
        problem = f"is not declared by {cls.__name__}"
    else:
        return declared, getattr(cls, "event_version", 1)
    raise FieldError("event_type", problem, 'write event_type: ClassVar[str] = "order.placed" in an event class')


def _fields(cls: type[Any]) -> set[str] | None:
    if issubclass(cls, BaseModel):
        return set(cls.model_fields)
    return {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else None
