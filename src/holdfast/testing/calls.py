"""Handlers that note their calls, for the tests of `OutboxContract`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.handlers import HandlerRegistry


class Calls:
    """Handlers that note their calls, and do what they are told."""

    def __init__(self) -> None:
        self.registry = HandlerRegistry()
        self.seen: list[tuple[str, EventEnvelope]] = []
        self.contexts: list[HandlerContext] = []

    def handler(
        self, name: str, *types: str, does: Callable[[EventEnvelope, int], Any] | None = None, **options: Any
    ) -> None:
        """Register a handler. `does` gets the event and the number of its call; what it returns or raises counts."""
        number = iter(range(1, 1_000_000))

        async def run(event: EventEnvelope, context: HandlerContext) -> Any:
            self.seen.append((name, event))
            self.contexts.append(context)
            return None if does is None else does(event, next(number))

        self.registry.add(name, types, run, **options)

    def batch_handler(self, name: str, *types: str, does: Callable[[int], Any]) -> list[list[int]]:
        """Register a batch handler. Returns the numbers of each of its calls, as they are made; `does` gets each."""
        made: list[list[int]] = []

        async def run(events: list[EventEnvelope]) -> list[Any]:
            made.append([event.payload["n"] for event in events])
            return [does(event.payload["n"]) for event in events]

        self.registry.add(name, types, run, batch=50, within=0.05)
        return made

    def of(self, name: str) -> list[EventEnvelope]:
        """The events that a handler was called with."""
        return [event for handler, event in self.seen if handler == name]

    def values(self, name: str) -> list[Any]:
        """The values in their payloads."""
        return [event.payload.get("n") for event in self.of(name)]


def failing(error: Exception, times: int = 1_000) -> Callable[[EventEnvelope, int], Any]:
    """Return what fails so many times."""

    def run(event: EventEnvelope, call: int) -> None:
        if call <= times:
            raise error

    return run
