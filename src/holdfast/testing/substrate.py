"""The protocol of an outbox that `OutboxContract` can test."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Protocol

from holdfast.envelope import EventEnvelope
from holdfast.handlers import HandlerRegistry
from holdfast.testing.records import DeliveryRecord, Drained, PublishedEvent


class Substrate(Protocol):
    """An outbox as the contract uses it."""

    def publish(
        self, event: str, payload: Any = None, *, source: str = "test", committed: bool = True, **options: Any
    ) -> EventEnvelope:
        """Publish an event in a transaction of its own; if it is not `committed`, roll it back."""

    def cancel(self, key: str, *, source: str = "test") -> bool:
        """Cancel the pending event of a key."""

    def reschedule(self, key: str, *, delay: float, source: str = "test") -> bool:
        """Move the pending event of a key."""

    def drain(self, registry: HandlerRegistry, *, due_only: bool = False) -> Drained:
        """Deliver the events that are due; unless `due_only`, also those that are due later."""

    def advance(self, *, registry: HandlerRegistry, **by: float) -> Drained:
        """Let time pass, and deliver each event when it is due."""

    def freeze(self, at: datetime) -> datetime:
        """Stop the clock at a moment."""

    @property
    def now(self) -> datetime:
        """The time of the outbox."""

    def published(self) -> list[PublishedEvent]:
        """Return every event that was published and committed."""

    def deliveries(self) -> list[DeliveryRecord]:
        """Return the deliveries: each event at each of its handlers, with its state."""

    def handled(self) -> list[tuple[str, EventEnvelope]]:
        """Return the pairs of a handler and an event that it has handled."""
