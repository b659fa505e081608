"""Transactions of handlers that take `tx`: their writes, the inbox row and the settle commit together, exactly once.

BEGIN; settle the row as delivered, write the inbox; SAVEPOINT; handler; COMMIT

When the handler fails, all of that is taken back, and the retry or the failure is settled in the same transaction: the
row stays locked, so no other worker can claim it in between, however long ago its lease expired.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import asyncpg

from holdfast.handlers import Handler
from holdfast.handling.handler_transaction import Entry, HandlerTransaction
from holdfast.handling.runner import Conduct, HandlerCall, overran
from holdfast.handling.sessions import SILENCE, EndedByHand
from holdfast.outcome import Done, Outcome, Snooze
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.retry import LOCK_NOT_AVAILABLE, sqlstate_of
from holdfast.worker.settlements import Setback, Settlement
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared

T = TypeVar("T")

ENTER_PATIENCE = 12.0
# After outbox_enter has waited in vain for the row.
_LOCKED_DELAY = 2.0
# For what follows a handler's failure. A connection that takes longer is taken for dead.
UNDO_PATIENCE = 2.0
# Until a thread past its time limit is noticed, and its transaction allowed to be silent for longer.
_NOTICED_WITHIN = 15.0

# Decides how to settle an attempt that did not succeed; None when this worker must not.
Decide = Callable[[Setback], Settlement | None]


def silence_of(handler: Handler) -> float:
    """For how many seconds the transaction of a handler may be silent before the server ends it."""
    return handler.timeout + (SILENCE if handler.asynchronous else _NOTICED_WITHIN)


class LeaseLost(Exception):
    """The row is another worker's, or will be: the handler's writes are rolled back, and there is nothing to settle."""


class PutOff(Snooze):
    """The handler could not begin, because of another session: this says nothing about the handler."""


# --- how a transaction may end ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivered:
    """It is committed. `first`: the handler has run, and not found that it had before."""

    first: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """The handler has not succeeded. What it wrote is taken back, and the settlement committed."""

    settlement: Settlement


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The answer to the COMMIT did not arrive, or the handler has ended the transaction: it may be committed."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Blocked:
    """Another session has the row, or the inbox row, and has not ended its transaction."""


@dataclass(frozen=True, slots=True)
class Faulted:
    """The connection broke before the handler could begin."""

    fault: BaseException


Ending = Delivered | Settled | Unanswered | Blocked | Faulted | Outcome


class Lend(Protocol):
    """Lends a transaction to `conduct`, and returns what that returns."""

    def __call__(self, *, conduct: Conduct[Outcome, Ending]) -> Awaitable[Ending]: ...


class Transactions:
    """Runs one delivery at a time in a transaction."""

    def __init__(self, shared: Shared, settler: Settler) -> None:
        self._sessions = shared.connections.sessions
        self._deliveries = shared.deliveries
        self._reports = shared.reports
        self._settler = settler
        self._blocked_handlers = settler.blocked_handlers
        self.outage = shared.outages.of("handle")

    async def run(self, delivery: Delivery, decide: Decide, lend: Lend) -> Outcome | None:
        """Call the handler in a transaction that settles its delivery.

        Returns None when the delivery is settled; otherwise the outcome to settle, with the writes rolled back.
        """
        drops = self._sessions.drops
        ending = await lend(conduct=partial(self._conduct, delivery, decide, drops))
        match ending:
            case Delivered():
                self._count(delivery, ending.first)
                return None
            case Settled():
                self._settler.committed(ending.settlement)
                return None
            case Blocked():
                # This counts no attempt.
                return PutOff(self._blocked_handlers.put_off(delivery))
            case Faulted():
                return Snooze(self.outage.begin(ending.fault))
            case Unanswered():
                if await self._finds_delivered(delivery):
                    self._count(delivery, first=True)
                    return None
                raise ending.error
        return ending

    def _count(self, delivery: Delivery, first: bool) -> None:
        if first:
            self._reports.delivered((delivery,))
            if delivery.handler.breaker is not None:
                self._settler.succeeded(delivery)
        else:
            if delivery.span is not None:
                delivery.span.conclude("duplicate")
            self._reports.duplicated((delivery,))

    async def _conduct(
        self,
        delivery: Delivery,
        decide: Decide,
        drops: int,
        transaction: HandlerTransaction,
        call: HandlerCall[Outcome],
    ) -> Ending:
        """Begin and end the transaction around the call of the handler."""
        try:
            entered = await self._begin(transaction, delivery)
            if entered == "lost":
                raise LeaseLost
            first = entered == "run"
        except Exception as fault:
            if sqlstate_of(fault) == LOCK_NOT_AVAILABLE:
                return Blocked()
            if not transaction.is_fault(fault):
                raise
            transaction.terminate()
            return Faulted(fault)
        self.outage.over()
        result: Outcome | BaseException = Done()
        committing = False
        try:
            try:
                if first:
                    try:
                        result = await call()
                    finally:
                        delivery.ended_at = time.monotonic()
                if isinstance(result, Done) and not transaction.forbidden:
                    await transaction.finish()
                    await self._deliveries.delete_delivered(transaction.connection, delivery)
                    committing = True
                    await transaction.commit(delivery.handler)
            except BaseException as error:
                result = error
            if transaction.forbidden and not committing:
                result = overran(delivery.handler, result)
            if isinstance(result, Done):
                return Delivered(first)
            if isinstance(result, EndedByHand) and result.has_ended:
                transaction.terminate()
                return Unanswered(result)
            if committing and isinstance(result, BaseException) and transaction.is_unanswered(result):
                transaction.terminate()
                return Unanswered(result)
            settlement = decide(result)
            if settlement is None:
                raise LeaseLost
            if await self._settle(transaction, settlement, drops):
                return Settled(settlement)
            # The server has ended the transaction, and the row is free to be settled in the ordinary way.
            if isinstance(result, BaseException):
                raise result
            return result
        finally:
            del result  # an error refers to this frame by its traceback, see Attempts

    async def _begin(self, transaction: HandlerTransaction, delivery: Delivery) -> str:
        """Begin and enter the handler; if it is to run, set the savepoint. All of it is one message, if possible."""
        idle = silence_of(delivery.handler)
        at_once = delivery.handler.name not in self._blocked_handlers
        entering = partial(self._deliveries.entering, delivery, idle)
        if at_once and await transaction.enter_at_once(entering, ENTER_PATIENCE):
            return "run"
        async with transaction.within(ENTER_PATIENCE):
            entered = await transaction.enter(partial(self._enter, delivery=delivery, idle=idle))
            if entered == "run":
                await transaction.set_savepoint()
        return entered

    async def _enter(self, connection: Any, look: bool, *, delivery: Delivery, idle: float) -> str | None:
        """Enter the handler. While its rows are blocked look first: entering waits, and others need the session."""
        if delivery.handler.name in self._blocked_handlers and await self._deliveries.blocked(
            connection, [delivery], record=True
        ):
            raise asyncpg.LockNotAvailableError("another session keeps the row from being settled")
        return await self._deliveries.enter(connection, look, delivery=delivery, idle=idle)

    async def _finds_delivered(self, delivery: Delivery) -> bool:
        """Return whether a commit whose answer did not arrive was carried out."""
        # A lease that another worker has by now counts as delivered too: that is one too many in a counter.
        entered = await self.ask(partial(self._deliveries.enter, delivery=delivery, idle=SILENCE))
        return self._deliveries.has_committed(delivery, entered)

    async def ask(self, enter: Entry[T]) -> T:
        """Ask whether a commit was carried out, by what entering the handler again would say; nothing is entered."""
        asking = asyncio.create_task(self._ask(enter))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The lease keeper finds no lease on a row that is delivered, and cancels its handler.
            await asyncio.wait((asking,), timeout=UNDO_PATIENCE)
            if not asking.done():
                asking.cancel()
                raise
            return asking.result()

    async def _ask(self, enter: Entry[T]) -> T:
        """Ask until the database answers. The row is locked until it has ended the transaction in question."""
        while True:
            session = None
            try:
                async with asyncio.timeout(ENTER_PATIENCE):
                    session = await self._sessions.open()
                    transaction, entered = await session.enter(enter)
                    await transaction.rollback()
                self.outage.over()
                return entered
            except asyncpg.LockNotAvailableError:
                await asyncio.sleep(_LOCKED_DELAY)
            except CONNECTION_FAULTS as fault:
                await self.outage.wait(fault)
            finally:
                if session is not None:
                    self._sessions.discard(session)

    async def _settle(self, transaction: HandlerTransaction, settlement: Settlement, drops: int) -> bool:
        """Take back what the handler wrote, and settle the delivery while its row is still locked.

        Returns false when the transaction could not be used any longer and the server has ended it.
        """
        try:
            try:
                async with transaction.within(UNDO_PATIENCE):
                    at_once = self._settler.statement_within(settlement)
                    if at_once is not None and await transaction.commit_instead(at_once):
                        return True
                    await transaction.undo()
                    if not await self._deliveries.reopen(transaction.connection, settlement.delivery):
                        raise LeaseLost
                    if not await self._settler.settle_within(transaction.connection, [settlement]):
                        raise LeaseLost
                    await transaction.commit_undone()
            except LeaseLost:
                raise
            except Exception as fault:
                transaction.terminate()
                self._require_noticed(fault, drops)
                return False
        except LeaseLost:
            self._reports.judged(settlement)
            raise
        return True

    def _require_noticed(self, fault: BaseException, drops: int) -> None:
        """Raise LeaseLost if the server may not know that the session is gone.

        Until it does, the row is locked, and another settle would wait for it: leave the row to the lease.
        """
        if isinstance(fault, TimeoutError) or drops != self._sessions.drops:
            self.outage.begin(fault)
            raise LeaseLost from fault
