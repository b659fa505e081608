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

# The argument `call_next` of a middleware: it calls the next middleware, or the handler in the end.
CallNext: TypeAlias = Callable[[EventEnvelope], Awaitable[Outcome]]
# A middleware takes `event` and `call_next`, and `context` and `state` if it has these parameters.
MiddlewareFunction: TypeAlias = Callable[..., Awaitable[Outcome | None]]


@dataclass(frozen=True, slots=True)
class Middleware:
    """A middleware, and the lifespan of the registry that it belongs to."""

    name: str
    function: MiddlewareFunction
    wanted: frozenset[str]
    lifespan: Lifespan | None


def middlewares(functions: object, lifespan: Lifespan | None) -> tuple[Middleware, ...]:
    """Return the middlewares of a registry; refuse values that are none."""
    if not isinstance(functions, Iterable):
        raise ConfigurationError("middleware", f"is {type(functions).__name__}, not a list", "pass a list of functions")
    found = []
    for each in functions:
        require_function("middleware", each, "pass a list of functions: async def timing(event, call_next)")
        name = getattr(each, "__name__", type(each).__name__)
        found.append(Middleware(name, each, middleware_parameters(name, each), lifespan))
    return tuple(found)
