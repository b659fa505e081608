"""Lifespans: what handlers use is opened before the first event is claimed, and closed when the last handler has ended.

    @asynccontextmanager
    async def resources() -> AsyncIterator[Resources]:
        async with httpx.AsyncClient(timeout=5) as client:
            yield Resources(client)

    registry = HandlerRegistry(lifespan=resources)

What a lifespan yields is the `state` of the registry's handlers and middlewares.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

from holdfast.checks import function
from holdfast.errors import ConfigurationError

__all__ = ["Lifespan"]

Lifespan: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]
States: TypeAlias = Mapping[Lifespan, object]

_REMEDY = "pass a function without parameters that is decorated with @contextlib.asynccontextmanager"


def require_lifespan(lifespan: Lifespan) -> None:
    """Refuse a value that is not a function which makes an asynchronous context manager."""
    function("lifespan", lifespan, _REMEDY)
    if inspect.isasyncgenfunction(lifespan) or inspect.isgeneratorfunction(lifespan):
        raise ConfigurationError("lifespan", f"{lifespan_name(lifespan)} is a bare generator function", _REMEDY)
    parameters = inspect.signature(lifespan).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise ConfigurationError("lifespan", f"{lifespan_name(lifespan)} has the parameter {needed[0]!r}", _REMEDY)


def lifespan_name(lifespan: object) -> str:
    """Return the name of a lifespan, for messages."""
    return str(getattr(lifespan, "__qualname__", type(lifespan).__qualname__))
