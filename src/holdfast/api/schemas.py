"""JSON schemas of results, made from the types that verbs return and the encoding that they have."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from pydantic import BaseModel

from holdfast.handler_tally import Histogram
from holdfast.operator import RetentionReport, ScheduleStatus
from holdfast.operator.encoding import ALSO

Schema = dict[str, Any]
_PLAIN: Mapping[Any, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
    timedelta: {"type": "number", "description": "Seconds."},
    UUID: {"type": "string", "format": "uuid"},
    Decimal: {"type": "string"},
}
# Those whose encoding is not made of their fields: they are described as objects.
_OPAQUE = (Histogram, RetentionReport)


class Schemas:
    """Schemas of types. Those with a name are collected, and referred to."""

    def __init__(self) -> None:
        self.named: dict[str, Schema] = {}

    def of_document(self, kind: Any) -> Schema:
        """The schema of a whole answer, which is an object."""
        if _is_list(get_origin(kind)):
            return {
                "type": "object",
                "required": ["items", "left_out"],
                "properties": {"items": self.of(kind), "left_out": {"type": ["integer", "null"]}},
            }
        if dataclasses.is_dataclass(kind) or get_origin(kind) is dict:
            return self.of(kind)
        return {"type": "object", "required": ["value"], "properties": {"value": self.of(kind)}}

    def of(self, kind: Any) -> Schema:
        """The schema of a type."""
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.of(each) for each in arguments]}
        if origin is Sequence or _is_list(origin):
            several = origin is tuple and arguments[-1:] != (Ellipsis,)  # each of another type
            return {"type": "array", "items": {} if several or not arguments else self.of(arguments[0])}
        if origin in (dict, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self._dataclass(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return self._model(kind)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return {"enum": [each.value for each in kind]}
        return {} if kind is Any or isinstance(kind, TypeVar) else {"type": "object"}

    def _dataclass(self, kind: type) -> Schema:
        name = kind.__name__
        if name not in self.named:
            self.named[name] = {}  # it may contain itself
            self.named[name] = self._described(kind)
        return {"$ref": f"#/components/schemas/{name}"}

    def _described(self, kind: type) -> Schema:
        about = " ".join((kind.__doc__ or "").split())
        if kind in _OPAQUE:
            return {"type": "object", "description": about}
        hints = get_type_hints(kind)
        fields = {field.name: self.of(hints[field.name]) for field in dataclasses.fields(kind)}
        also = {each: self._property(kind, attribute) for each, attribute in ALSO.get(kind, {}).items()}
        required = [*also, *fields]
        if kind is ScheduleStatus:
            fields["payload"] = {}
            required.remove("payload")
        return {"type": "object", "description": about, "required": required, "properties": {**also, **fields}}

    def _property(self, kind: type, name: str) -> Schema:
        described = getattr(kind, name)
        return self.of(get_type_hints(described.fget).get("return", Any)) if isinstance(described, property) else {}

    def _model(self, kind: type[BaseModel]) -> Schema:
        name = kind.__name__
        if name not in self.named:
            schema = kind.model_json_schema(mode="serialization", ref_template="#/components/schemas/{model}")
            self.named.update(schema.pop("$defs", {}))
            self.named[name] = schema
        return {"$ref": f"#/components/schemas/{name}"}


def _is_list(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, list | tuple)
