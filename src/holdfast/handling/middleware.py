"""Runs handlers within their middlewares."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import TerminalHandlerError
from holdfast.lifespan import States
from holdfast.middleware import CallNext, Middleware
from holdfast.outcome import Outcome


async def run_through(
    around: Iterable[Middleware], handler: CallNext, event: EventEnvelope, context: HandlerContext, states: States
) -> Outcome:
    """Run a handler with the middlewares around it."""
    call = handler
    for each in reversed(tuple(around)):
        call = partial(_run, each, context, states, call)
    return await call(event)


async def _run(
    middleware: Middleware, context: HandlerContext, states: States, call_next: CallNext, event: EventEnvelope
) -> Outcome:
    """Return the outcome: what the middleware returns, or else what came from within."""
    name = middleware.name
    within: Outcome | None = None

    async def noting(event: EventEnvelope) -> Outcome:
        nonlocal within
        if not isinstance(event, EventEnvelope):
            raise TerminalHandlerError(f"{name} gave {type(event).__name__} to call_next; write await call_next(event)")
        within = None
        within = await call_next(event)
        return within

    given: dict[str, Any] = {"event": event, "call_next": noting, "context": context}
    if middleware.lifespan is not None:
        given["state"] = states[middleware.lifespan]
    result = await middleware.function(**{key: value for key, value in given.items() if key in middleware.wanted})
    if isinstance(result, Outcome):
        return result
    if result is not None:
        raise TerminalHandlerError(
            f"{name} returned {type(result).__name__}; return what call_next returned, or nothing"
        ).blaming(middleware.function)
    if within is None:
        raise TerminalHandlerError(
            f"{name} returned nothing although no handler has ended well; await call_next(event), let its "
            "error pass, or return an outcome of its own, like Done()"
        ).blaming(middleware.function)
    return within
