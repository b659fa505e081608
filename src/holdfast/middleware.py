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

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.checks import function as require_function
from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError
from holdfast.lifespan import Lifespan
from holdfast.outcome import Outcome
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
