"""Works out what the parameters of a handler or a middleware ask for, when it is registered.

The event comes first, under any name. Further parameters are recognised by their names. What would fail on the first
event, or be filled with something else than its annotation says, is refused here.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import to_json

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError, FieldError
from holdfast.transaction_kinds import ASYNCPG, KINDS, TransactionKind, kind_of, kinds_named, shown
from holdfast.typed_events import declared_type

EXTRAS: Final = ("payload", "tx", "context", "state")
AROUND: Final = ("event", "call_next", "context", "state")

_UNDEFINED: Final = object()  # an annotation with a name that is not imported
_LISTS: Final = (list, Sequence, Collection, Iterable)  # what a list of events may be annotated with
_UNTYPED: Final = (Any, object, dict, dict[str, Any])
# Annotations that cannot be a payload, which is always a JSON object.
_NO_OBJECTS: Final = (str, bytes, int, float, list, tuple, set, frozenset, types.NoneType)


@dataclass(frozen=True, slots=True)
class PayloadModel:
    """Reads payloads as objects of a class, or of that among several event classes which declares the event's type."""

    whole: TypeAdapter[Any]
    by_type: Mapping[str, TypeAdapter[Any]]

    def read(self, event: EventEnvelope) -> Any:
        """Return the payload as an object. A `ValidationError` is terminal."""
        model = self.by_type.get(event.event_type, self.whole)
        # Validated as JSON: strict models, and models with encoded bytes, read their values only from that form.
        return model.validate_json(to_json(event.payload))


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function asks for besides the event."""

    asynchronous: bool
    wanted: frozenset[str]
    typed_envelope: type[EventEnvelope[Any]] | None = None
    event_model: PayloadModel | None = None
    payload_model: PayloadModel | None = None
    state_type: type | None = None
    optional_state: bool = False
    transaction: TransactionKind | None = None  # of `tx`


def parameters_of(name: str, function: Callable[..., Any], *, batch: bool = False) -> Parameters:
    """Return what a handler asks for; refuse parameters that it cannot get. With `batch` it takes a list of events."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise ConfigurationError(name, "takes no event", "write def handler(event: EventEnvelope)")
    first, *others = parameters
    if first.name in EXTRAS:
        raise ConfigurationError(
            name,
            f"has {first.name!r} as its first parameter, which gets the event",
            f"put the event first: def handler(event: EventEnvelope, {first.name}, ...)",
        )
    if first.name in ("self", "cls"):
        remedy = "register the method of an object: registry.add(name, event_types, service.method)"
        raise ConfigurationError(name, f"is a method without its object: it gets the event as {first.name}", remedy)
    unknown = [p.name for p in others if p.name not in EXTRAS and _is_required(p)]
    if unknown:
        kind = _kind_of(_hints(_called(function)).get(unknown[0]))
        remedy = f"use {', '.join(EXTRAS)}, or give the others a default"
        if kind is not None and "tx" not in [p.name for p in others]:
            remedy = f"name it tx: tx: {kind}"
        raise ConfigurationError(name, f"has the parameter {unknown[0]!r}, which Holdfast cannot fill", remedy)
    call = _called(function)
    _refuse_generator(name, call)
    wanted = frozenset(p.name for p in others if p.name in EXTRAS)
    asynchronous = inspect.iscoroutinefunction(call)
    hints, written = _hints(call), _written(call)
    annotation, shown = hints.get(first.name, Any), str(written.get(first.name))
    if batch:
        annotation, shown = _listed(name, annotation, shown)
        _refuse_payload(name, wanted)
    envelope, model = _typed_envelope(name, annotation, shown, batch=batch)
    transaction = None
    if "tx" in wanted:
        transaction = _transaction(name, hints.get("tx", Any), str(written.get("tx")), asynchronous)
    if "context" in wanted:
        (_require_contexts if batch else _require_context)(name, hints.get("context", Any))
    state = hints.get("state", Any)
    return Parameters(
        asynchronous,
        wanted,
        envelope,
        model,
        _payload_model(name, hints, str(written.get("payload"))) if "payload" in wanted else None,
        state if isinstance(state, type) and state is not Any and not _is_protocol(state) else None,
        any(p.name == "state" and p.default is not p.empty for p in others),
        transaction,
    )


def middleware_parameters(name: str, function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters of a middleware; refuse those that it cannot get."""
    remedy = f"write async def {name}(event, call_next), with context and state if it needs them"
    parameters = inspect.signature(function).parameters.values()
    call = _called(function)
    _refuse_generator(name, call)
    if not inspect.iscoroutinefunction(call):
        raise ConfigurationError(name, "is not asynchronous", remedy)
    unknown = [p.name for p in parameters if p.name not in AROUND and _is_required(p)]
    if unknown:
        raise ConfigurationError(name, f"has the parameter {unknown[0]!r}, which Holdfast cannot fill", remedy)
    wanted = frozenset(p.name for p in parameters if p.name in AROUND and p.kind is not p.POSITIONAL_ONLY)
    if "call_next" not in wanted:
        raise ConfigurationError(name, "has no parameter call_next, so that no handler would run", remedy)
    return wanted


def _is_required(parameter: inspect.Parameter) -> bool:
    variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variable


def _called(function: Callable[..., Any]) -> Any:
    """Return the function inside a partial or a callable object; any other function as it is."""
    call = function.func if isinstance(function, partial) else function
    return call if inspect.isroutine(call) else getattr(call, "__call__", call)  # noqa: B004


def _refuse_generator(name: str, call: Any) -> None:
    if inspect.isasyncgenfunction(call) or inspect.isgeneratorfunction(call):
        raise ConfigurationError(
            name,
            "is a generator, of which a call runs nothing",
            "remove the yield; to open and close what handlers use, give the registry a lifespan",
        )


# --- annotations ----------------------------------------------------------------------------------------


def _hints(call: Any) -> dict[str, Any]:
    try:
        return get_type_hints(call)
    except Exception:  # of one annotation, for example a name that is imported for type checkers alone
        scope = getattr(inspect.unwrap(call), "__globals__", {})
        return {name: _hint(annotation, scope) for name, annotation in _written(call).items()}


def _written(call: Any) -> dict[str, object]:
    """Return the annotations as they stand in the code."""
    return getattr(call, "__annotations__", {})


def _hint(annotation: object, scope: dict[str, Any]) -> Any:
    try:
        return get_type_hints(types.SimpleNamespace(__annotations__={"it": annotation}), scope)["it"]
    except Exception:
        return _UNDEFINED


def _typed_envelope(
    name: str, annotation: Any, written: str, *, batch: bool
) -> tuple[type[EventEnvelope[Any]] | None, PayloadModel | None]:
    """Return the class of a typed envelope and the model of its payload; refuse an annotation that is no envelope."""
    if annotation is _UNDEFINED:
        if "EventEnvelope" not in _names_in(written) or "[" in written:
            raise _undefined(f"{name}.event", written)
        return None, None
    if _is_union(annotation):
        members = get_args(annotation)
        if any(_payload_class(member) is not None for member in members):
            raise ConfigurationError(name, "takes one of several envelopes", "write event: EventEnvelope[A | B]")
        annotation = next((member for member in members if _is_envelope(member)), annotation)
    if not _is_envelope(annotation):
        shown = getattr(annotation, "__name__", None) or str(annotation)
        # A class of the application's is most likely meant as the payload.
        own = isinstance(annotation, type) and annotation.__module__ not in ("builtins", "typing")
        meant = f"EventEnvelope[{shown}]" if own else "EventEnvelope"
        remedy = f"write events: list[{meant}]" if batch else f"write event: {meant}"
        if get_origin(annotation) in _LISTS and not batch:
            remedy += "; or let it take several events, with batch="
        raise ConfigurationError(name, f"annotates the event with {shown}, which is no envelope", remedy)
    payload = _payload_class(annotation)
    if payload is None:
        return None, None
    return annotation, _model(f"{name}.event", payload)


def _listed(name: str, annotation: Any, written: str) -> tuple[Any, str]:
    """Return the annotation of one event of a batch; refuse an annotation that is no list of events."""
    if annotation is _UNDEFINED:
        found = re.fullmatch(r"(?:[\w.]+\.)?(?:list|List|Sequence)\[(.*)\]", written)
        if found is None:
            raise _undefined(f"{name}.events", written)
        return _UNDEFINED, found[1].strip("'\"")
    if annotation in (Any, object, list, Sequence, Collection, Iterable):
        return Any, "Any"
    if get_origin(annotation) in _LISTS:
        (event,) = get_args(annotation)
        return event, getattr(event, "__name__", str(event))
    shown = getattr(annotation, "__name__", None) or str(annotation)
    of = shown if annotation is EventEnvelope or _generic_of(annotation) is EventEnvelope else "EventEnvelope"
    raise ConfigurationError(
        name, f"annotates its batch with {shown}, which is no list of events", f"write events: list[{of}]"
    )


def _refuse_payload(name: str, wanted: frozenset[str]) -> None:
    if "payload" in wanted:
        raise ConfigurationError(
            f"{name}.payload",
            "is of one event, and the handler takes a batch",
            "write events: list[EventEnvelope[OrderPlaced]], and read event.payload",
        )


def _names_in(written: str) -> list[str]:
    """Return the names of the classes in an annotation, without their modules."""
    return re.findall(r"\w+(?![\w.])", written)


def _undefined(field: str, written: str) -> ConfigurationError:
    """Return the error for an annotation that means nothing at run time, and might stand for anything."""
    remedy = f"import what {written} is where the program runs, not under TYPE_CHECKING alone; or correct it"
    return ConfigurationError(field, f"is annotated with {written}, which is not defined", remedy)


def _is_envelope(annotation: Any) -> bool:
    if isinstance(annotation, TypeVar) or annotation in (Any, object):
        return True
    if not isinstance(annotation, type):
        return not isinstance(get_origin(annotation), type)
    return _is_protocol(annotation) or _generic_of(annotation) is EventEnvelope or issubclass(EventEnvelope, annotation)


def _generic_of(annotation: Any) -> Any:
    return getattr(annotation, "__pydantic_generic_metadata__", {}).get("origin")


def _payload_class(annotation: Any) -> Any:
    """Return the payload's class of `EventEnvelope[OrderPlaced]`; None for an envelope without."""
    if _generic_of(annotation) is not EventEnvelope:
        return None
    (payload,) = annotation.__pydantic_generic_metadata__["args"]
    return None if payload in _UNTYPED or isinstance(payload, TypeVar) else payload


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _is_protocol(annotation: object) -> bool:
    return bool(getattr(annotation, "_is_protocol", False))


def _transaction(name: str, annotation: Any, written: str, asynchronous: bool) -> TransactionKind:
    """Return the kind of transaction that `tx` asks for; refuse an annotation that is none, like a pool."""
    members = get_args(annotation) if _is_union(annotation) else (annotation,)
    if annotation is _UNDEFINED:
        found = kinds_named(written)
        if not found:
            raise _undefined(f"{name}.tx", written)
    else:
        found = [kind for kind in map(_kind_of, members) if kind is not None]
    fitting = [kind for kind in found if kind.asynchronous is asynchronous]
    if annotation is _UNDEFINED and len(fitting) > 1 and ASYNCPG not in fitting:
        raise _undefined(f"{name}.tx", written)
    if ASYNCPG in fitting or (asynchronous and any(map(_may_be_anything, members))):
        return ASYNCPG
    if fitting:
        return fitting[0]
    served = [kind for kind in KINDS if kind.asynchronous is asynchronous]
    if found:
        kind = found[0]
        if kind.asynchronous:
            remedy = f"make it async def: {kind} is used with await"
        else:
            remedy = f"make it a plain def, which runs in a thread: {kind} blocks"
        twin = next((each for each in served if each.package == kind.package), None)
        if twin is not None:
            remedy += f"; or annotate it with {twin}"
        problem = f"is annotated with {kind}, and the handler is {'async def' if asynchronous else 'a plain def'}"
        raise ConfigurationError(f"{name}.tx", problem, remedy)
    if any(map(_may_be_anything, members)):
        raise ConfigurationError(
            f"{name}.tx",
            "has no annotation that says which library it is of, and the handler is a plain def",
            f"annotate it with {shown(served)}; or make the handler async def",
        )
    wrong = members[0]
    named = f"{wrong.__module__}.{wrong.__qualname__}" if isinstance(wrong, type) else str(wrong)
    raise ConfigurationError(
        f"{name}.tx", f"is annotated with {named}, which it is not", f"annotate it with {shown(served)}"
    )


def _kind_of(annotation: Any) -> TransactionKind | None:
    return kind_of(get_origin(annotation) or annotation)


def _may_be_anything(annotation: Any) -> bool:
    origin = get_origin(annotation) or annotation
    return annotation in (object, Any) or not isinstance(origin, type) or _is_protocol(origin)


def _require_context(name: str, annotation: Any) -> None:
    if (
        annotation is not Any
        and isinstance(annotation, type)
        and not (_is_protocol(annotation) or issubclass(HandlerContext, annotation))
    ):
        problem = f"is annotated with {annotation.__name__}, which it is not"
        raise ConfigurationError(f"{name}.context", problem, "annotate it with holdfast.HandlerContext")


def _require_contexts(name: str, annotation: Any) -> None:
    """Refuse an annotation of a batch's `context` that is no list of contexts."""
    known = annotation in (Any, object, list, Sequence, Collection, Iterable, _UNDEFINED)
    if not known and (get_origin(annotation) not in _LISTS or get_args(annotation) not in ((HandlerContext,), (Any,))):
        problem = "is that of a batch: a list with the context of each event"
        raise ConfigurationError(f"{name}.context", problem, "annotate it with list[HandlerContext]")


def _payload_model(name: str, hints: dict[str, Any], written: str) -> PayloadModel:
    annotation = hints.get("payload")
    if annotation is _UNDEFINED:
        raise _undefined(f"{name}.payload", written)
    if annotation is None:
        remedy = "annotate it with your model, like payload: OrderPlaced"
        raise ConfigurationError(f"{name}.payload", "has no annotation", remedy)
    return _model(f"{name}.payload", annotation)


def _model(field: str, annotation: Any) -> PayloadModel:
    members = get_args(annotation) if _is_union(annotation) else (annotation,)
    if all(_is_no_payload(each) for each in members):
        shown = str(annotation) if get_args(annotation) else getattr(annotation, "__name__", str(annotation))
        problem = f"is annotated with {shown}, and a payload is an object"
        raise ConfigurationError(field, problem, "annotate it with a pydantic model, a dataclass or dict")
    declaring = [each for each in members if isinstance(getattr(each, "event_type", None), str)]
    try:
        by_type = {declared_type(each)[0]: _adapter(field, each) for each in declaring}
    except FieldError as error:
        raise ConfigurationError(f"{field}.{error.field}", error.problem, error.remedy) from None
    return PayloadModel(_adapter(field, annotation), by_type)


def _is_no_payload(annotation: Any) -> bool:
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and (issubclass(kind, (*_NO_OBJECTS, EventEnvelope)))


def _adapter(field: str, annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation)
    except PydanticUserError as error:
        shown = getattr(annotation, "__name__", None) or str(annotation)
        problem = f"is annotated with {shown}, which pydantic cannot validate ({type(error).__name__})"
        raise ConfigurationError(field, problem, "use a pydantic model or a dataclass") from None
