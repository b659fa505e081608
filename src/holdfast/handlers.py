"""Handlers, which an application writes and a worker runs, and the registry that names them.

    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge_card")
    async def charge_card(event: EventEnvelope) -> None: ...

Further parameters are recognised by name: `payload` (annotated with a model of your own, which is validated),
`tx` (an `asyncpg.Connection` in a transaction that commits together with the delivery; for `async def` only) and
`context` (a `HandlerContext`).

`via` says where a handler runs: with `"outbox"` a worker delivers the event and retries, with `"in_process"`
`Reactions` run the handler beside the producer as soon as that has committed. The function stays as it is.

`registry.schedule` declares events that are published at set times, each by one of the workers.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter

from holdfast.checks import function as require_function
from holdfast.checks import instance, number, one_of
from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError, TerminalHandlerError
from holdfast.names import event_pattern, handler_name
from holdfast.outcome import DONE, Done, Outcome, Reject, Retry, Snooze
from holdfast.retry import DEFAULT_RETRY_POLICY, RetryPolicy
from holdfast.schedules import Missed, Schedule, timing

DEFAULT_TIMEOUT = 300.0
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 0.001, 86_400.0

OnError = Literal["retry", "reject"]
Via = Literal["outbox", "in_process"]
Function = TypeVar("Function", bound=Callable[..., Any])

_KNOWN = ("payload", "tx", "context")


@dataclass(frozen=True, slots=True)
class Handler:
    """One registered handler, with everything a worker needs to know about it."""

    name: str
    domain_context: str
    event_types: tuple[str, ...]
    function: Callable[..., Any] = field(repr=False)
    retry: RetryPolicy = DEFAULT_RETRY_POLICY
    timeout: float = DEFAULT_TIMEOUT
    on_error: OnError = "retry"
    via: Via = "outbox"
    asynchronous: bool = True
    transactional: bool = False
    wants_context: bool = False
    payload_model: TypeAdapter[Any] | None = field(default=None, repr=False)
    plain: bool = False  # asynchronous, and takes the event and nothing else

    def wants(self, event_type: str) -> bool:
        """Whether the handler is registered for events of the type."""
        return any(pattern_of(each).fullmatch(event_type) for each in self.event_types)

    def extras(self, event: EventEnvelope, context: HandlerContext, tx: object) -> dict[str, Any]:
        """Return the arguments beside the event. The payload is validated: a `ValidationError` is terminal."""
        extras: dict[str, Any] = {}
        if self.payload_model is not None:
            extras["payload"] = self.payload_model.validate_python(event.payload)
        if self.wants_context:
            extras["context"] = context
        if self.transactional:
            extras["tx"] = tx
        return extras

    def outcome_of(self, result: object) -> Outcome:
        """Return the outcome for what the function returned; nothing is `Done`."""
        if result is None:
            return DONE
        if isinstance(result, Done | Retry | Snooze | Reject):
            return result
        raise TerminalHandlerError(
            f"{self.name} returned {type(result).__name__}; return nothing, Done, Retry, Snooze or Reject"
        )


class HandlerRegistry:
    """The handlers of an application.

    A handler's domain context is the part of its name before the first dot; `domain_context` replaces it for all.
    """

    def __init__(self, *, domain_context: str | None = None) -> None:
        self._domain_context = domain_context
        self._handlers: dict[str, Handler] = {}
        self._schedules: dict[str, Schedule] = {}

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers.values())

    def __len__(self) -> int:
        return len(self._handlers)

    def __getitem__(self, name: str) -> Handler:
        return self._handlers[name]

    def __contains__(self, name: object) -> bool:
        return name in self._handlers

    def handler(
        self,
        *event_types: str,
        name: str,
        retry: RetryPolicy = DEFAULT_RETRY_POLICY,
        timeout: float = DEFAULT_TIMEOUT,
        on_error: OnError = "retry",
        via: Via = "outbox",
    ) -> Callable[[Function], Function]:
        """Register the decorated function for event types; `*` in a type stands for any characters.

        `timeout` is the time limit of one attempt in seconds. With `on_error="reject"` an error fails the
        event at once, with reason `rejected`. With `via="in_process"` the handler runs in the process that publishes,
        after the commit and once; if it fails, the delivery is a dead letter, and a worker runs it after a replay.
        """

        def register(function: Function) -> Function:
            self.add(name, event_types, function, retry=retry, timeout=timeout, on_error=on_error, via=via)
            return function

        return register

    def add(
        self,
        name: str,
        event_types: tuple[str, ...],
        function: Callable[..., Any],
        *,
        retry: RetryPolicy = DEFAULT_RETRY_POLICY,
        timeout: float = DEFAULT_TIMEOUT,
        on_error: OnError = "retry",
        via: Via = "outbox",
    ) -> Handler:
        """Register a function without the decorator."""
        handler_name(name)
        if name in self._handlers:
            remedy = "give each handler a unique name: the inbox is keyed by it"
            raise ConfigurationError(name, "is registered twice", remedy)
        if isinstance(event_types, str):
            raise ConfigurationError(
                name, "got a string instead of a sequence of event types", f"write ({event_types!r},)"
            )
        if not event_types:
            raise ConfigurationError(name, "handles no event type", 'name at least one, like "order.placed"')
        for event_type in event_types:
            event_pattern(name, event_type)
        number(f"{name}.timeout", timeout, SHORTEST_TIMEOUT, LONGEST_TIMEOUT)
        one_of(f"{name}.on_error", on_error, get_args(OnError))
        one_of(f"{name}.via", via, get_args(Via))
        instance(f"{name}.retry", retry, RetryPolicy, "pass RetryPolicy(...)")
        require_function(name, function, "decorate a function that takes the event")
        handler = _describe(name, self._domain_context, event_types, function, retry, float(timeout), on_error, via)
        self._handlers[name] = handler
        return handler

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The declared schedules."""
        return tuple(self._schedules.values())

    def schedule(
        self,
        event_type: str,
        *,
        name: str,
        cron: str | None = None,
        timezone: str = "UTC",
        every: timedelta | None = None,
        missed: Missed = "latest",
        payload: Mapping[str, Any] | None = None,
        target: str | None = None,
        priority: int = 1,
    ) -> Schedule:
        """Publish an event at every slot of `cron` in a time zone, or of `every`, once however many workers run.

        `missed` says what becomes of slots at which no worker ran: the latest of them is fired, all are (up to a
        hundred), or none.
        """
        try:
            when = timing(cron, timezone, every)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}.{error.field}", error.problem, error.remedy) from None
        source = self._domain_context or str(name).partition(".")[0]
        schedule = Schedule(name, source, when, event_type, missed, payload or {}, target, priority)
        self._declare(schedule)
        return schedule

    def _declare(self, schedule: Schedule) -> None:
        if schedule.name in self._schedules:
            remedy = "give every schedule a name of its own: it is half of the key of each slot's event"
            raise ConfigurationError(schedule.name, "is declared twice", remedy)
        self._schedules[schedule.name] = schedule

    def include(self, other: "HandlerRegistry") -> None:
        """Take over the handlers and schedules of another registry."""
        require_registry(other)
        for handler in other:
            if handler.name in self._handlers:
                raise ConfigurationError(handler.name, "is registered twice", "include each registry once")
            self._handlers[handler.name] = handler
        for schedule in other.schedules:
            self._declare(schedule)


def require_registry(registry: object) -> HandlerRegistry:
    """Return a handler registry; refuse anything else in its place."""
    return instance("registry", registry, HandlerRegistry, "pass the HandlerRegistry() that your handlers are in")


@cache
def pattern_of(event_type: str) -> re.Pattern[str]:
    """Return the expression that an event type with `*` in it stands for."""
    return re.compile(".*".join(map(re.escape, event_type.split("*"))), re.DOTALL)


def _describe(
    name: str,
    domain_context: str | None,
    event_types: tuple[str, ...],
    function: Callable[..., Any],
    retry: RetryPolicy,
    timeout: float,
    on_error: OnError,
    via: Via,
) -> Handler:
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise ConfigurationError(name, "takes no event", "write def handler(event: EventEnvelope)")
    others = parameters[1:]
    unknown = [p.name for p in others if p.name not in _KNOWN and p.default is p.empty]
    if unknown:
        remedy = f"use {', '.join(_KNOWN)}, or give the others a default"
        raise ConfigurationError(name, f"has the parameter {unknown[0]!r}, which Holdfast cannot fill", remedy)
    wanted = {p.name for p in others if p.name in _KNOWN}
    call = function.func if isinstance(function, partial) else function
    call = call if inspect.isroutine(call) else getattr(call, "__call__", call)  # noqa: B004
    asynchronous = inspect.iscoroutinefunction(call)
    if "tx" in wanted and not asynchronous:
        remedy = "make it async def: the transaction lives on the worker's event loop"
        raise ConfigurationError(name, "takes tx and is not asynchronous", remedy)
    if "tx" in wanted:
        _require_asyncpg(name, call)
    return Handler(
        name=name,
        domain_context=domain_context or name.partition(".")[0],
        event_types=tuple(dict.fromkeys(event_types)),
        function=function,
        retry=retry,
        timeout=timeout,
        on_error=on_error,
        via=via,
        asynchronous=asynchronous,
        transactional="tx" in wanted,
        wants_context="context" in wanted,
        plain=asynchronous and not wanted,
        payload_model=_payload_model(name, call) if "payload" in wanted else None,
    )


def _require_asyncpg(name: str, function: Callable[..., Any]) -> None:
    """Refuse a `tx` that is annotated with a class of another library, like a session of SQLAlchemy."""
    try:
        annotation = get_type_hints(function).get("tx", object)
    except NameError:
        return  # imported for type checkers alone
    if annotation in (object, Any) or not isinstance(annotation, type) or getattr(annotation, "_is_protocol", False):
        return
    if not any(cls.__module__.partition(".")[0] == "asyncpg" for cls in annotation.__mro__):
        raise ConfigurationError(
            f"{name}.tx",
            f"is annotated with {annotation.__module__}.{annotation.__qualname__}, which it is not",
            "annotate it with asyncpg.Connection: the worker opens the transaction, on a connection of its own",
        )


def _payload_model(name: str, function: Callable[..., Any]) -> TypeAdapter[Any]:
    try:
        annotation = get_type_hints(function).get("payload")
    except NameError as error:
        raise ConfigurationError(
            f"{name}.payload", f"has an annotation that is not defined: {error}", "import it"
        ) from None
    if annotation is None:
        remedy = "annotate it with your model, like payload: OrderPlaced"
        raise ConfigurationError(f"{name}.payload", "has no annotation", remedy)
    return TypeAdapter(annotation)
