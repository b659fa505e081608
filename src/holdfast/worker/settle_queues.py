"""The queues of what waits to be settled: one for each kind, with its statement, and what is counted and reported."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from uuid import UUID

import asyncpg

from holdfast.postgres.delivery import Delivery
from holdfast.worker.settlements import Fail, Release, Retry, Settlement, Snooze
from holdfast.worker.shared import Shared
from holdfast.worker.wakeups import Wakeups

_NOT_DEAD = ("cancelled", "expired")
Some = TypeVar("Some", bound=Settlement | Delivery)


@dataclass(slots=True, eq=False)
class SettleQueue(Generic[Some]):
    """Settlements of one kind that wait for the next batch."""

    send: Callable[[asyncpg.Connection, Sequence[Some]], Awaitable[list[UUID]]]  # returns the ids of lost leases
    settled: Callable[[Sequence[Some]], None]  # counts and reports what the statement has settled
    records: bool = False  # writes the inbox
    deletes: bool = False  # may delete rows, for which it needs a stronger lock
    otherwise: "SettleQueue[Some] | None" = None  # for rows that another session keeps from being settled like this
    waiting: list[Some] = field(default_factory=list)


class SettleQueues:
    """All of them, in the order in which they are settled.

    A retry or a snooze wakes the claimer: it may be due before the moment until which the claimer sleeps.
    """

    def __init__(self, shared: Shared, wakeups: Wakeups) -> None:
        self._deliveries = shared.deliveries
        self._counters = shared.counters
        self._tally = shared.tally
        self._observe = shared.observe
        self._wakeups = wakeups
        self._archives = shared.settings.dead_letters == "archive"
        # Successes wait as bare deliveries: they are nearly all, and an object around each would be waste.
        self.deliver: SettleQueue[Delivery] = SettleQueue(
            self._send_deliver,
            self._delivered,
            records=True,
            deletes=True,
            otherwise=SettleQueue(self._send_unrecorded, self._delivered),
        )
        self.duplicate: SettleQueue[Delivery] = SettleQueue(
            self._send_duplicate,
            self._duplicated,
            deletes=True,
            otherwise=SettleQueue(self._send_unrecorded, self._duplicated),
        )
        self.retry: SettleQueue[Retry] = SettleQueue(self._send_retry, self._retried)
        self.fail: SettleQueue[Fail] = SettleQueue(self._send_fail, self._failed)
        self.archive: SettleQueue[Fail] = SettleQueue(
            self._send_archive, self._archived, deletes=True, otherwise=self.fail
        )
        self.release: SettleQueue[Release] = SettleQueue(self._send_release, self._released)
        self.snooze: SettleQueue[Snooze] = SettleQueue(self._send_snooze, self._snoozed)
        self._all: tuple[SettleQueue[Any], ...] = (
            self.deliver,
            self.duplicate,
            self.retry,
            self.fail,
            self.archive,
            self.release,
            self.snooze,
        )

    def __iter__(self) -> Iterator[SettleQueue[Any]]:
        return iter(self._all)

    @property
    def waiting(self) -> int:
        """How many settlements wait."""
        return sum(len(queue.waiting) for queue in self._all)

    def of(self, settlement: Settlement) -> SettleQueue[Any]:
        """Return the queue that settles it."""
        match settlement:
            case Retry():
                return self.retry
            case Fail():
                # Cancelled and expired events need no attention: they stay in the outbox.
                archived = self._archives and settlement.reason not in _NOT_DEAD
                return self.archive if archived else self.fail
            case Release():
                return self.release
            case Snooze():
                return self.snooze

    # --- the statement of each queue, and what follows it ----------------------------------------------

    async def _send_deliver(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        return await self._deliveries.deliver(connection, batch, record=True)

    def _delivered(self, batch: Sequence[Delivery]) -> None:
        self._tally.handled(batch)

    async def _send_duplicate(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        return await self._deliveries.deliver(connection, batch, record=False)

    async def _send_unrecorded(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        return await self._deliveries.deliver(connection, batch, record=False, delete=False)

    def _duplicated(self, batch: Sequence[Delivery]) -> None:
        self._counters.duplicates += len(batch)

    async def _send_retry(self, connection: asyncpg.Connection, batch: Sequence[Retry]) -> list[UUID]:
        delays, errors = [s.delay for s in batch], [s.error for s in batch]
        return await self._deliveries.retry(connection, _deliveries(batch), delays, errors)

    def _retried(self, batch: Sequence[Retry]) -> None:
        self._counters.retried += len(batch)
        self._tally.retried(_deliveries(batch))
        for settlement in batch:
            self._observe(settlement.fact)
        self._wakeups.wake_in(min((settlement.delay for settlement in batch), default=0.0))

    async def _send_fail(self, connection: asyncpg.Connection, batch: Sequence[Fail]) -> list[UUID]:
        return await self._deliveries.fail(connection, *_failures(batch))

    def _failed(self, batch: Sequence[Fail]) -> None:
        expired = sum(s.reason == "expired" for s in batch)
        self._counters.expired += expired
        self._counters.failed += len(batch) - expired
        self._tally.failed(s.delivery for s in batch if s.reason not in _NOT_DEAD)
        for settlement in batch:
            self._observe(settlement.fact)

    async def _send_archive(self, connection: asyncpg.Connection, batch: Sequence[Fail]) -> list[UUID]:
        return await self._deliveries.archive(connection, *_failures(batch))

    def _archived(self, batch: Sequence[Fail]) -> None:
        self._counters.archived += len(batch)
        self._failed(batch)

    async def _send_release(self, connection: asyncpg.Connection, batch: Sequence[Release]) -> list[UUID]:
        return await self._deliveries.release(connection, _deliveries(batch), [0.0] * len(batch))

    def _released(self, batch: Sequence[Release]) -> None:
        self._counters.released += len(batch)

    async def _send_snooze(self, connection: asyncpg.Connection, batch: Sequence[Snooze]) -> list[UUID]:
        return await self._deliveries.release(connection, _deliveries(batch), [s.delay for s in batch])

    def _snoozed(self, batch: Sequence[Snooze]) -> None:
        self._counters.snoozed += len(batch)
        if batch:
            self._wakeups.wake_in(min(settlement.delay for settlement in batch))


def delivery_of(settlement: Settlement | Delivery) -> Delivery:
    """Return the delivery that is settled; one that is delivered stands for itself."""
    return settlement if isinstance(settlement, Delivery) else settlement.delivery


def _deliveries(batch: Sequence[Settlement]) -> list[Delivery]:
    return [settlement.delivery for settlement in batch]


def _failures(batch: Sequence[Fail]) -> tuple[list[Delivery], list[str], list[str | None], list[str | None]]:
    return _deliveries(batch), [s.reason for s in batch], [s.error for s in batch], [s.signature for s in batch]
