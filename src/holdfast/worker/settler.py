"""Settles finished deliveries in batches: by count, by age, and row by row when the database refuses a batch."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar
from uuid import UUID

import asyncpg

from holdfast.postgres.connection import ReservedConnection
from holdfast.postgres.deliveries import Deliveries, Delivery
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.telemetry import Counters, Failed, Notice, Observer, Retried
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.in_flight import InFlight
from holdfast.worker.outage import Outages

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
Send = Callable[[asyncpg.Connection, Sequence[Some]], Awaitable[list[UUID]]]  # returns whose lease is lost
Tell = Callable[[Sequence[Some]], None]  # counts and tells what is settled

# After these nobody knows whether the statement was carried out.
_AMBIGUOUS = (OSError, asyncpg.PostgresConnectionError, asyncpg.InternalClientError)


@dataclass(slots=True)
class _Pending:
    """Successes wait as bare deliveries: they are nearly all, and a wrapper each would be waste."""

    delivered: list[Delivery] = field(default_factory=list)
    duplicates: list[Delivery] = field(default_factory=list)
    postponed: list[Postponed] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)
    archived: list[Dead] = field(default_factory=list)
    given_back: list[GivenBack] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.lists()))

    def lists(self) -> tuple[list[Any], ...]:
        return self.delivered, self.duplicates, self.postponed, self.dead, self.archived, self.given_back

    def add(self, settlement: Settlement) -> None:
        match settlement:
            case Postponed():
                self.postponed.append(settlement)
            case Dead():
                self.dead.append(settlement)
            case GivenBack():
                self.given_back.append(settlement)


class Settler:
    """One loop, one connection. `add` never waits; `flush` returns when everything added so far is settled."""

    def __init__(
        self,
        connection: ReservedConnection,
        deliveries: Deliveries,
        in_flight: InFlight,
        counters: Counters,
        observe: Observer,
        outages: Outages,
        *,
        lease: float,
        settle_after: float,
        archive: bool = False,
        on_postponed: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._deliveries = deliveries
        self._in_flight = in_flight
        self._counters = counters
        self._observe = observe
        self._lease = lease
        self._settle_after = settle_after
        self._archive = archive
        self._on_postponed = on_postponed
        self._pending = _Pending()
        self._some = asyncio.Event()
        self._many = asyncio.Event()
        self._lock = asyncio.Lock()
        self._outage = outages.of("settle")
        self._reports = HourlyLimit()

    def delivered(self, delivery: Delivery) -> None:
        waiting = self._pending.delivered
        waiting.append(delivery)
        # Nearly every event comes here: only the first of a batch, and the one that makes it full, have to tell.
        if len(waiting) in (1, MAX_BATCH):
            self._wake()

    def duplicate(self, delivery: Delivery) -> None:
        """Handled before: settled like a success, but the inbox has it already."""
        self._pending.duplicates.append(delivery)
        self._wake()

    def add(self, settlement: Settlement) -> None:
        if self._goes_to_archive(settlement):
            self._pending.archived.append(settlement)
        else:
            self._pending.add(settlement)
        self._wake()

    def _goes_to_archive(self, settlement: Settlement | Delivery) -> TypeGuard[Dead]:
        # What was cancelled or has expired is nobody's to put right: it stays, set aside, in the outbox.
        return self._archive and isinstance(settlement, Dead) and settlement.reason not in ("cancelled", "expired")

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
            try:
                await self._settle(pending.delivered, self._send_delivered, self._tell_delivered)
                await self._settle(pending.duplicates, self._send_duplicates, self._tell_duplicates)
                await self._settle(pending.postponed, self._send_postponed, self._tell_postponed)
                await self._settle(pending.dead, self._send_dead, self._tell_dead)
                await self._settle(pending.archived, self._send_archived, self._tell_archived)
                await self._settle(pending.given_back, self._send_given_back, self._tell_given_back)
            except asyncio.CancelledError:
                # Whoever asked cannot wait any longer; the next flush takes what is left.
                for left, later in zip(pending.lists(), self._pending.lists(), strict=True):
                    later[:0] = left
                    left.clear()
                self._wake()
                raise
            finally:
                # After a defect the leases must run out: nobody will settle what is left.
                for left in pending.lists():
                    self._in_flight.drop(*map(_delivery, left))

    async def _settle(self, waiting: list[Some], send: Send[Some], tell: Tell[Some]) -> None:
        """Settle and take from the list, a batch at a time."""
        while waiting:
            batch = waiting[:MAX_BATCH]
            try:
                await self._send(batch, send, tell)
            except Exception as refusal:
                await self._one_by_one(batch, send, tell, refusal)
            del waiting[:MAX_BATCH]
            self._in_flight.drop(*map(_delivery, batch))

    async def _send(self, batch: list[Some], send: Send[Some], tell: Tell[Some]) -> None:
        """Send until the database has answered: while it does not, nobody else can have the rows either."""
        since, ambiguous = time.monotonic(), False
        while True:
            connection = None
            try:
                connection = await self._connection.use()
                lost = set(await send(connection, batch))
                break
            except PASSING_FAULTS:
                if time.monotonic() - since > self._lease:
                    raise  # something stands in the way of one of the rows
                await asyncio.sleep(random.uniform(0.02, 0.2))
            except CONNECTION_FAULTS as fault:
                if isinstance(fault, ValueError):
                    raise  # asyncpg's word for a value that it cannot send
                ambiguous = ambiguous or (connection is not None and isinstance(fault, _AMBIGUOUS))
                self._connection.drop()
                await self._outage.wait(fault)
                since = time.monotonic()
        self._outage.over()
        self._counters.settles += 1
        if ambiguous:
            lost.clear()  # they were settled by a statement whose answer did not arrive
        self._counters.lost_leases += len(lost)
        tell([each for each in batch if _delivery(each).id not in lost] if lost else batch)

    async def _one_by_one(self, batch: list[Some], send: Send[Some], tell: Tell[Some], refusal: Exception) -> None:
        """One bad row costs one row: the others of its batch are settled without it."""
        for settlement in batch:
            if len(batch) > 1:
                try:
                    await self._send([settlement], send, tell)
                    continue
                except Exception as error:
                    refusal = error
            self._refused(settlement, refusal)

    def _refused(self, settlement: Settlement | Delivery, refusal: Exception) -> None:
        sqlstate = getattr(refusal, "sqlstate", None)
        name = "settle_refused"
        if isinstance(refusal, PASSING_FAULTS):
            name = "settle_abandoned"  # what stands in its way is not its own fault, and passes
        elif self._goes_to_archive(settlement):
            name = "archive_refused"
            if not self._reports.due(name, str(sqlstate)):
                return  # what is wrong with the archive is wrong for all of them
        delivery = _delivery(settlement)
        details: dict[str, object] = {
            "delivery_id": str(delivery.id),
            "handler_name": delivery.handler.name,
            "error": type(refusal).__name__,
            "sqlstate": sqlstate,
            "remedy": "the row comes back when its lease ends; compare the schema with holdfast migrate plan",
        }
        if name == "archive_refused":
            details["remedy"] = (
                "the rows stay in the outbox and come back when their leases end; holdfast doctor says what is wrong "
                "with core.archive, and workers with dead_letters='in_place' do without it"
            )
        self._observe(Notice("error", name, details))

    # --- in the transaction of a handler --------------------------------------------------------------

    async def send(self, connection: asyncpg.Connection, settlement: Settlement) -> list[UUID]:
        """Settle one; returns its id when the lease is lost."""
        match settlement:
            case Postponed():
                return await self._send_postponed(connection, [settlement])
            case Dead() if self._goes_to_archive(settlement):
                return await self._send_archived(connection, [settlement])
            case Dead():
                return await self._send_dead(connection, [settlement])
            case GivenBack():
                return await self._send_given_back(connection, [settlement])

    def settled(self, settlement: Settlement) -> None:
        """The transaction is committed."""
        self._counters.settles += 1
        match settlement:
            case Postponed():
                self._tell_postponed([settlement])
            case Dead() if self._goes_to_archive(settlement):
                self._tell_archived([settlement])
            case Dead():
                self._tell_dead([settlement])
            case GivenBack():
                self._tell_given_back([settlement])

    # --- the statements, and what is told once they are carried out -------------------------------------

    async def _send_delivered(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        return await self._deliveries.deliver(connection, batch, record=True)

    def _tell_delivered(self, batch: Sequence[Delivery]) -> None:
        self._counters.delivered += len(batch)

    async def _send_duplicates(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        return await self._deliveries.deliver(connection, batch, record=False)

    def _tell_duplicates(self, batch: Sequence[Delivery]) -> None:
        self._counters.duplicates += len(batch)

    async def _send_postponed(self, connection: asyncpg.Connection, batch: Sequence[Postponed]) -> list[UUID]:
        held = [s.delivery for s in batch]
        return await self._deliveries.retry(connection, held, [s.delay for s in batch], [s.error for s in batch])

    def _tell_postponed(self, batch: Sequence[Postponed]) -> None:
        self._counters.retried += len(batch)
        for settlement in batch:
            self._observe(settlement.fact)
        self._on_postponed()

    async def _send_dead(self, connection: asyncpg.Connection, batch: Sequence[Dead]) -> list[UUID]:
        return await self._deliveries.fail(connection, *_columns(batch))

    async def _send_archived(self, connection: asyncpg.Connection, batch: Sequence[Dead]) -> list[UUID]:
        return await self._deliveries.archive(connection, *_columns(batch))

    def _tell_dead(self, batch: Sequence[Dead]) -> None:
        expired = sum(s.reason == "expired" for s in batch)
        self._counters.expired += expired
        self._counters.failed += len(batch) - expired
        for settlement in batch:
            self._observe(settlement.fact)

    def _tell_archived(self, batch: Sequence[Dead]) -> None:
        self._counters.archived += len(batch)
        self._tell_dead(batch)

    async def _send_given_back(self, connection: asyncpg.Connection, batch: Sequence[GivenBack]) -> list[UUID]:
        return await self._deliveries.release(connection, [s.delivery for s in batch], [s.delay for s in batch])

    def _tell_given_back(self, batch: Sequence[GivenBack]) -> None:
        snoozed = sum(s.delay > 0 for s in batch)
        self._counters.snoozed += snoozed
        self._counters.released += len(batch) - snoozed
        if snoozed:
            self._on_postponed()


def _columns(batch: Sequence[Dead]) -> tuple[list[Delivery], list[str], list[str | None], list[str | None]]:
    return (
        [s.delivery for s in batch],
        [s.reason for s in batch],
        [s.error for s in batch],
        [s.signature for s in batch],
    )


def _delivery(settlement: Settlement | Delivery) -> Delivery:
    return settlement if isinstance(settlement, Delivery) else settlement.delivery
