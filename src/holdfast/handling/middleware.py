"""Runs handlers within their middlewares."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from holdfast.context import HandlerContext, current_context
from holdfast.envelope import EventEnvelope
from holdfast.errors import TerminalHandlerError
from holdfast.handlers import Handler
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


async def run_each_through(
    handler: Handler,
    call: Callable[[dict[int, EventEnvelope]], Awaitable[list[Outcome | Exception]]],
    events: Sequence[EventEnvelope],
    contexts: Sequence[HandlerContext],
    states: States,
) -> list[Outcome | Exception]:
    """Run a batch handler within middlewares: each event goes through its own, and the handler is called once.

    It is called with the events that have arrived at it, as soon as every other one has ended on its way. When it
    raises, they all get the error, and unless their middlewares turn that into outcomes, the call has failed.
    """
    waiting: dict[int, tuple[EventEnvelope, asyncio.Future[Outcome]]] = {}
    moved = asyncio.Event()

    def arrive(index: int, event: EventEnvelope) -> Awaitable[Outcome]:
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        waiting[index] = (event, answer)
        moved.set()
        return answer

    async def go(index: int) -> Outcome:
        current_context.set(contexts[index])
        try:
            arriving = partial(arrive, index)
            return await run_through(handler.middleware, arriving, events[index], contexts[index], states)
        finally:
            ways.discard(index)
            moved.set()

    ways = set(range(len(events)))  # the events whose middleware has not ended
    tasks = [asyncio.create_task(go(index)) for index in range(len(events))]
    called: set[int] = set()
    raised: Exception | None = None
    try:
        while ways:
            await moved.wait()
            moved.clear()
            if len(waiting) < len(ways) or not waiting:
                continue
            arrived = {index: waiting[index] for index in sorted(waiting)}
            waiting.clear()
            called.update(arrived)
            try:
                results = await call({index: event for index, (event, _) in arrived.items()})
            except Exception as error:
                raised, results = error, [error] * len(arrived)
            for (_, answer), result in zip(arrived.values(), results, strict=True):
                if answer.done():
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(_raisable(result))
                else:
                    answer.set_result(result)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    failed = [index for index in called if isinstance(ended[index], BaseException)]
    # One transaction for all events: what it has written for one of them is kept only if all succeed.
    if failed and (raised is not None or handler.transactional):
        raise raised or _of(ended[failed[0]])
    return [_of(each) if isinstance(each, BaseException) else each for each in ended]


def _of(error: object) -> Exception:
    """Return the error with which an event ends; one that is not an `Exception` is wrapped."""
    return error if isinstance(error, Exception) else RuntimeError(f"the middleware ended with {type(error).__name__}")


def _raisable(error: Exception) -> Exception:
    """Return an error that a future accepts: it refuses StopIteration, which is therefore wrapped."""
    return RuntimeError("the handler raised StopIteration") if isinstance(error, StopIteration) else error


async def _run(
    middleware: Middleware, context: HandlerContext, states: States, call_next: CallNext, event: EventEnvelope
) -> Outcome:
    """Return the outcome that the middleware returns, or else the one of the handler within it."""
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
