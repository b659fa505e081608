"""The deliveries a worker holds a lease on: claimed, waiting, running or being settled."""

from collections.abc import Iterable
from uuid import UUID

from holdfast.postgres.deliveries import Delivery


class Held:
    """Shared by the loops of a worker and its heartbeat thread, which only ever takes snapshots."""

    def __init__(self) -> None:
        self._deliveries: dict[UUID, Delivery] = {}

    def __len__(self) -> int:
        return len(self._deliveries)

    def add(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self._deliveries[delivery.id] = delivery

    def drop(self, delivery: Delivery) -> None:
        """Let go of a delivery, unless the row was claimed again meanwhile under another lease."""
        if self._deliveries.get(delivery.id) is delivery:
            del self._deliveries[delivery.id]

    def get(self, identity: UUID) -> Delivery | None:
        return self._deliveries.get(identity)

    def snapshot(self) -> list[Delivery]:
        return list(self._deliveries.values())  # one step for the interpreter: safe from another thread
