"""Middleware: functions around handlers, in the order in which the registry has them, the first one outermost.

    async def timing(event, call_next):
        started = time.monotonic()
        try:
            return await call_next(event)
        finally:
            print(event.event_type, time.monotonic() - started)

    registry = HandlerRegistry(middleware=[timing])

Further parameters are recognised by name, as those of handlers are: `context` and `state`.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from holdfast.checks import function as require_function
from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError, TerminalHandlerError
from holdfast.lifespan import Lifespan, States
from holdfast.outcome import Done, Outcome, Reject, Retry, Snooze
from holdfast.parameters import middleware_parameters

__all__ = ["CallNext", "MiddlewareFunction"]

# What a middleware gets as `call_next`: the next middleware, or the handler in the end.
CallNext: TypeAlias = Callable[[EventEnvelope], Awaitable[Outcome]]
# Takes `event` and `call_next`, and if it has these parameters, `context` and `state`.
MiddlewareFunction: TypeAlias = Callable[..., Awaitable[Outcome | None]]


@dataclass(frozen=True, slots=True)
class Middleware:
    """A middleware of a registry, and the lifespan of that registry."""

    name: str
    function: MiddlewareFunction
    wanted: frozenset[str]
    lifespan: Lifespan | None

    async def run(
        self, context: HandlerContext, states: Mapping[Lifespan, object], call_next: CallNext, event: EventEnvelope
    ) -> Outcome:
        """Return the outcome: what the middleware returns, or else what came from within."""
        within: Outcome | None = None

        async def noting(event: EventEnvelope) -> Outcome:
            nonlocal within
            if not isinstance(event, EventEnvelope):
                raise TerminalHandlerError(
                    f"{self.name} gave {type(event).__name__} to call_next; write await call_next(event)"
                )
            within = None
            within = await call_next(event)
            return within

        given: dict[str, Any] = {"event": event, "call_next": noting, "context": context}
        if self.lifespan is not None:
            given["state"] = states[self.lifespan]
        result = await self.function(**{name: value for name, value in given.items() if name in self.wanted})
        if isinstance(result, Done | Retry | Snooze | Reject):
            return result
        if result is not None:
            raise TerminalHandlerError(
                f"{self.name} returned {type(result).__name__}; return what call_next returned, or nothing"
            ).blaming(self.function)
        if within is None:
            raise TerminalHandlerError(
                f"{self.name} returned nothing although no handler has ended well; await call_next(event), let its "
                "error pass, or return an outcome of its own, like Done()"
            ).blaming(self.function)
        return within


def middlewares(functions: object, lifespan: Lifespan | None) -> tuple[Middleware, ...]:
    """Return the middlewares of a registry; refuse what is none."""
    if not isinstance(functions, Iterable):
        raise ConfigurationError("middleware", f"is {type(functions).__name__}, not a list", "pass a list of functions")
    found = []
    for each in functions:
        require_function("middleware", each, "pass a list of functions: async def timing(event, call_next)")
        name = getattr(each, "__name__", type(each).__name__)
        found.append(Middleware(name, each, middleware_parameters(name, each), lifespan))
    return tuple(found)


async def run_through(
    around: Iterable[Middleware], handler: CallNext, event: EventEnvelope, context: HandlerContext, states: States
) -> Outcome:
    """Run a handler with the middlewares around it."""
    call = handler
    for each in reversed(tuple(around)):
        call = partial(each.run, context, states, call)
    return await call(event)
