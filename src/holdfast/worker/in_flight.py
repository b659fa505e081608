"""The deliveries a worker holds a lease on: claimed, waiting, running or being settled."""

import asyncio
from collections.abc import Iterable
from uuid import UUID

from holdfast.postgres.deliveries import Delivery


class InFlight:
    """Shared by the loops of a worker and its heartbeat thread, which only ever takes snapshots.

    The claim looks into the inbox for a key that was handled before, and cannot see that another copy of it is being
    handled right now. If that happens in this worker, the later copy is marked as a twin, and waits.
    """

    def __init__(self) -> None:
        self._deliveries: dict[UUID, Delivery] = {}
        self._keys: dict[tuple[str, str], Delivery] = {}
        # Since the last claim was sent, whose look into the inbox may have been too early.
        self._let_go: dict[tuple[str, str], UUID] = {}
        self.none = asyncio.Event()
        self.none.set()

    def __len__(self) -> int:
        return len(self._deliveries)

    def claiming(self) -> None:
        """A claim is about to be sent."""
        self._let_go.clear()

    def add(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self._deliveries[delivery.id] = delivery
            first = self._keys.setdefault(delivery.key, delivery)
            delivery.twin = first is not delivery or self._let_go.get(delivery.key, delivery.id) != delivery.id
        if self._deliveries:
            self.none.clear()

    def drop(self, *dropped: Delivery) -> None:
        """Let go of deliveries, unless a row was claimed again meanwhile under another lease."""
        deliveries, keys, let_go = self._deliveries, self._keys, self._let_go
        for delivery in dropped:
            if deliveries.get(delivery.id) is delivery:
                del deliveries[delivery.id]
            if keys.get(delivery.key) is delivery:
                del keys[delivery.key]
                let_go[delivery.key] = delivery.id
        if not deliveries:
            self.none.set()

    def get(self, identity: UUID) -> Delivery | None:
        return self._deliveries.get(identity)

    def snapshot(self) -> list[Delivery]:
        return list(self._deliveries.values())  # one step for the interpreter: safe from another thread
