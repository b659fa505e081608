"""Settles finished deliveries in batches: by count, by age, and row by row when the database refuses a batch."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.postgres.connection import LOCK_TIMEOUT, own_transaction
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.telemetry import Settled
from holdfast.worker.blocked import BlockedHandlers, BlockedRows
from holdfast.worker.refusals import Refusals
from holdfast.worker.settle_queues import SettleQueue, SettleQueues, Some
from holdfast.worker.settlements import Retry, Settlement, deliveries_of, delivery_of
from holdfast.worker.shared import Shared
from holdfast.worker.wakeups import Wakeups

MAX_BATCH = 500
# What another session keeps from being settled is tried again this often, each time for this long.
_BLOCKED_INTERVAL = 0.5
_BLOCKED_SHARE = 0.1
_FINISH_PATIENCE = 2.0
# A connection that nothing was settled on is closed so many seconds after the start.
_UNUSED = 5.0
_SHORT_LOCK_TIMEOUT = 0.002
# How many rows one statement looks at for locks, a millisecond for each that is blocked, and how often it does.
_LOOKS = 50
_FREE_ROUNDS = 3

# After these it is unknown whether the statement was carried out.
_AMBIGUOUS = (OSError, asyncpg.PostgresConnectionError, asyncpg.InternalClientError)

_Statement = Callable[[asyncpg.Connection], Awaitable[list[UUID]]]


class Settler:
    """One loop, one connection. `add` never waits; `flush` returns when everything added so far is settled.

    While it is `full` no handler may begin: what is handled and not settled runs again when the process dies.

    A row that another session keeps from being settled waits by itself, under its lease, and no other waits with it.
    Of too many of those the oldest are settled otherwise: delivered without an inbox row, failed in place.
    """

    def __init__(self, shared: Shared, wakeups: Wakeups) -> None:
        self._connection = shared.connections.settle
        self._deliveries = shared.deliveries
        self._address = shared.connections.address
        self._in_flight = shared.in_flight
        self._flow = shared.flow
        self._held = shared.held
        self._breakers = shared.breakers
        self._counters = shared.counters
        self._reports = shared.reports
        self._traced = shared.tracing is not None
        self._meter = None if shared.tracing is None else shared.tracing.meter
        self._observe = shared.observe
        self._wants_settled = shared.observe.wants(Settled)
        self._lease = shared.settings.lease
        self._settle_after = shared.settings.settle_after
        self._enough = shared.settings.batch  # to settle without waiting for more
        self._most = 2 * shared.settings.batch
        self._asked_at = 0.0  # when the batch was first sent that has not been answered
        self._unsettled = 0  # deliveries that were added and are not settled
        self._on_room: Callable[[], None] = lambda: None
        self._queues = SettleQueues(shared, wakeups)
        self._successes = self._queues.deliver
        self._some = asyncio.Event()
        self._many = asyncio.Event()
        self._lock = asyncio.Lock()
        self._outage = shared.outages.of("settle")
        self._refusals = Refusals(shared.reports, shared.observe)
        self.blocked_handlers = BlockedHandlers(shared.observe)
        self._blocked = BlockedRows(shared.in_flight, self.blocked_handlers)
        self._most_blocked = shared.settings.batch // 5
        self._tried_blocked_at = 0.0

    @property
    def full(self) -> bool:
        """Whether as much waits to be settled as may."""
        return self._unsettled >= self._most

    @property
    def asking_for(self) -> float:
        """Seconds for which the database has not answered a batch; 0 when it owes no answer."""
        return time.monotonic() - self._asked_at if self._asked_at else 0.0

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
        self._reports.judged(settlement)
        self._unsettled += 1
        self._queues.of(settlement).waiting.append(settlement)
        self._wake()

    def succeeded(self, delivery: Delivery) -> None:
        """Note that a handler with a breaker has succeeded; the breaker is told with the next batch."""
        self._breakers.succeeded(delivery)
        if not self._some.is_set():
            self._some.set()

    def _wake(self) -> None:
        if not self._some.is_set():
            self._some.set()
        # What waits is a part of what is not settled, and counting it takes longer than everything else here.
        if self._unsettled >= self._enough and not self._many.is_set() and self._queues.waiting >= self._enough:
            self._many.set()

    async def open(self) -> None:
        """Open the connection, and settle nothing on it: the driver and the server learn the statement from that.

        It takes as long as to settle a thousand events. If it fails, `run` meets the fault, and reports it.
        """
        async with self._lock:
            with contextlib.suppress(asyncpg.PostgresError, *PASSING_FAULTS, *CONNECTION_FAULTS):
                await self._successes.send(await self._connection.use(), ())

    async def _close_if_unused(self) -> None:
        """Close the connection of a worker that has had nothing to settle since its start.

        One that was used stays open: what is handled must not depend on whether the server has room for a session.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_UNUSED):
                await self._some.wait()
        if not self._some.is_set():
            async with self._lock:
                await self._connection.close()

    async def run(self) -> None:
        while True:
            if self._blocked:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_BLOCKED_INTERVAL):
                        await self._some.wait()
            else:
                if self._connection.is_open and not self._counters.settles:
                    await self._close_if_unused()
                await self._some.wait()
            if self._some.is_set() and self._queues.waiting < self._enough and self._settle_after:
                try:
                    async with asyncio.timeout(self._settle_after):
                        await self._many.wait()
                except TimeoutError:
                    pass
            await self._settle_some(MAX_BATCH)
            if self._blocked and time.monotonic() - self._tried_blocked_at > _BLOCKED_INTERVAL:
                async with self._lock:
                    await self._settle_blocked(_BLOCKED_SHARE)

    async def flush(self) -> None:
        """Settle everything that is pending now, but what another session keeps from being settled."""
        await self._settle_some(None)

    async def _settle_some(self, most: int | None) -> None:
        """Settle what is pending, of each kind at most so much: the rest waits to be settled with what comes next."""
        async with self._lock:
            pending: list[tuple[SettleQueue[Any], list[Any]]] = []
            for queue in self._queues:
                pending.append((queue, queue.waiting[:most]))
                queue.waiting = [] if most is None else queue.waiting[most:]
            self._some.clear()
            self._many.clear()
            if most is not None and self._queues.waiting:
                self._wake()
            try:
                for queue, batch in pending:
                    await self._settle(queue, batch)
                if self._breakers:
                    await self._report_successes()
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
                    if left:
                        self._reports.lost(deliveries_of(left))
                        self._drop(left)

    async def _report_successes(self) -> None:
        successes = self._breakers.due(self._held.is_open)
        if successes:
            try:
                connection = await self._connection.use()
                self._breakers.reported(await self._flow.succeed(connection, successes))
            except PASSING_FAULTS:
                pass  # the next success says the same
            except CONNECTION_FAULTS as fault:
                self._connection.drop()
                await self._outage.wait(fault)

    async def _settle(self, queue: SettleQueue[Some], waiting: list[Some]) -> None:
        """Settle and take from the list, a batch at a time; rows of handlers that others block come last."""
        wary = self.blocked_handlers
        if wary:
            waiting.sort(key=self._is_wary)
        while waiting:
            batch = waiting[:MAX_BATCH]
            careful = bool(wary) and self._is_wary(batch[0])
            if wary and not careful:
                batch = [each for each in batch if not self._is_wary(each)]
            blocked = await self._settle_batch(queue, batch, wait=not careful)
            del waiting[: len(batch)]
            self._blocked.add(queue, blocked)
            self._drop(_without(batch, blocked))
            if blocked:
                await self._settle_otherwise(self._most_blocked)

    async def _settle_batch(self, queue: SettleQueue[Some], batch: list[Some], *, wait: bool) -> list[Some]:
        """Settle a batch, and return the rows that are blocked."""
        try:
            await self._send(queue, batch, wait=wait)
            return []
        except asyncpg.LockNotAvailableError:
            return await self._settle_free(queue, batch)
        except Exception as refusal:
            return await self._one_by_one(queue, batch, refusal)

    def _drop(self, settled: Sequence[Settlement | Delivery]) -> None:
        """Hold the deliveries no longer."""
        deliveries = deliveries_of(settled)
        self._in_flight.drop(*deliveries)
        self._held.freed(deliveries)
        was_full, self._unsettled = self.full, self._unsettled - len(settled)
        if was_full:
            self._on_room()

    async def _send(self, queue: SettleQueue[Some], batch: list[Some], *, wait: bool = True) -> None:
        """Settle a batch with one statement.

        Raises LockNotAvailableError when another session keeps one of the rows from being settled, without `wait` as
        soon as the statement meets it.
        """
        since, since_ns = time.monotonic(), time.time_ns()
        self._asked_at = since
        try:
            lost, ambiguous = await self._ask(lambda connection: queue.send(connection, batch), wait=wait)
        finally:
            self._asked_at = 0.0
        self._counters.settles += 1
        if ambiguous:
            lost.clear()  # they were settled by a statement whose answer did not arrive
        if self._wants_settled:
            self._observe(Settled(queue.way, len(batch), len(lost), time.monotonic() - since))
        if self._meter is not None:
            self._meter.settled(time.monotonic() - since)
        if self._traced:
            for delivery in deliveries_of(batch):
                if delivery.span is not None:
                    delivery.span.settled(since_ns, len(batch), lost=delivery.id in lost)
        if lost:
            self._reports.lost([delivery_of(each) for each in batch if delivery_of(each).id in lost])
            batch = [each for each in batch if delivery_of(each).id not in lost]
        queue.settled(batch)

    async def _ask(self, statement: _Statement, *, wait: bool) -> tuple[set[UUID], bool]:
        """Send until the database has answered: while it does not, no other worker can claim the rows either.

        Returns the answer, and whether an earlier one did not arrive.
        """
        since, ambiguous = time.monotonic(), False
        while True:
            connection = None
            try:
                connection = await self._connection.use()
                if wait and not self._address.pooled:
                    answer = set(await statement(connection))
                else:
                    limit = LOCK_TIMEOUT if wait else _SHORT_LOCK_TIMEOUT
                    async with own_transaction(connection, lock_timeout=limit):
                        answer = set(await statement(connection))
                self._outage.over()
                return answer, ambiguous
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

    async def _one_by_one(
        self, queue: SettleQueue[Some], batch: list[Some], refusal: Exception | None = None
    ) -> list[Some]:
        """Settle the rows of a refused batch singly: one bad row costs one row. Returns those that are blocked."""
        blocked = []
        for settlement in batch:
            if refusal is None or len(batch) > 1:
                try:
                    await self._send(queue, [settlement], wait=False)
                    continue
                except asyncpg.LockNotAvailableError:
                    blocked.append(settlement)
                    continue
                except Exception as error:
                    refusal = error
            self._refusals.report(delivery_of(settlement), refusal, archiving=queue is self._queues.archive)
        return blocked

    # --- what another session keeps from being settled -------------------------------------------------

    def _is_wary(self, settlement: Settlement | Delivery) -> bool:
        return delivery_of(settlement).handler.name in self.blocked_handlers

    async def _settle_free(self, queue: SettleQueue[Some], batch: list[Some]) -> list[Some]:
        """Find the rows of a batch that are blocked, settle the others, and return the blocked ones."""
        blocked: list[Some] = []
        for _ in range(_FREE_ROUNDS):
            found = await self._find_blocked(queue, batch)
            blocked += [each for each in batch if delivery_of(each).id in found]
            batch = [each for each in batch if delivery_of(each).id not in found]
            if not batch:
                return blocked
            try:
                await self._send(queue, batch, wait=False)
                return blocked
            except asyncpg.LockNotAvailableError:
                continue  # another was blocked in between
            except Exception as refusal:
                return blocked + await self._one_by_one(queue, batch, refusal)
        return blocked + await self._one_by_one(queue, batch)

    async def _find_blocked(self, queue: SettleQueue[Some], batch: Sequence[Some]) -> set[UUID]:
        blocked: set[UUID] = set()
        delete = queue.deletes and (self._deliveries.deletes_delivered or queue is self._queues.archive)
        for start in range(0, len(batch), _LOOKS):
            some = [delivery_of(each) for each in batch[start : start + _LOOKS]]
            look = partial(self._deliveries.blocked, batch=some, record=queue.records, delete=delete)
            found, _ = await self._ask(look, wait=True)
            blocked |= found
        return blocked

    async def _settle_blocked(self, seconds: float) -> None:
        """Try blocked rows again in turn, but not for long."""
        self._tried_blocked_at = started = time.monotonic()
        left = len(self._blocked)
        while left > 0 and time.monotonic() - started < seconds:
            queue, some = self._blocked.take(min(_LOOKS, left))
            left -= len(some)
            try:
                blocked = await self._settle_free(queue, some)
            except BaseException:
                self._blocked.add(queue, some)
                raise
            self._blocked.add(queue, blocked)
            self._drop(_without(some, blocked))

    async def _settle_otherwise(self, most: int) -> None:
        """Settle blocked rows in another way, so that at most so many of them wait on.

        What is handled and not settled runs again when the process dies. Without its inbox row it runs again only if
        the event was published twice, and if the session that is in the way does not write the inbox row either.
        """
        for queue, some in self._blocked.take_excess(most):
            otherwise = queue.otherwise or queue
            try:
                blocked = await self._settle_batch(otherwise, some, wait=False)
            except BaseException:
                self._blocked.add(queue, some)
                raise
            self._blocked.add(otherwise, blocked)
            self._drop(_without(some, blocked))

    async def finish(self) -> None:
        """Settle everything, as the last thing that is done: what is handled and blocked without its inbox row."""
        await self.flush()
        async with self._lock:
            await self._settle_otherwise(0)
            await self._settle_blocked(_FINISH_PATIENCE)

    # --- in the transaction of a handler --------------------------------------------------------------

    async def settle_within(self, transaction: asyncpg.Connection, settlements: Sequence[Settlement]) -> bool:
        """Settle deliveries in an open transaction, all in one way; false when a lease is lost."""
        return not await self._queues.of(settlements[0]).send(transaction, settlements)

    def statement_within(self, settlement: Settlement) -> str | None:
        """Return the statement that does the same for a retry, with its values; None for the others."""
        if not isinstance(settlement, Retry):
            return None
        return self._deliveries.retrying(settlement.delivery, settlement.delay, settlement.report.stored_briefly)

    def committed(self, settlement: Settlement) -> None:
        """Count and report a settlement whose transaction is committed."""
        self._counters.settles += 1
        self._reports.judged(settlement)
        self._queues.of(settlement).settled([settlement])


def _without(batch: Sequence[Any], some: Sequence[Any]) -> Sequence[Any]:
    if not some:
        return batch
    left_out = set(map(id, some))
    return [each for each in batch if id(each) not in left_out]
