"""The deliveries a worker holds a lease on: claimed, waiting, running or being settled."""

import asyncio
from collections.abc import Callable, Iterable
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
        self._freed: list[Delivery] = []
        self._on_freed: Callable[[], None] = lambda: None
        self.none = asyncio.Event()
        self.none.set()

    def __len__(self) -> int:
        return len(self._deliveries) + len(self._blocked)

    def __contains__(self, delivery: Delivery) -> bool:
        return self._deliveries.get(delivery.id) is delivery or self._blocked.get(delivery.id) is delivery

    @property
    def unblocked(self) -> int:
        """How many deliveries wait, run or are being settled."""
        return len(self._deliveries)

    def when_freed(self, call: Callable[[], None]) -> None:
        """Have this called when a delivery has ended for which others of its key wait."""
        self._on_freed = call

    def take_freed(self) -> list[Delivery]:
        """Return the deliveries that have ended since the last time, and for which others of their key wait."""
        freed, self._freed = self._freed, []
        return freed

    def claiming(self) -> None:
        """Note that a claim is about to be sent."""
        self._dropped.clear()

    def add(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Hold deliveries. Returns those that they replace: the same rows under leases that are lost by now.

        An attempt in a transaction has the row locked: that it is claimed again says that the attempt has not begun,
        or has committed a retry whose answer is on its way. Its own fence tells which, and keeps the two apart.
        """
        replaced: list[Delivery] = []
        held, blocked, keys, recently = self._deliveries, self._blocked, self._keys, self._dropped
        for delivery in deliveries:
            id, key = delivery.id, delivery.key
            earlier = held.get(id) or (blocked and blocked.get(id))
            held[id] = delivery
            if earlier and delivery.handler.transactional:
                if keys.get(key) is earlier:
                    keys[key] = delivery
            elif earlier:
                replaced.append(earlier)
            if keys.setdefault(key, delivery) is not delivery or (recently and recently.get(key, id) != id):
                delivery.twin = True
        if held:
            self.none.clear()
        return replaced

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
            if delivery.awaited:
                self._freed.append(delivery)
        if not deliveries and not self._blocked:
            self.none.set()
        if self._freed:
            self._on_freed()

    def block(self, delivery: Delivery) -> None:
        """Keep the lease of a delivery that cannot be settled now, for as long as that takes."""
        if self._deliveries.get(delivery.id) is delivery:
            self._blocked[delivery.id] = self._deliveries.pop(delivery.id)

    # Each copy is one step of the interpreter: safe in another thread.

    def snapshot(self) -> list[Delivery]:
        return list(self._deliveries.values()) + self.snapshot_blocked()

    def snapshot_blocked(self) -> list[Delivery]:
        return list(self._blocked.values())
