"""How a view takes part: the decorator `idempotent`, and `exchange_of`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

from holdfast.errors import ConfigurationError
from holdfast.integrations.django.exchange import ATTRIBUTE, DjangoExchange

View = Callable[..., Any]

_STREAMS = frozenset(("StreamingHttpResponse", "FileResponse"))


def exchange_of(request: Any) -> DjangoExchange:
    """Return the exchange of a request, for a view that begins by itself: `exchange_of(request).begin()`."""
    exchange = getattr(request, ATTRIBUTE, None)
    if not isinstance(exchange, DjangoExchange):
        raise ConfigurationError(
            "MIDDLEWARE",
            "has no idempotency for this request, or the request has another method",
            "add holdfast.integrations.django.IdempotencyMiddleware, and take part with POST and PATCH only",
        )
    return exchange


@overload
def idempotent(view: View) -> View: ...
@overload
def idempotent(*, required: bool = True) -> Callable[[View], View]: ...
def idempotent(view: View | None = None, *, required: bool = True) -> Any:
    """Decorate a view to be carried out once for each key. Put it closest to the view, under the decorators that
    authenticate and validate. A view that validates by itself calls `exchange_of(request).begin()` afterwards instead.

    For a method of a class-based view: `@method_decorator(idempotent)`.
    """
    if view is None:
        return functools.partial(idempotent, required=required)
    _require_repeatable(view)

    @functools.wraps(view)
    def begun(request: Any, *args: Any, **kwargs: Any) -> Any:
        exchange_of(request).begin(required=required)
        return view(request, *args, **kwargs)

    return begun


def _require_repeatable(view: View) -> None:
    """Refuse a view that cannot be repeated, when it is declared."""
    if inspect.iscoroutinefunction(view) or inspect.isgeneratorfunction(view) or inspect.isasyncgenfunction(view):
        _refuse(view, "is asynchronous or a generator", "write a plain function that returns the whole answer")
    # Annotations are not evaluated: Django decorates methods anew for every request, so this has to be quick.
    answer = getattr(view, "__annotations__", {}).get("return", "")
    name = answer if isinstance(answer, str) else getattr(answer, "__name__", "")
    if name.rpartition(".")[2] in _STREAMS:
        _refuse(view, f"answers with {name}, of which a duplicate would get nothing", "return the whole answer")


def _refuse(view: View, problem: str, remedy: str) -> None:
    raise ConfigurationError(f"the view {getattr(view, '__qualname__', view)}", problem, remedy)
