"""What a view says about itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from holdfast.errors import ConfigurationError
from holdfast.integrations.django.exchange import ATTRIBUTE, DjangoExchange

View = Callable[..., Any]


@overload
def idempotent(view: View) -> View: ...
@overload
def idempotent(*, required: bool = True) -> Callable[[View], View]: ...
def idempotent(view: View | None = None, *, required: bool = True) -> Any:
    """A view that is carried out once for each key. Put it closest to the view, under the decorators that authenticate.

    For a method of a class-based view: `@method_decorator(idempotent)`.
    """
    if view is None:
        return functools.partial(idempotent, required=required)

    @functools.wraps(view)
    def entered(request: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = getattr(request, ATTRIBUTE, None)
        if not isinstance(exchange, DjangoExchange):
            raise ConfigurationError(
                "MIDDLEWARE",
                "has no idempotency for this request, or the request has another method",
                "add holdfast.integrations.django.IdempotencyMiddleware, and take part with POST and PATCH only",
            )
        exchange.begin(required=required)
        return view(request, *args, **kwargs)

    return entered
