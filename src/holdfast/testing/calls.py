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
        """Register a handler that returns or raises what `does` does with the event and the number of the call."""
        number = iter(range(1, 1_000_000))

        async def run(event: EventEnvelope, context: HandlerContext) -> Any:
            self.seen.append((name, event))
            self.contexts.append(context)
            return None if does is None else does(event, next(number))

        self.registry.add(name, types, run, **options)

    def batch_handler(self, name: str, *types: str, does: Callable[[int], Any]) -> list[list[int]]:
        """Register a batch handler that calls `does` for each event; return a list that gets each call's numbers."""
        made: list[list[int]] = []

        async def run(events: list[EventEnvelope]) -> list[Any]:
            made.append([event.payload["n"] for event in events])
            return [does(event.payload["n"]) for event in events]

        self.registry.add(name, types, run, batch=50, within=0.05)
        return made

    def of(self, name: str) -> list[EventEnvelope]:
        """Return the events with which a handler was called."""
        return [event for handler, event in self.seen if handler == name]

    def values(self, name: str) -> list[Any]:
        """Return the values in the payloads of those events."""
        return [event.payload.get("n") for event in self.of(name)]


def failing(error: Exception, times: int = 1_000) -> Callable[[EventEnvelope, int], Any]:
    """Return a function for `does` that fails so many times."""

    def run(event: EventEnvelope, call: int) -> None:
        if call <= times:
            raise error

    return run
