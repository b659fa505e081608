"""Transactions of handlers that take `tx`: their writes, the inbox row and the settle commit together, exactly once.

BEGIN; settle the row as delivered, write the inbox; SAVEPOINT; handler; COMMIT

When the handler fails, all of that is taken back, and the retry or the failure is settled in the same transaction: the
row stays locked, so no other worker can claim it in between, however long ago its lease expired.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import asyncpg

from holdfast.handling.runner import HandlerCall, commit
from holdfast.handling.sessions import SILENCE, Session, terminate
from holdfast.outcome import Done, Outcome, Snooze
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.worker.settlements import Setback, Settlement
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared

_ENTER_PATIENCE = 12.0
# After outbox_enter has waited in vain for the row.
_LOCKED_DELAY = 2.0
# For what follows a handler's failure. A connection that takes longer is taken for dead.
_UNDO_PATIENCE = 2.0

# A COMMIT that ends with one of these may have been carried out.
_UNANSWERED = (*CONNECTION_FAULTS, asyncio.CancelledError)

# The verdict on an attempt that did not succeed: how to settle it; None when this worker must not.
Verdict = Callable[[Setback], Settlement | None]


class LeaseLost(Exception):
    """The row is another worker's, or will be: the handler's writes are rolled back, and there is nothing to settle."""


class PutOff(Snooze):
    """The handler could not begin, because of another session: this says nothing about the handler."""


class Transactions:
    """Runs one delivery at a time on a session."""

    def __init__(self, shared: Shared, settler: Settler) -> None:
        self._sessions = shared.connections.sessions
        self._deliveries = shared.deliveries
        self._counters = shared.counters
        self._tally = shared.tally
        self._settler = settler
        self._blocked_handlers = settler.blocked_handlers
        self.outage = shared.outages.of("handle")

    async def run(self, delivery: Delivery, verdict: Verdict, session: Session, call: HandlerCall) -> Outcome | None:
        """Call the handler in a transaction that settles its delivery.

        Returns None when the delivery is settled; otherwise the outcome to settle, with the writes rolled back.
        """
        drops = self._sessions.drops
        enter = partial(self._enter, session, delivery, delivery.handler.timeout + SILENCE)
        savepoint = session.transaction()
        try:
            async with asyncio.timeout(_ENTER_PATIENCE):
                transaction, entered = await session.enter(enter)
                if entered == "lost":
                    raise LeaseLost
                first = entered == "run"
                if first:
                    await savepoint.start()
        except asyncpg.LockNotAvailableError:
            # Another session has the row, or the inbox row, and has not ended its transaction: this counts no attempt.
            return PutOff(self._blocked_handlers.put_off(delivery))
        except CONNECTION_FAULTS as fault:
            terminate(session)
            return Snooze(self.outage.begin(fault))
        self.outage.over()
        result: Outcome | BaseException = Done()
        committing = False
        try:
            if first:
                result = await call()
            if isinstance(result, Done):
                await self._deliveries.delete_delivered(session, delivery)
                committing = True
                await commit(session, transaction, delivery.handler)  # and with it the savepoint
        except BaseException as error:
            result = error
        if committing and isinstance(result, _UNANSWERED):
            terminate(session)
            if await self._finds_delivered(delivery):
                result = Done()
        if not isinstance(result, Done):
            settlement = verdict(result)
            if settlement is None:
                raise LeaseLost
            if await self._settle(session, transaction, savepoint, settlement, drops):
                return None
            # The server has ended the transaction, and the row is free to be settled in the ordinary way.
            if isinstance(result, BaseException):
                raise result
            return result
        if first:
            self._tally.handled((delivery,))
        else:
            self._counters.duplicates += 1
        return None

    async def _enter(self, session: Session, delivery: Delivery, idle: float, look: bool) -> str | None:
        """Enter the handler. While its rows are blocked look first: entering waits, and others need the session."""
        if delivery.handler.name in self._blocked_handlers and await self._deliveries.blocked(
            session, [delivery], record=True
        ):
            raise asyncpg.LockNotAvailableError("another session keeps the row from being settled")
        return await self._deliveries.enter(session, delivery, idle, look)

    async def _finds_delivered(self, delivery: Delivery) -> bool:
        """Return whether a commit whose answer did not arrive was carried out."""
        asking = asyncio.create_task(self._ask_delivered(delivery))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The lease keeper finds no lease on a row that is delivered, and cancels its handler.
            await asyncio.wait((asking,), timeout=_UNDO_PATIENCE)
            if not asking.done():
                asking.cancel()
                raise
            return asking.result()

    async def _ask_delivered(self, delivery: Delivery) -> bool:
        """Ask until the database answers. The row is locked until it has ended the transaction in question."""
        while True:
            session = None
            try:
                async with asyncio.timeout(_ENTER_PATIENCE):
                    session = await self._sessions.open()
                    transaction, entered = await session.enter(
                        partial(self._deliveries.enter, session, delivery, SILENCE)
                    )
                    await transaction.rollback()
                self.outage.over()
                # A lease that another worker has by now counts as delivered too: that is one too many in a counter.
                return entered == "lost"
            except asyncpg.LockNotAvailableError:
                await asyncio.sleep(_LOCKED_DELAY)
            except CONNECTION_FAULTS as fault:
                await self.outage.wait(fault)
            finally:
                if session is not None:
                    self._sessions.discard(session)

    async def _settle(
        self,
        session: Session,
        transaction: asyncpg.transaction.Transaction,
        savepoint: asyncpg.transaction.Transaction,
        settlement: Settlement,
        drops: int,
    ) -> bool:
        """Take back what the handler wrote, and settle the delivery while its row is still locked.

        Returns false when the transaction could not be used any longer and the server has ended it.
        """
        try:
            async with asyncio.timeout(_UNDO_PATIENCE):
                await savepoint.rollback()
                if not await self._deliveries.reopen(session, settlement.delivery):
                    raise LeaseLost
                if not await self._settler.settle_within(session, settlement):
                    raise LeaseLost
                await transaction.commit()
        except LeaseLost:
            raise
        except Exception as fault:
            terminate(session)
            if isinstance(fault, TimeoutError) or drops != self._sessions.drops:
                # The server may not know that the session is gone. Until it does, the row is locked, and another
                # settle would wait for it: leave the row to the lease.
                self.outage.begin(fault)
                raise LeaseLost from fault
            return False
        self._settler.committed(settlement)
        return True
