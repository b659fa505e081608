"""The deliveries a worker holds a lease on: claimed, waiting, running or being settled."""

import asyncio
from collections.abc import Iterable
from uuid import UUID

from holdfast.postgres.delivery import Delivery


class InFlight:
    """The deliveries of one worker. Its loops share it with the thread of the lease keeper, which only takes snapshots.

    A claim looks into the inbox for keys that were handled before, and cannot see that another copy of a key is being
    handled right now. If that happens in this worker, the later copy is marked as a twin, and waits.
    """

    def __init__(self) -> None:
        self._deliveries: dict[UUID, Delivery] = {}
        self._blocked: dict[UUID, Delivery] = {}  # handled, and kept from being settled by another session
        self._keys: dict[tuple[str, str], Delivery] = {}
        # Dropped since the last claim was sent, which may have looked into the inbox too early to find their keys.
        self._dropped: dict[tuple[str, str], UUID] = {}
        self.none = asyncio.Event()
        self.none.set()

    def __len__(self) -> int:
        return len(self._deliveries) + len(self._blocked)

    @property
    def unblocked(self) -> int:
        """How many deliveries wait, run or are being settled."""
        return len(self._deliveries)

    def claiming(self) -> None:
        """Note that a claim is about to be sent."""
        self._dropped.clear()

    def add(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self._deliveries[delivery.id] = delivery
            first = self._keys.setdefault(delivery.key, delivery)
            delivery.twin = first is not delivery or self._dropped.get(delivery.key, delivery.id) != delivery.id
        if self._deliveries:
            self.none.clear()

    def drop(self, *dropped: Delivery) -> None:
        """Remove deliveries, except a row that was claimed again meanwhile under another lease."""
        deliveries, keys, recently = self._deliveries, self._keys, self._dropped
        for delivery in dropped:
            if deliveries.get(delivery.id) is delivery:
                del deliveries[delivery.id]
            elif self._blocked.get(delivery.id) is delivery:
                del self._blocked[delivery.id]
            if keys.get(delivery.key) is delivery:
                del keys[delivery.key]
                recently[delivery.key] = delivery.id
        if not deliveries and not self._blocked:
            self.none.set()

    def block(self, delivery: Delivery) -> None:
        """Keep the lease of a delivery that cannot be settled now, for as long as that takes."""
        if self._deliveries.get(delivery.id) is delivery:
            self._blocked[delivery.id] = self._deliveries.pop(delivery.id)

    # Each copy is one step of the interpreter: safe in another thread.

    def snapshot(self) -> list[Delivery]:
        return list(self._deliveries.values()) + self.snapshot_blocked()

    def snapshot_blocked(self) -> list[Delivery]:
        return list(self._blocked.values())
