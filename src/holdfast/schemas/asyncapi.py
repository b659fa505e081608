"""An AsyncAPI document of an application's events: a JSON Schema for each event type that has a model.

The models are those that handlers annotate and the event classes that an application publishes. A published event is
described by its event class, because the payload belongs to its producer; without one, by the models of its handlers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, Final

from pydantic import TypeAdapter

from holdfast.errors import ConfigurationError
from holdfast.handlers import Handler, HandlerRegistry
from holdfast.typed_events import TypedEvent, declared_type

ASYNCAPI: Final = "3.0.0"
_REFERENCE: Final = "#/components/schemas/{model}"
_VERSION: Final = "x-event-version"


def event_classes(module: ModuleType) -> list[type[Any]]:
    """Return the event classes that a module defines, in the order of their event types."""
    found: list[type[Any]] = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and isinstance(getattr(value, "event_type", None), str)
    ]
    return sorted(found, key=lambda each: str(each.event_type))


def document(
    registry: HandlerRegistry, published: Iterable[type[TypedEvent]] = (), *, title: str, version: str
) -> dict[str, Any]:
    """Return the AsyncAPI document of the handlers of a registry and of published event classes."""
    schemas = _Schemas()
    sent: dict[tuple[str, int], type[TypedEvent]] = {}
    for each in published:
        sent[declared_type(each)] = each
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for (event_type, event_version), event_class in sorted(sent.items(), key=lambda each: each[0]):
        payload = schemas.of(TypeAdapter(event_class), event_class.__name__, "serialization")
        _add_message(channels, event_type, payload, event_version)
        operations[f"publish.{event_type}"] = _operation("send", event_type)
    described = set(channels)
    for handler in sorted(registry, key=lambda each: each.name):
        models = _models(handler)
        for event_type in handler.event_types:
            if event_type not in described:
                model = models.get(event_type)
                payload_read = None if model is None else schemas.of(model, handler.name, "validation")
                _add_message(channels, event_type, payload_read, None)
        operations[handler.name] = _operation("receive", *handler.event_types)
    return {
        "asyncapi": ASYNCAPI,
        "info": {"title": title, "version": version},
        "defaultContentType": "application/json",
        "channels": dict(sorted(channels.items())),
        "operations": operations,
        "components": {"schemas": dict(sorted(schemas.found.items()))},
    }


def _operation(action: str, *event_types: str) -> dict[str, Any]:
    """Return an operation. AsyncAPI allows one channel in each, so a handler of several types lists the other types."""
    first, *others = event_types
    operation: dict[str, Any] = {"action": action, "channel": {"$ref": f"#/channels/{_pointer(first)}"}}
    return operation | ({"x-event-types": [first, *others]} if others else {})


def _add_message(
    channels: dict[str, Any], event_type: str, payload: Mapping[str, Any] | None, event_version: int | None
) -> None:
    channel = channels.setdefault(event_type, {"address": event_type, "messages": {}})
    name = event_type if event_version in (None, 1) else f"{event_type}@{event_version}"
    message: dict[str, Any] = {"name": event_type}
    if event_version is not None:
        message[_VERSION] = event_version
    if payload is None:
        channel["messages"].setdefault(name, message)
    else:
        channel["messages"][name] = message | {"payload": dict(payload)}


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _models(handler: Handler) -> dict[str, TypeAdapter[Any]]:
    """Return the models by which a handler reads payloads, by event type or pattern."""
    model = handler.parameters.event_model or handler.parameters.payload_model
    if model is None:
        return {}
    return {event_type: model.by_type.get(event_type, model.whole) for event_type in handler.event_types}


class _Schemas:
    """The schemas of a document: each by its name, once."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def of(self, model: TypeAdapter[Any], name: str, mode: Any) -> dict[str, Any]:
        """Return the schema of a model; what it refers to goes to the components."""
        # A model may be read in another form than it is written, as Decimal: each form has a name of its own.
        suffix = "" if mode == "serialization" else "-Input"
        schema = model.json_schema(mode=mode, ref_template=f"{_REFERENCE}{suffix}")
        for part, definition in schema.pop("$defs", {}).items():
            if self.found.setdefault(f"{part}{suffix}", definition) != definition:
                raise ConfigurationError(
                    name, f"refers to {part}, and another model to a different class of this name", "rename one of them"
                )
        return schema
