"""Handlers, which an application writes and a worker runs, and the registry that names them.

    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge_card")
    async def charge_card(event: EventEnvelope) -> None: ...

An event class (see `holdfast.typed_events`) stands for its event type; the payload is then an object of it:

    @registry.handler(OrderPlaced, name="billing.charge_card")
    async def charge_card(event: EventEnvelope[OrderPlaced]) -> None: ...

Further parameters are recognised by name: `payload` (annotated with a model of your own, which is validated),
`tx` (a transaction that commits together with the delivery, in the library that it is annotated with),
`context` (a `HandlerContext`) and `state` (what the registry's lifespan yields).

`via` says where a handler runs: with `"outbox"` a worker delivers the event and retries, with `"in_process"`
`Reactions` run the handler beside the producer as soon as that has committed. The function stays as it is.

With `batch` a handler takes several events in one call (see `holdfast.batch`).

`registry.schedule` declares events that are published at set times, each by one of the workers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal, TypeVar, get_args

from pydantic import ValidationError

from holdfast.batch import Batch, alone, batch_of
from holdfast.checks import function as require_function
from holdfast.checks import instance, number, one_of, whole
from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError, FieldError, TerminalHandlerError
from holdfast.flow import MOST_IN_THE_FLEET, OnOutage, Pause, breaker, in_a_worker, in_the_fleet, per_second
from holdfast.frames import blame
from holdfast.lifespan import Lifespan, require_lifespan
from holdfast.middleware import Middleware, MiddlewareFunction, middlewares
from holdfast.names import event_pattern, handler_name
from holdfast.outcome import DONE, Outcome
from holdfast.parameters import Parameters, PayloadModel, parameters_of
from holdfast.retry import DEFAULT_RETRY_POLICY, RetryPolicy
from holdfast.schedules import Missed, Schedule, timing
from holdfast.typed_events import TypedEvent, declared_type

DEFAULT_TIMEOUT = 300.0
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 0.001, 86_400.0

OnError = Literal["retry", "reject"]
OnFailedHead = Literal["block", "skip"]
Via = Literal["outbox", "in_process"]
Function = TypeVar("Function", bound=Callable[..., Any])


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
    concurrency: int | None = None  # deliveries at the same time in one worker; None: as many as the worker allows
    fleet_concurrency: int | None = None  # deliveries at the same time in all workers together
    rate: float | None = None  # deliveries that begin per second, in all workers together
    breaker: Pause | None = None
    on_failed_head: OnFailedHead = "block"
    per_key_concurrency: int | None = None
    parameters: Parameters = field(default=Parameters(True, frozenset()), repr=False)
    lifespans: tuple[Lifespan, ...] = field(default=(), repr=False)  # those of its registries, its own one last
    middleware: tuple[Middleware, ...] = field(default=(), repr=False)
    asynchronous: bool = True
    transactional: bool = False
    plain: bool = False  # asynchronous, takes only the envelope, and has no middleware
    batch: Batch | None = None  # how several events are passed; `function` takes one event even so
    raw: bool = False  # takes claimed deliveries instead of envelopes: only Holdfast's own handlers do

    @property
    def package(self) -> str:
        """The top package of the handler's function."""
        function = self.function if self.batch is None else self.batch.function
        function = function.func if isinstance(function, partial) else function
        return str(getattr(function, "__module__", "")).partition(".")[0]

    def wants(self, event_type: str) -> bool:
        """Return whether the handler is registered for events of the type."""
        return any(pattern_of(each).fullmatch(event_type) for each in self.event_types)

    @property
    def wants_state(self) -> bool:
        """Whether the function has a parameter `state`, which a lifespan fills."""
        return "state" in self.parameters.wanted and not (self.parameters.optional_state and not self.lifespans)

    @property
    def payload_model(self) -> PayloadModel | None:
        """The model of the function's parameter `payload`."""
        return self.parameters.payload_model

    def received(self, event: EventEnvelope) -> EventEnvelope[Any]:
        """Return the event as the function takes it, typed if it asks for that; a `ValidationError` is terminal."""
        typed, model = self.parameters.typed_envelope, self.parameters.event_model
        if typed is None or model is None:
            return event
        return typed.trusted({**event.__dict__, "payload": self._read(model, event)})

    def extras(self, event: EventEnvelope, context: HandlerContext, tx: object, state: object = None) -> dict[str, Any]:
        """Return the arguments besides the event. The payload is validated: a `ValidationError` is terminal."""
        extras = self._extras(context, tx, state)
        if self.parameters.payload_model is not None:
            extras["payload"] = self._read(self.parameters.payload_model, event)
        return extras

    def _read(self, model: PayloadModel, event: EventEnvelope) -> Any:
        try:
            return model.read(event)
        except ValidationError as error:
            # No line of the user's code has raised it, so the report names the handler that asks for the class.
            blame(error, self.function)
            raise

    def batch_extras(self, contexts: list[HandlerContext], tx: object, state: object) -> dict[str, Any]:
        """Return the arguments besides the events of a batch."""
        return self._extras(contexts, tx, state)

    def _extras(self, context: HandlerContext | list[HandlerContext], tx: object, state: object) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if "context" in self.parameters.wanted:
            extras["context"] = context
        if self.wants_state:
            extras["state"] = state
        if self.transactional:
            extras["tx"] = tx
        return extras

    def within(self, lifespan: Lifespan | None, around: tuple[Middleware, ...]) -> Handler:
        """Return the handler as a part of a registry that has this lifespan and these middlewares."""
        if lifespan is None and not around:
            return self
        inherited = () if lifespan is None else (lifespan,)
        own = (replace(each, lifespan=each.lifespan or lifespan) for each in self.middleware)
        return replace(
            self,
            lifespans=(*inherited, *(each for each in self.lifespans if each is not lifespan)),
            middleware=(*around, *own),
            plain=self.plain and not around,
        )

    def outcome_of(self, result: object) -> Outcome:
        """Return the outcome for what the function returned; None means `Done`."""
        if result is None:
            return DONE
        if isinstance(result, Outcome):
            return result
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()  # or Python warns that it was never awaited, long after
            remedy = "write await before the call" if self.asynchronous else "make the handler async def, and await it"
            raise TerminalHandlerError(
                f"{self.name} returned {_name_of(result)}, which was not awaited; {remedy}"
            ).blaming(self.function)
        if isinstance(result, type) and issubclass(result, Outcome):
            problem = f"returned the class {result.__name__}; return an object of it: {result.__name__}(...)"
        else:
            problem = f"returned {type(result).__name__}; return nothing, Done(), Retry(), Snooze() or Reject()"
        raise TerminalHandlerError(f"{self.name} {problem}").blaming(self.function)


class HandlerRegistry:
    """The handlers of an application.

    A handler's domain context is the part of its name before the first dot; `domain_context` replaces it for all.
    `lifespan` opens and closes what the handlers use (see `holdfast.lifespan`), and `middleware` runs around each of
    them (see `holdfast.middleware`).
    """

    def __init__(
        self,
        *,
        domain_context: str | None = None,
        lifespan: Lifespan | None = None,
        middleware: Sequence[MiddlewareFunction] = (),
    ) -> None:
        if lifespan is not None:
            require_lifespan(lifespan)
        self._domain_context = domain_context
        self._lifespan = lifespan
        self._middleware = middlewares(middleware, lifespan)
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
        *event_types: str | type[TypedEvent],
        name: str,
        retry: RetryPolicy = DEFAULT_RETRY_POLICY,
        timeout: float = DEFAULT_TIMEOUT,
        on_error: OnError = "retry",
        via: Via = "outbox",
        concurrency: int | None = None,
        fleet_concurrency: int | None = None,
        rate: str | float | None = None,
        on_outage: OnOutage | Pause = "retry",
        batch: int | None = None,
        within: float | timedelta | str | None = None,
        on_failed_head: OnFailedHead = "block",
        per_key_concurrency: int | None = None,
    ) -> Callable[[Function], Function]:
        """Register the decorated function for event types; `*` in a type stands for any characters.

        An event class stands for the type that it declares.

        `timeout` is the time limit of one attempt in seconds. With `on_error="reject"` an error fails the
        event at once, with reason `rejected`. With `via="in_process"` the handler runs in the process that publishes,
        after the commit and once; if it fails, the delivery is a dead letter, and a worker runs it after a replay.

        `concurrency` is how many deliveries run at the same time in one worker, `fleet_concurrency` in all workers
        together, and `rate`, like `"100/s"`, how many begin over time in all of them. With `on_outage="pause"` several
        transient failures in a row hold the handler's events back until its partner is there again.

        With `batch` the function takes a list of up to so many events, gathered for at most `within` after the first
        (by default 200 ms), and returns nothing or a result for each.

        `on_failed_head` says what a dead letter does to the events behind it that have the same ordering key: it
        blocks them until it is replayed, discarded or skipped by an operator, or, with `"skip"`, they go on without it.
        `per_key_concurrency` is how many events of one fairness key run at once in the whole fleet.
        """

        def register(function: Function) -> Function:
            self.add(
                name, event_types, function, retry=retry, timeout=timeout, on_error=on_error, via=via,
                concurrency=concurrency, fleet_concurrency=fleet_concurrency, rate=rate, on_outage=on_outage,
                batch=batch, within=within,
                on_failed_head=on_failed_head, per_key_concurrency=per_key_concurrency,
            )  # fmt: skip
            return function

        return register

    def add(
        self,
        name: str,
        event_types: Iterable[str | type[TypedEvent]],
        function: Callable[..., Any],
        *,
        retry: RetryPolicy = DEFAULT_RETRY_POLICY,
        timeout: float = DEFAULT_TIMEOUT,
        on_error: OnError = "retry",
        via: Via = "outbox",
        concurrency: int | None = None,
        fleet_concurrency: int | None = None,
        rate: str | float | None = None,
        on_outage: OnOutage | Pause = "retry",
        batch: int | None = None,
        within: float | timedelta | str | None = None,
        on_failed_head: OnFailedHead = "block",
        per_key_concurrency: int | None = None,
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
        if not isinstance(event_types, Iterable) or isinstance(event_types, type):
            problem = f"got {getattr(event_types, '__name__', type(event_types).__name__)} instead of event types"
            raise ConfigurationError(
                name, problem, "write add(name, (OrderPlaced,), function), or handler(OrderPlaced)"
            )
        types = tuple(dict.fromkeys(_event_type(name, each) for each in event_types))
        if not types:
            raise ConfigurationError(name, "handles no event type", 'name at least one, like "order.placed"')
        number(f"{name}.timeout", timeout, SHORTEST_TIMEOUT, LONGEST_TIMEOUT)
        one_of(f"{name}.on_error", on_error, get_args(OnError))
        one_of(f"{name}.via", via, get_args(Via))
        one_of(f"{name}.on_failed_head", on_failed_head, get_args(OnFailedHead))
        if per_key_concurrency is not None:
            whole(f"{name}.per_key_concurrency", per_key_concurrency, 1, MOST_IN_THE_FLEET)
        instance(f"{name}.retry", retry, RetryPolicy, "pass RetryPolicy(...)")
        limits: dict[str, Any] = {
            "concurrency": in_a_worker(f"{name}.concurrency", concurrency),
            "fleet_concurrency": in_the_fleet(f"{name}.fleet_concurrency", fleet_concurrency),
            "rate": per_second(f"{name}.rate", rate),
            "breaker": breaker(f"{name}.on_outage", on_outage),
        }
        if via == "in_process":
            skips = None if on_failed_head == "block" else on_failed_head
            asked = {**limits, "per_key_concurrency": per_key_concurrency, "on_failed_head": skips}
            if given := next((key for key, value in asked.items() if value is not None), ""):
                field = "on_outage" if given == "breaker" else given
                raise ConfigurationError(f"{name}.{field}", "is for workers", 'leave it out, or use via="outbox"')
        if on_error == "reject" and limits["breaker"] is not None:
            remedy = 'use on_error="retry": a breaker counts errors that would be retried'
            raise ConfigurationError(f"{name}.on_outage", "does nothing beside on_error='reject'", remedy)
        require_function(name, function, "decorate a function that takes the event")
        gathered = batch_of(name, batch, within, function)
        if gathered is not None and via == "in_process":
            remedy = 'leave batch out, or let a worker run it: via="outbox"'
            raise ConfigurationError(f"{name}.batch", 'does not go with via="in_process"', remedy)
        parameters = parameters_of(name, function, batch=gathered is not None)
        _require_own_types(name, types, parameters)
        handler = Handler(
            name=name,
            domain_context=self._domain_context or name.partition(".")[0],
            event_types=types,
            function=function if gathered is None else alone(name, function, asynchronous=parameters.asynchronous),
            retry=retry,
            timeout=float(timeout),
            on_error=on_error,
            via=via,
            **limits,
            on_failed_head=on_failed_head,
            per_key_concurrency=per_key_concurrency,
            parameters=parameters,
            asynchronous=parameters.asynchronous,
            transactional="tx" in parameters.wanted,
            plain=parameters.asynchronous and not parameters.wanted and parameters.typed_envelope is None,
            batch=gathered,
        ).within(self._lifespan, self._middleware)
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

    def include(self, other: HandlerRegistry) -> None:
        """Take over the handlers and schedules that another registry has now.

        They keep its lifespan and its middleware, within those of this registry.
        """
        require_registry(other)
        for handler in other:
            if handler.name in self._handlers:
                raise ConfigurationError(handler.name, "is registered twice", "include each registry once")
            self._handlers[handler.name] = handler.within(self._lifespan, self._middleware)
        for schedule in other.schedules:
            self._declare(schedule)


def _name_of(result: object) -> str:
    kind = type(result).__name__
    name = getattr(result, "__qualname__", "")
    return f"the {kind} {name}" if name else f"an object of {kind}"


def require_registry(registry: object) -> HandlerRegistry:
    """Return a value that is a handler registry; refuse any other."""
    return instance("registry", registry, HandlerRegistry, "pass the HandlerRegistry() that your handlers are in")


@cache
def pattern_of(event_type: str) -> re.Pattern[str]:
    """Return the regular expression for an event type in which `*` stands for any characters."""
    return re.compile(".*".join(map(re.escape, event_type.split("*"))), re.DOTALL)


def _event_type(name: str, given: object) -> str:
    if not isinstance(given, type):
        return event_pattern(name, given)
    try:
        declared, _ = declared_type(given)
    except FieldError as error:
        raise ConfigurationError(f"{name}.{error.field}", error.problem, error.remedy) from None
    return event_pattern(name, declared)


def _require_own_types(name: str, types: tuple[str, ...], parameters: Parameters) -> None:
    """Refuse an event class whose type is none of those for which the handler is registered."""
    for model in filter(None, (parameters.event_model, parameters.payload_model)):
        declared = model.by_type
        if declared and not any(pattern_of(each).fullmatch(kind) for each in types for kind in declared):
            problem = f"is registered for {', '.join(types)}, and takes events of {', '.join(declared)}"
            raise ConfigurationError(name, problem, "register it for the event class that it takes")
