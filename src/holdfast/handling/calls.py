"""Calls of handlers, with one event or with a batch. `HandlerRunner` runs both kinds in the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Self, TypeVar
from uuid import UUID

from holdfast.batch import results_of
from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.handlers import Handler
from holdfast.handling.middleware import run_each_through, run_through
from holdfast.lifespan import States
from holdfast.outcome import Outcome

R = TypeVar("R")
BatchResults = list[Outcome | Exception]  # of each event


class Call(ABC, Generic[R]):
    """One call of a handler, and what its result means."""

    handler: Handler

    @property
    @abstractmethod
    def delivery_id(self) -> UUID:
        """The delivery that a notice about the call names."""

    @abstractmethod
    def prepared(self, tx: object, state: object) -> Callable[[], Any]:
        """Return the function with its arguments; raise an error for a payload that its model refuses."""

    @abstractmethod
    def result_of(self, returned: object) -> R:
        """Return the outcome, or outcomes, for what the function returned."""

    @abstractmethod
    def through(self, states: States, innermost: Callable[[Self], Awaitable[R]]) -> Coroutine[Any, Any, R]:
        """Run the middlewares of the handler, and within them the call with the events that they pass on."""


@dataclass(frozen=True, slots=True)
class EventCall(Call[Outcome]):
    """The call of a handler with one event."""

    handler: Handler
    event: EventEnvelope
    context: HandlerContext

    @property
    def delivery_id(self) -> UUID:
        return self.context.delivery_id

    def prepared(self, tx: object, state: object) -> Callable[[], Any]:
        extras = self.handler.extras(self.event, self.context, tx, state)
        return partial(self.handler.function, self.handler.received(self.event), **extras)

    def result_of(self, returned: object) -> Outcome:
        return self.handler.outcome_of(returned)

    def through(self, states: States, innermost: Callable[[Self], Awaitable[Outcome]]) -> Coroutine[Any, Any, Outcome]:
        async def call(event: EventEnvelope) -> Outcome:
            return await innermost(replace(self, event=event))

        return run_through(self.handler.middleware, call, self.event, self.context, states)


@dataclass(slots=True)
class BatchCall(Call[BatchResults]):
    """The call of a batch handler with several events. An event whose payload is refused fails alone."""

    handler: Handler
    events: list[EventEnvelope]
    contexts: list[HandlerContext]
    _refused: dict[int, Exception] = field(default_factory=dict)

    @property
    def delivery_id(self) -> UUID:
        return self.contexts[0].delivery_id

    def keep(self, indexes: Iterable[int]) -> None:
        """Keep only these events for the call."""
        kept = list(indexes)
        self.events, self.contexts = [self.events[each] for each in kept], [self.contexts[each] for each in kept]

    def prepared(self, tx: object, state: object) -> Callable[[], Any]:
        self._refused.clear()
        received, contexts = [], []
        for index, (event, context) in enumerate(zip(self.events, self.contexts, strict=True)):
            try:
                received.append(self.handler.received(event))
            except Exception as error:
                self._refused[index] = error
            else:
                contexts.append(context)
        batch = self.handler.batch
        if not received or batch is None:
            return _nothing_asynchronous if self.handler.asynchronous else _nothing
        return partial(batch.function, received, **self.handler.batch_extras(contexts, tx, state))

    def result_of(self, returned: object) -> BatchResults:
        batch = self.handler.batch
        given = [event for index, event in enumerate(self.events) if index not in self._refused]
        function = self.handler.function if batch is None else batch.function
        results = iter(results_of(self.handler.name, function, returned, given))
        return [self._refused[index] if index in self._refused else next(results) for index in range(len(self.events))]

    def through(
        self, states: States, innermost: Callable[[Self], Awaitable[BatchResults]]
    ) -> Coroutine[Any, Any, BatchResults]:
        async def call(arrived: dict[int, EventEnvelope]) -> BatchResults:
            contexts = [self.contexts[index] for index in arrived]
            return await innermost(replace(self, events=list(arrived.values()), contexts=contexts, _refused={}))

        return run_each_through(self.handler, call, self.events, self.contexts, states)


def _nothing() -> None:
    """No event is left to call the handler with."""


async def _nothing_asynchronous() -> None:
    """No event is left to call the handler with."""
