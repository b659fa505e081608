"""Settles finished deliveries in batches: by count, by age, and row by row when the database refuses a batch."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import UUID

import asyncpg

from holdfast.postgres.connection import CONNECTION_FAULTS, PASSING_FAULTS, ReservedConnection
from holdfast.postgres.deliveries import Deliveries, Delivery
from holdfast.telemetry import Counters, Failed, Notice, Observer, Retried
from holdfast.worker.held import Held
from holdfast.worker.outage import Outage

MAX_BATCH = 500


@dataclass(frozen=True, slots=True)
class Postponed:
    delivery: Delivery
    delay: float
    error: str
    fact: Retried


@dataclass(frozen=True, slots=True)
class Dead:
    delivery: Delivery
    reason: str
    error: str | None
    signature: str | None
    fact: Failed


@dataclass(frozen=True, slots=True)
class GivenBack:
    delivery: Delivery
    delay: float = 0.0


Settlement = Postponed | Dead | GivenBack
Some = TypeVar("Some", bound=Settlement | Delivery)
Send = Callable[[asyncpg.Connection, Sequence[Some]], Awaitable[list[UUID]]]


@dataclass(slots=True)
class _Pending:
    """Successes wait as bare deliveries: they are nearly all, and a wrapper each would be waste."""

    delivered: list[Delivery] = field(default_factory=list)
    duplicates: list[Delivery] = field(default_factory=list)
    others: list[Settlement] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.delivered) + len(self.duplicates) + len(self.others)


class Settler:
    """One loop, one connection. `add` never waits; `flush` returns when everything added so far is settled."""

    def __init__(
        self,
        connection: ReservedConnection,
        deliveries: Deliveries,
        held: Held,
        counters: Counters,
        observe: Observer,
        *,
        lease: float,
        settle_after: float,
        on_postponed: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._deliveries = deliveries
        self._held = held
        self._counters = counters
        self._observe = observe
        self._lease = lease
        self._settle_after = settle_after
        self._on_postponed = on_postponed
        self._pending = _Pending()
        self._some = asyncio.Event()
        self._many = asyncio.Event()
        self._lock = asyncio.Lock()
        self._outage = Outage("settle", observe)

    def delivered(self, delivery: Delivery) -> None:
        self._pending.delivered.append(delivery)
        self._wake()

    def duplicate(self, delivery: Delivery) -> None:
        """Handled before: settled like a success, but the inbox has it already."""
        self._pending.duplicates.append(delivery)
        self._wake()

    def add(self, settlement: Settlement) -> None:
        self._pending.others.append(settlement)
        self._wake()

    def _wake(self) -> None:
        if not self._some.is_set():
            self._some.set()
        if len(self._pending) >= MAX_BATCH:
            self._many.set()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            if len(self._pending) < MAX_BATCH and self._settle_after:
                try:
                    async with asyncio.timeout(self._settle_after):
                        await self._many.wait()
                except TimeoutError:
                    pass
            await self.flush()

    async def flush(self) -> None:
        """Settle everything that is pending now."""
        async with self._lock:
            pending, self._pending = self._pending, _Pending()
            self._some.clear()
            self._many.clear()
            if not pending:
                return
            await self._settle(pending.delivered, self._send_delivered)
            await self._settle(pending.duplicates, self._send_duplicates)
            await self._settle([s for s in pending.others if isinstance(s, Postponed)], self._send_postponed)
            await self._settle([s for s in pending.others if isinstance(s, Dead)], self._send_dead)
            await self._settle([s for s in pending.others if isinstance(s, GivenBack)], self._send_given_back)
            if any(isinstance(s, Postponed) or (isinstance(s, GivenBack) and s.delay) for s in pending.others):
                self._on_postponed()

    async def _settle(self, settlements: list[Some], send: Send[Some]) -> None:
        for start in range(0, len(settlements), MAX_BATCH):
            batch = settlements[start : start + MAX_BATCH]
            try:
                await self._send(batch, send)
            except asyncpg.PostgresError as refusal:
                await self._one_by_one(batch, send, refusal)
            finally:
                for settlement in batch:
                    self._held.drop(_delivery(settlement))

    async def _send(self, batch: list[Some], send: Send[Some]) -> None:
        """Send until the database has answered, or until the leases are surely gone and others have the rows."""
        give_up = time.monotonic() + self._lease
        while True:
            try:
                connection = await self._connection.use()
                lost = await send(connection, batch)
            except (*PASSING_FAULTS, *CONNECTION_FAULTS) as fault:
                if time.monotonic() >= give_up:
                    self._connection.drop()
                    details: dict[str, object] = {
                        "rows": len(batch),
                        "remedy": "they come back when their leases end",
                    }
                    self._observe(Notice("error", "settle_abandoned", details))
                    return
                if isinstance(fault, PASSING_FAULTS):
                    await asyncio.sleep(random.uniform(0.02, 0.2))
                else:
                    self._connection.drop()
                    await self._outage.wait(fault)
            else:
                self._outage.over()
                self._counters.settles += 1
                self._counters.lost_leases += len(lost)
                return

    async def _one_by_one(self, batch: list[Some], send: Send[Some], refusal: asyncpg.PostgresError) -> None:
        """One bad row costs one row: the others of its batch are settled without it."""
        for settlement in batch:
            if len(batch) > 1:
                try:
                    await self._send([settlement], send)
                    continue
                except asyncpg.PostgresError as error:
                    refusal = error
            delivery = _delivery(settlement)
            details: dict[str, object] = {
                "delivery_id": str(delivery.id),
                "handler_name": delivery.handler.name,
                "sqlstate": refusal.sqlstate,
                "remedy": "the row comes back when its lease ends; run holdfast doctor if it stays",
            }
            self._observe(Notice("error", "settle_refused", details))

    async def _send_delivered(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        lost = await self._deliveries.deliver(connection, batch, record=True)
        self._counters.delivered += len(batch) - len(lost)
        return lost

    async def _send_duplicates(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        lost = await self._deliveries.deliver(connection, batch, record=False)
        self._counters.duplicates += len(batch) - len(lost)
        return lost

    async def _send_postponed(self, connection: asyncpg.Connection, batch: Sequence[Postponed]) -> list[UUID]:
        held = [s.delivery for s in batch]
        lost = await self._deliveries.retry(connection, held, [s.delay for s in batch], [s.error for s in batch])
        self._counters.retried += len(batch) - len(lost)
        self._tell(batch, lost)
        return lost

    async def _send_dead(self, connection: asyncpg.Connection, batch: Sequence[Dead]) -> list[UUID]:
        lost = await self._deliveries.fail(
            connection,
            [s.delivery for s in batch],
            [s.reason for s in batch],
            [s.error for s in batch],
            [s.signature for s in batch],
        )
        expired = sum(s.reason == "expired" for s in batch)
        self._counters.expired += expired
        self._counters.failed += len(batch) - len(lost) - expired
        self._tell(batch, lost)
        return lost

    def _tell(self, batch: Sequence[Postponed | Dead], lost: list[UUID]) -> None:
        """Only what is settled is told: a lost lease is somebody else's story."""
        for settlement in batch:
            if settlement.delivery.id not in lost:
                self._observe(settlement.fact)

    async def _send_given_back(self, connection: asyncpg.Connection, batch: Sequence[GivenBack]) -> list[UUID]:
        lost = await self._deliveries.release(connection, [s.delivery for s in batch], [s.delay for s in batch])
        snoozed = sum(s.delay > 0 for s in batch)
        self._counters.snoozed += snoozed
        self._counters.released += len(batch) - len(lost) - snoozed
        return lost


def _delivery(settlement: Settlement | Delivery) -> Delivery:
    return settlement if isinstance(settlement, Delivery) else settlement.delivery
