"""Runs one handler as a worker would, without a database: with its middleware and its time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from holdfast.context import HandlerContext, current_context
from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError
from holdfast.handlers import Handler, HandlerRegistry, require_registry
from holdfast.handling.calls import BatchCall, EventCall
from holdfast.handling.calls import Call as HandlerCall
from holdfast.handling.lifespans import Lifespans
from holdfast.handling.runner import limited
from holdfast.outcome import Outcome
from holdfast.testing.events import make_event
from holdfast.testing.loop import CallingThread, in_event_loop, kit_loop
from holdfast.typed_events import is_typed_event

__all__ = ["run_handler"]

_MISSING = object()
Call = Callable[..., Awaitable[Any]]
R = TypeVar("R")


def run_handler(
    registry: HandlerRegistry,
    name: str,
    payload: Any = None,
    *,
    tx: Any = None,
    state: Any = _MISSING,
    attempt: int = 1,
    headers: Mapping[str, str] | None = None,
    event_type: str | None = None,
) -> Any:
    """Run a handler once, with an event of this payload, and return its outcome, or raise its error.

    `payload` is a dict, a model, an object of an event class, or an event of `make_event`; for a batch handler also a
    list of those: the result is then a list of outcomes and exceptions, one for each. A handler that takes `tx` or
    `state` gets what is passed; without `state`, the registry's lifespan is entered around the call. In code that runs
    in an event loop, write `await run_handler(...)`.
    """
    handler = find_handler(registry, name)
    several = handler.batch is not None and isinstance(payload, list | tuple)
    events = [_event(handler, each, event_type) for each in (payload if several else [payload])]
    if handler.transactional and tx is None:
        remedy = f"pass tx=, such as a fake with the methods that {name} calls; with a database, use the outbox fixture"
        raise ConfigurationError("tx", f"is needed by {name}", remedy)
    if several:
        contexts = [_context(handler, each, attempt, headers or {}) for each in events]
        run: Any = partial(run_batch, handler, events, contexts, tx=tx, state=state)
    else:
        run = partial(run_once, handler, events[0], tx=tx, state=state, attempt=attempt, headers=headers or {})
    if in_event_loop():
        return run()
    if tx is None:
        return kit_loop().run(run())
    # In this thread: a `tx` that is passed belongs to it, as Django's connections do.
    caller = CallingThread()
    return kit_loop().run(run(call=caller.call), caller)


def find_handler(registry: HandlerRegistry, name: str) -> Handler:
    """Return a handler of a registry; the error for one that is not there names the nearest."""
    if name in require_registry(registry):
        return registry[name]
    names = [handler.name for handler in registry]
    nearest = get_close_matches(name, names, n=1)
    remedy = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(sorted(names)) or 'no handlers'}"
    raise ConfigurationError(str(name), "is not a handler of this registry", remedy)


async def run_once(
    handler: Handler,
    event: EventEnvelope,
    *,
    tx: Any = None,
    state: Any = _MISSING,
    attempt: int = 1,
    headers: Mapping[str, str] | None = None,
    call: Call = asyncio.to_thread,
) -> Outcome:
    """Run a handler once, within its middleware and its time limit, and return its outcome.

    `call` calls a handler that is not asynchronous, in one thread or another.
    """
    context = _context(handler, event, attempt, headers or {})
    return await _run(EventCall(handler, event, context), context, tx, state, call)


async def run_batch(
    handler: Handler,
    events: list[EventEnvelope],
    contexts: list[HandlerContext],
    *,
    tx: Any = None,
    state: Any = _MISSING,
    call: Call = asyncio.to_thread,
) -> list[Outcome | Exception]:
    """Call a batch handler once with several events, as `run_once` does with one, and return the result of each."""
    return await _run(BatchCall(handler, events, contexts), None, tx, state, call)


async def _run(what: HandlerCall[R], context: HandlerContext | None, tx: Any, state: Any, call: Call) -> R:
    handler, token = what.handler, current_context.set(context)
    try:
        if state is not _MISSING:
            states: dict[Any, object] = dict.fromkeys(handler.lifespans, state)
            return await _limited(what, tx, states, call)
        lifespans = Lifespans([handler], lambda fact: None)
        await lifespans.start()
        try:
            return await _limited(what, tx, lifespans.states, call)
        finally:
            await lifespans.stop()
    finally:
        current_context.reset(token)


async def _limited(what: HandlerCall[R], tx: Any, states: Mapping[Any, object], call: Call) -> R:
    handler = what.handler

    async def innermost(what: HandlerCall[R]) -> R:
        function = what.prepared(tx, states[handler.lifespans[-1]] if handler.wants_state else None)
        return what.result_of(await (function() if handler.asynchronous else call(function)))

    return await limited(handler, what.through(states, innermost) if handler.middleware else innermost(what))


def _context(handler: Handler, event: EventEnvelope, attempt: int, headers: Mapping[str, str]) -> HandlerContext:
    return HandlerContext(event.event_id, uuid4(), handler.name, attempt, dict(headers), event.trace_context)


def _event(handler: Handler, payload: Any, event_type: str | None) -> EventEnvelope:
    if isinstance(payload, EventEnvelope):
        return payload
    if event_type is None and is_typed_event(payload):
        return make_event(payload)
    if event_type is None:
        event_type = handler.event_types[0].replace("*", "test")
    return make_event(event_type, payload)
