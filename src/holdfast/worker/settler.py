"""Settles finished deliveries in batches: by count, by age, and row by row when the database refuses a batch."""

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import asyncpg

from holdfast.postgres.connection import LOCK_TIMEOUT, own_transaction
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.telemetry import Notice
from holdfast.worker.blocked import Blocked
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.settle_queues import SettleQueue, SettleQueues, Some
from holdfast.worker.settlements import Settlement
from holdfast.worker.shared import Shared
from holdfast.worker.wakeups import Wakeups

MAX_BATCH = 500
# What another session keeps from being settled is tried again this often, each time for this long.
_BLOCKED_INTERVAL = 0.5
_BLOCKED_SHARE = 0.1
_FINISH_PATIENCE = 2.0
_DIVIDE_PATIENCE = 0.3
_SHORT_LOCK_TIMEOUT = 0.002

# After these it is unknown whether the statement was carried out.
_AMBIGUOUS = (OSError, asyncpg.PostgresConnectionError, asyncpg.InternalClientError)


class Settler:
    """One loop, one connection. `add` never waits; `flush` returns when everything added so far is settled.

    While it is `full` no handler may begin: what is handled and not settled runs again when the process dies.

    A row that another session keeps from being settled waits by itself, under its lease, and no other waits with it.
    """

    def __init__(self, shared: Shared, wakeups: Wakeups) -> None:
        self._connection = shared.connections.settle
        self._address = shared.connections.address
        self._in_flight = shared.in_flight
        self._counters = shared.counters
        self._observe = shared.observe
        self._lease = shared.settings.lease
        self._settle_after = shared.settings.settle_after
        self._enough = shared.settings.batch  # to settle without waiting for more
        self._most = 2 * shared.settings.batch
        self._unsettled = 0  # deliveries that were added and are not settled
        self._on_room: Callable[[], None] = lambda: None
        self._queues = SettleQueues(shared, wakeups)
        self._successes = self._queues.deliver
        self._some = asyncio.Event()
        self._many = asyncio.Event()
        self._lock = asyncio.Lock()
        self._outage = shared.outages.of("settle")
        self._reports = HourlyLimit()
        self._blocked: Blocked[SettleQueue[Any], Any] = Blocked(shared.in_flight, shared.observe)
        self._tried_blocked_at = 0.0

    @property
    def full(self) -> bool:
        """Whether as much waits to be settled as may."""
        return self._unsettled >= self._most

    def when_room(self, call: Callable[[], None]) -> None:
        """Have this called whenever the settler was full, and may be so no longer."""
        self._on_room = call

    def deliver(self, delivery: Delivery) -> None:
        """Settle a delivery whose handler succeeded."""
        delivery.payload = ""  # a slow database must not make the worker large
        self._unsettled += 1
        waiting = self._successes.waiting
        waiting.append(delivery)
        # Nearly every event comes here: only the first of a batch, and the one that makes it full, wake the loop.
        if len(waiting) in (1, self._enough):
            self._wake()

    def duplicate(self, delivery: Delivery) -> None:
        """Settle a delivery that was handled before: like a success, but the inbox has it already."""
        self._unsettled += 1
        self._queues.duplicate.waiting.append(delivery)
        self._wake()

    def add(self, settlement: Settlement) -> None:
        """Settle a delivery in any other way."""
        self._unsettled += 1
        self._queues.of(settlement).waiting.append(settlement)
        self._wake()

    def _wake(self) -> None:
        if not self._some.is_set():
            self._some.set()
        if self._queues.waiting >= self._enough:
            self._many.set()

    async def run(self) -> None:
        while True:
            if self._blocked:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_BLOCKED_INTERVAL):
                        await self._some.wait()
            else:
                await self._some.wait()
            if self._some.is_set() and self._queues.waiting < self._enough and self._settle_after:
                try:
                    async with asyncio.timeout(self._settle_after):
                        await self._many.wait()
                except TimeoutError:
                    pass
            await self.flush()
            if self._blocked and time.monotonic() - self._tried_blocked_at > _BLOCKED_INTERVAL:
                async with self._lock:
                    await self._settle_blocked(_BLOCKED_SHARE)

    async def flush(self) -> None:
        """Settle everything that is pending now, but what another session keeps from being settled."""
        async with self._lock:
            pending: list[tuple[SettleQueue[Any], list[Any]]] = []
            for queue in self._queues:
                pending.append((queue, queue.waiting))
                queue.waiting = []
            self._some.clear()
            self._many.clear()
            try:
                for queue, batch in pending:
                    await self._settle(queue, batch)
            except asyncio.CancelledError:
                # The caller cannot wait longer; the next flush takes what is left.
                for queue, left in pending:
                    queue.waiting[:0] = left
                    left.clear()
                self._wake()
                raise
            finally:
                # After a defect the leases must expire: what is left will not be settled.
                for _, left in pending:
                    self._drop(left)

    async def _settle(self, queue: SettleQueue[Some], waiting: list[Some]) -> None:
        """Settle and take from the list, a batch at a time."""
        while waiting:
            batch = waiting[:MAX_BATCH]
            blocked: list[Some] = []
            try:
                await self._send(queue, batch)
            except asyncpg.LockNotAvailableError:
                blocked = await self._divide(queue, batch)
            except Exception as refusal:
                blocked = await self._one_by_one(queue, batch, refusal)
            del waiting[:MAX_BATCH]
            for each in blocked:
                self._blocked.add(queue, each, _delivery(each))
            self._uncount(len(blocked))
            self._drop(_without(batch, blocked))

    def _drop(self, settled: Sequence[Settlement | Delivery]) -> None:
        """Hold the deliveries no longer."""
        self._in_flight.drop(*map(_delivery, settled))
        self._uncount(len(settled))

    def _uncount(self, settled: int) -> None:
        was_full, self._unsettled = self.full, self._unsettled - settled
        if was_full:
            self._on_room()

    async def _send(self, queue: SettleQueue[Some], batch: list[Some], *, wait: bool = True) -> None:
        """Send until the database has answered: while it does not, no other worker can claim the rows either.

        Raises LockNotAvailableError when another session keeps one of the rows from being settled, without `wait` as
        soon as the statement meets it.
        """
        since, ambiguous = time.monotonic(), False
        while True:
            connection = None
            try:
                connection = await self._connection.use()
                if wait and not self._address.pooled:
                    lost = set(await queue.send(connection, batch))
                else:
                    limit = LOCK_TIMEOUT if wait else _SHORT_LOCK_TIMEOUT
                    async with own_transaction(connection, lock_timeout=limit):
                        lost = set(await queue.send(connection, batch))
                break
            except asyncpg.LockNotAvailableError:
                self._outage.over()
                raise
            except PASSING_FAULTS:
                if time.monotonic() - since > self._lease:
                    raise  # something stands in the way of one of the rows
                await asyncio.sleep(random.uniform(0.02, 0.2))
            except CONNECTION_FAULTS as fault:
                if isinstance(fault, ValueError):
                    raise  # asyncpg's error for a value that it cannot send
                ambiguous = ambiguous or (connection is not None and isinstance(fault, _AMBIGUOUS))
                self._connection.drop()
                await self._outage.wait(fault)
                since = time.monotonic()
        self._outage.over()
        self._counters.settles += 1
        if ambiguous:
            lost.clear()  # they were settled by a statement whose answer did not arrive
        self._counters.lost_leases += len(lost)
        queue.settled([each for each in batch if _delivery(each).id not in lost] if lost else batch)

    async def _one_by_one(self, queue: SettleQueue[Some], batch: list[Some], refusal: Exception) -> list[Some]:
        """Settle the rows of a refused batch singly: one bad row costs one row. Returns those that are blocked."""
        blocked = []
        for settlement in batch:
            if len(batch) > 1:
                try:
                    await self._send(queue, [settlement], wait=False)
                    continue
                except asyncpg.LockNotAvailableError:
                    blocked.append(settlement)
                    continue
                except Exception as error:
                    refusal = error
            self._report_refusal(queue, _delivery(settlement), refusal)
        return blocked

    # --- what another session keeps from being settled -------------------------------------------------

    async def _divide(self, queue: SettleQueue[Some], batch: list[Some]) -> list[Some]:
        """Settle a batch in ever smaller parts, and return the rows that are blocked.

        Those of one source and handler stay together as long as they can: who blocks rows blocks many of the same, and
        the others are settled while the parts are large. After a short time what is left is nearly all blocked, and
        the next batch must not wait for it.
        """
        started, blocked = time.monotonic(), []
        parts = deque([sorted(batch, key=_origin)])
        while parts:
            part = parts.popleft()
            if len(part) == 1 or time.monotonic() - started > _DIVIDE_PATIENCE:
                blocked += part
                continue
            for half in _halves(part):
                try:
                    await self._send(queue, half, wait=False)
                except asyncpg.LockNotAvailableError:
                    parts.append(half)
                except Exception as refusal:
                    blocked += await self._one_by_one(queue, half, refusal)
        return blocked

    async def _settle_blocked(self, seconds: float) -> None:
        """Try blocked rows again in turn: one, and twice as many after each that is free, but not for long."""
        self._tried_blocked_at = started = time.monotonic()
        left, portion = len(self._blocked), 1
        while left > 0 and time.monotonic() - started < seconds:
            queue, some = self._blocked.take(min(portion, left))
            left -= len(some)
            blocked: list[Any] = []
            try:
                await self._send(queue, some, wait=False)
                portion = min(2 * portion, MAX_BATCH)
            except asyncpg.LockNotAvailableError:
                blocked, portion = some, 1
            except asyncio.CancelledError:
                self._blocked.put_back(queue, some)
                raise
            except Exception as refusal:
                blocked = await self._one_by_one(queue, some, refusal)
            self._blocked.put_back(queue, blocked)
            self._in_flight.drop(*map(_delivery, _without(some, blocked)))

    async def finish(self) -> None:
        """Settle everything, as the last thing that is done.

        What is handled and blocked is settled without its inbox row: another worker would run the handler again for
        certain, and without the inbox row it runs again only if the event was published twice.
        """
        await self.flush()
        async with self._lock:
            self._blocked.move(self._queues.deliver, self._queues.unrecorded)
            await self._settle_blocked(_FINISH_PATIENCE)

    # --- rows that the database refuses -----------------------------------------------------------------

    def _report_refusal(self, queue: SettleQueue[Any], delivery: Delivery, refusal: Exception) -> None:
        sqlstate = getattr(refusal, "sqlstate", None)
        name = "settle_refused"
        if isinstance(refusal, PASSING_FAULTS):
            name = "settle_abandoned"  # the obstacle is not the row's own fault, and passes
        elif queue is self._queues.archive:
            name = "archive_refused"
            if not self._reports.due(name, str(sqlstate)):
                return  # what is wrong with the archive is wrong for all of them
        details: dict[str, object] = {
            "delivery_id": str(delivery.id),
            "handler_name": delivery.handler.name,
            "error": type(refusal).__name__,
            "sqlstate": sqlstate,
            "remedy": "the row is due again when its lease expires; compare the schema with holdfast migrate status",
        }
        if name == "archive_refused":
            details["remedy"] = (
                "the rows stay in the outbox and are due again when their leases expire; holdfast doctor says what is "
                "wrong with core.archive, and workers with dead_letters='in_place' do without it"
            )
        self._observe(Notice("error", name, details))

    # --- in the transaction of a handler --------------------------------------------------------------

    async def settle_within(self, transaction: asyncpg.Connection, settlement: Settlement) -> bool:
        """Settle one delivery in an open transaction; false when its lease is lost."""
        return not await self._queues.of(settlement).send(transaction, [settlement])

    def committed(self, settlement: Settlement) -> None:
        """Count and report a settlement whose transaction is committed."""
        self._counters.settles += 1
        self._queues.of(settlement).settled([settlement])


def _without(batch: Sequence[Any], some: Sequence[Any]) -> Sequence[Any]:
    if not some:
        return batch
    left_out = set(map(id, some))
    return [each for each in batch if id(each) not in left_out]


def _halves(part: list[Some]) -> tuple[list[Some], list[Some]]:
    """Divide where another source or handler begins, or else in the middle."""
    middle = len(part) // 2
    begins = [n for n in range(1, len(part)) if _origin(part[n - 1]) != _origin(part[n])]
    cut = min(begins, key=lambda n: abs(n - middle), default=middle)
    return part[:cut], part[cut:]


def _origin(settlement: Settlement | Delivery) -> tuple[str, str]:
    delivery = _delivery(settlement)
    return delivery.source, delivery.handler.name


def _delivery(settlement: Settlement | Delivery) -> Delivery:
    return settlement if isinstance(settlement, Delivery) else settlement.delivery
