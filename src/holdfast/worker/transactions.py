"""Handlers that take `tx`: their writes, the inbox row and the settle commit together, so they happen exactly once.

BEGIN; settle the row as delivered, write the inbox; SAVEPOINT; handler; COMMIT

When the handler fails, all of that is taken back, and the retry or the failure is settled in the same transaction: the
row stays locked, so nobody can claim it in between, however long ago its lease ended.
"""

import asyncio
from collections.abc import Awaitable, Callable

import asyncpg

from holdfast.handling.sessions import SILENCE, Session, Sessions, ended_by_hand, terminate
from holdfast.outcome import Done, Outcome, Reject, Retry, Snooze
from holdfast.postgres.connection import CONNECTION_FAULTS
from holdfast.postgres.deliveries import Deliveries, Delivery
from holdfast.telemetry import Counters, Notice, Observer
from holdfast.worker.outage import Outages
from holdfast.worker.settler import Settlement, Settler

# For the row and the inbox row, each of which the server lets wait for five seconds.
_ENTER_PATIENCE = 12.0
# For what follows a handler's failure. A connection that takes longer is taken for dead.
_UNDO_PATIENCE = 2.0

Call = Callable[[asyncpg.Connection], Awaitable[Outcome]]
Setback = Retry | Snooze | Reject | BaseException
Judge = Callable[[Setback], Settlement | None]


class LeaseLost(Exception):
    """The row is another worker's, or will be: the handler's writes are rolled back, and there is nothing to settle."""


class Transactions:
    """Runs one delivery at a time on a session."""

    def __init__(
        self,
        sessions: Sessions,
        deliveries: Deliveries,
        settler: Settler,
        counters: Counters,
        observe: Observer,
        outages: Outages,
    ) -> None:
        self._sessions = sessions
        self._deliveries = deliveries
        self._settler = settler
        self._counters = counters
        self._observe = observe
        self._outage = outages.of("handle")

    async def run(self, delivery: Delivery, call: Call, start: Callable[[], None], judge: Judge) -> Outcome | None:
        """None when the delivery is settled; else the outcome to settle, with the effects rolled back.

        `start` is called when the handler's own time begins. `judge` says how to settle what did not end well, or
        that it is not ours to settle.
        """
        session = None
        await self._sessions.take_turn()
        try:
            session = await self._sessions.take()
            return await self._attempt(session, delivery, call, start, judge)
        except BaseException as fault:
            if session is None and isinstance(fault, CONNECTION_FAULTS):
                return Snooze(self._outage.begin(fault))  # the handler has not begun: no attempt
            terminate(session)  # in what state, nobody knows
            raise
        finally:
            self._sessions.release(session)

    async def _attempt(
        self,
        session: Session,
        delivery: Delivery,
        call: Call,
        start: Callable[[], None],
        judge: Judge,
    ) -> Outcome | None:
        drops = self._sessions.drops
        transaction = session.transaction(isolation="read_committed")
        savepoint = session.transaction()
        try:
            async with asyncio.timeout(_ENTER_PATIENCE):
                await transaction.start()
                entered = await self._deliveries.enter(session, delivery, delivery.handler.timeout + SILENCE)
                if entered == "lost":
                    raise LeaseLost
                first = entered == "run"
                if first:
                    await savepoint.start()
        except asyncpg.LockNotAvailableError:
            # A transaction that is gone but not yet ended holds the row: nobody's fault, no attempt.
            terminate(session)
            return Snooze(1.0)
        except CONNECTION_FAULTS as fault:
            terminate(session)
            return Snooze(self._outage.begin(fault))
        self._outage.over()
        result: Outcome | BaseException = Done()
        try:
            if first:
                start()
                session.lent = True
                try:
                    result = await call(session)
                finally:
                    session.lent = False
                self._require_open(session, delivery)
            if isinstance(result, Done):
                await self._deliveries.delete_delivered(session, delivery)
                await transaction.commit()  # and with it the savepoint
                _require_committed(session, delivery)
        except BaseException as error:
            result = error
        if not isinstance(result, Done):
            return await self._undo(session, delivery, transaction, savepoint, result, judge, drops)
        if first:
            self._counters.delivered += 1
        else:
            self._counters.duplicates += 1
        return None

    def _require_open(self, session: Session, delivery: Delivery) -> None:
        if session.is_in_transaction():
            return
        # There are ways that nobody sees. If it was a commit, the event is delivered, and what came after it was not
        # part of that.
        details: dict[str, object] = {
            "handler_name": delivery.handler.name,
            "delivery_id": str(delivery.id),
            "remedy": "let the handler return or raise; use tx.transaction() for a part that may fail",
        }
        self._observe(Notice("error", "transaction_ended_by_hand", details))
        raise ended_by_hand()

    async def _undo(
        self,
        session: Session,
        delivery: Delivery,
        transaction: asyncpg.transaction.Transaction,
        savepoint: asyncpg.transaction.Transaction,
        result: Setback,
        judge: Judge,
        drops: int,
    ) -> Outcome | None:
        """Take back what the handler wrote, and settle what became of the delivery while its row is still locked."""
        settlement = judge(result)
        if settlement is None:
            raise LeaseLost
        done = False
        try:
            async with asyncio.timeout(_UNDO_PATIENCE):
                await savepoint.rollback()
                if not await self._deliveries.reopen(session, delivery):
                    raise LeaseLost
                if await self._settler.send(session, settlement):
                    raise LeaseLost
                await transaction.commit()
                done = True
        except LeaseLost:
            raise
        except Exception as fault:
            terminate(session)
            if isinstance(fault, TimeoutError) or drops != self._sessions.drops:
                # The server may not know that we are gone. Until it does, the row is locked, and whoever wants to
                # settle it waits: leave it to the lease.
                self._outage.begin(fault)
                raise LeaseLost from fault
        if done:
            self._settler.settled(settlement)
            return None
        # The other side has ended the transaction, and the row is free to be settled in the ordinary way.
        if isinstance(result, BaseException):
            raise result
        return result


def _require_committed(session: Session, delivery: Delivery) -> None:
    """Of a transaction in which a statement has failed, COMMIT is a ROLLBACK."""
    if session.ended != "COMMIT":
        raise asyncpg.InFailedSQLTransactionError(
            f"{delivery.handler.name} went on after a statement had failed, and nothing could be committed; use "
            "tx.transaction() for a part that may fail"
        )
