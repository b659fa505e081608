"""Protocols between an application and the transport that carries its events."""

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from holdfast.envelope import EventEnvelope

EventHandler = Callable[[EventEnvelope], Awaitable[None]]


@runtime_checkable
class EventPublisher(Protocol):
    """Accepts an event; it is delivered if and only if the surrounding transaction commits."""

    async def publish(self, envelope: EventEnvelope) -> None: ...


@runtime_checkable
class EventListener(Protocol):
    """Delivers the events of a channel to a handler, each at least once.

    `handler_name` begins with a domain context (`billing.charge_card`): it is half of the key under which handled
    events are remembered, so two handlers of one name would hide each other's events.
    """

    async def listen(self, *, channel: str, handler_name: str, handler: EventHandler) -> None: ...
