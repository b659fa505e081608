"""The queues of what waits to be settled: one for each kind, with its statement, and what is counted and reported."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from uuid import UUID

import asyncpg

from holdfast.postgres.delivery import Delivery
from holdfast.worker.settlements import Fail, Falter, Release, Retry, Settlement, Snooze, deliveries_of
from holdfast.worker.shared import Shared
from holdfast.worker.wakeups import Wakeups

Some = TypeVar("Some", bound=Settlement | Delivery)


@dataclass(slots=True, eq=False)
class SettleQueue(Generic[Some]):
    """Settlements of one kind that wait for the next batch."""

    way: str  # as the fact `Settled` names it
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
        self._flow = shared.flow
        self._breakers = shared.breakers
        self._reports = shared.reports
        self._wakeups = wakeups
        self._archives = shared.settings.dead_letters == "archive"
        # Successes wait as bare deliveries: they are nearly all, and an object around each would be waste.
        self.deliver: SettleQueue[Delivery] = SettleQueue(
            "deliver",
            self._send_deliver,
            self._reports.delivered,
            records=True,
            deletes=True,
            otherwise=SettleQueue("deliver", self._send_deliver_unrecorded, self._reports.delivered),
        )
        self.duplicate: SettleQueue[Delivery] = SettleQueue(
            "duplicate",
            self._send_duplicate,
            self._reports.duplicated,
            deletes=True,
            otherwise=SettleQueue("duplicate", self._send_duplicate_undeleted, self._reports.duplicated),
        )
        self.retry: SettleQueue[Retry] = SettleQueue("retry", self._send_retry, self._retried)
        self.fail: SettleQueue[Fail] = SettleQueue("fail", self._send_fail, self._failed)
        self.archive: SettleQueue[Fail] = SettleQueue(
            "archive", self._send_archive, self._archived, deletes=True, otherwise=self.fail
        )
        self.falter: SettleQueue[Falter] = SettleQueue("falter", self._send_falter, self._faltered)
        self.release: SettleQueue[Release] = SettleQueue("release", self._send_release, self._reports.released)
        self.snooze: SettleQueue[Snooze] = SettleQueue("snooze", self._send_snooze, self._snoozed)
        self._all: tuple[SettleQueue[Any], ...] = (
            self.deliver,
            self.duplicate,
            self.retry,
            self.falter,
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
        return sum([len(queue.waiting) for queue in self._all])

    def of(self, settlement: Settlement) -> SettleQueue[Any]:
        """Return the queue that settles it."""
        match settlement:
            case Retry():
                return self.retry
            case Fail():
                return self.archive if self._archives and settlement.dead else self.fail
            case Release():
                return self.release
            case Snooze():
                return self.snooze
            case Falter():
                return self.falter

    # --- the statement of each queue, and what follows it ----------------------------------------------

    async def _send_deliver(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        return await self._deliveries.deliver(connection, batch, "delivered", record=True)

    async def _send_duplicate(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        return await self._deliveries.deliver(connection, batch, "duplicate", record=False)

    async def _send_deliver_unrecorded(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        return await self._deliveries.deliver(connection, batch, "delivered", record=False, delete=False)

    async def _send_duplicate_undeleted(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        return await self._deliveries.deliver(connection, batch, "duplicate", record=False, delete=False)

    async def _send_retry(self, connection: asyncpg.Connection, batch: Sequence[Retry]) -> list[UUID]:
        delays, errors = [s.delay for s in batch], [s.report.stored_briefly for s in batch]
        return await self._deliveries.retry(connection, deliveries_of(batch), delays, errors)

    def _retried(self, batch: Sequence[Retry]) -> None:
        self._reports.retried(batch)
        if batch:
            self._wakeups.wake_in(min(settlement.delay for settlement in batch))

    async def _send_falter(self, connection: asyncpg.Connection, batch: Sequence[Falter]) -> list[UUID]:
        found = await self._flow.falter(connection, batch)
        settled = {each.id: each for each in found}
        for falter in batch:
            became = settled[falter.delivery.id]
            falter.verdict, falter.open = became.verdict, became.open
        self._breakers.answered(batch, found)
        lost = [each.id for each in found if each.verdict == "lost"]
        fails = [each.fail for each in batch if each.verdict == "fail" and each.fail is not None]
        if fails:
            lost += await (self._send_archive if self._archives else self._send_fail)(connection, fails)
        return lost

    def _faltered(self, batch: Sequence[Falter]) -> None:
        again = [
            Retry(each.delivery, each.delay, each.report, held=each.verdict == "hold" and each.open)
            for each in batch
            if each.verdict in ("retry", "hold")
        ]
        self._retried([each for each in again if not each.held])
        self._reports.retried([each for each in again if each.held])
        fails = [each.fail for each in batch if each.verdict == "fail" and each.fail is not None]
        for each in fails:
            self._reports.judged(each)
        self._reports.failed(fails, archived=self._archives)

    async def _send_fail(self, connection: asyncpg.Connection, batch: Sequence[Fail]) -> list[UUID]:
        return await self._deliveries.fail(connection, *_failures(batch))

    def _failed(self, batch: Sequence[Fail]) -> None:
        self._reports.failed(batch, archived=False)

    async def _send_archive(self, connection: asyncpg.Connection, batch: Sequence[Fail]) -> list[UUID]:
        return await self._deliveries.archive(connection, *_failures(batch))

    def _archived(self, batch: Sequence[Fail]) -> None:
        self._reports.failed(batch, archived=True)

    async def _send_release(self, connection: asyncpg.Connection, batch: Sequence[Release]) -> list[UUID]:
        return await self._deliveries.release(connection, deliveries_of(batch), [0.0] * len(batch))

    async def _send_snooze(self, connection: asyncpg.Connection, batch: Sequence[Snooze]) -> list[UUID]:
        return await self._deliveries.release(connection, deliveries_of(batch), [s.delay for s in batch])

    def _snoozed(self, batch: Sequence[Snooze]) -> None:
        self._reports.snoozed(batch)
        if batch:
            self._wakeups.wake_in(min(settlement.delay for settlement in batch))


def _failures(batch: Sequence[Fail]) -> tuple[Sequence[Delivery], list[str], list[str | None], list[str | None]]:
    errors = [None if s.report is None else s.report.stored for s in batch]
    return deliveries_of(batch), [s.reason for s in batch], errors, [s.signature for s in batch]
