"""Transactions of batch handlers that take `tx`: what they write commits once, with the outcomes of all their events.

BEGIN; settle the rows as delivered, write the inbox; SAVEPOINT; handler; settle otherwise what is not done; COMMIT

The rows stay locked from the first statement to the COMMIT. What a call wrote for an event that is not done is
committed with the rest, unless none is done: then all of it is taken back. When the call fails, everything is rolled
back.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol

from holdfast.handling.calls import BatchCall, BatchResults
from holdfast.handling.handler_transaction import HandlerTransaction
from holdfast.handling.runner import Conduct, HandlerCall, overran
from holdfast.handling.sessions import SILENCE, EndedByHand
from holdfast.outcome import Done
from holdfast.postgres.delivery import Delivery
from holdfast.retry import LOCK_NOT_AVAILABLE, sqlstate_of
from holdfast.worker.settlements import Setback, Settlement, Snooze
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared
from holdfast.worker.transactions import ENTER_PATIENCE, UNDO_PATIENCE, Blocked, Faulted, Transactions, silence_of

# How to settle an event of a batch that is not done.
Judgement = Callable[[Delivery, Setback], Settlement]


@dataclass(slots=True)
class Committed:
    """What a transaction has made of its deliveries. Those that are in none of the lists are not settled."""

    delivered: list[Delivery] = field(default_factory=list)
    duplicates: list[Delivery] = field(default_factory=list)
    settlements: list[Settlement] = field(default_factory=list)
    lost: list[Delivery] = field(default_factory=list)  # their leases
    blocked: list[Delivery] = field(default_factory=list)  # by another session
    again: list[Settlement] = field(default_factory=list)  # to be settled without the transaction
    error: BaseException | None = None  # of the call, which is then rolled back

    def only(self, settled: set[Delivery], error: BaseException) -> "Committed":
        """Return what holds if nothing but these was settled."""
        return Committed(
            [each for each in self.delivered if each in settled],
            [each for each in self.duplicates if each in settled],
            [each for each in self.settlements if each.delivery in settled],
            self.lost,
            self.blocked,
            error=error,
        )


@dataclass(frozen=True, slots=True)
class BatchUnanswered:
    """The answer to the COMMIT did not arrive, or the handler has ended the transaction: it may be committed."""

    error: BaseException
    otherwise: Committed  # if it was


BatchEnding = Committed | BatchUnanswered | Blocked | Faulted


class LendBatch(Protocol):
    """Lends a transaction to `conduct`, and returns what that returns."""

    def __call__(self, *, conduct: Conduct[BatchResults, BatchEnding]) -> Awaitable[BatchEnding]: ...


class BatchTransactions:
    """Runs several deliveries of one handler in one transaction."""

    def __init__(self, shared: Shared, settler: Settler, transactions: Transactions) -> None:
        self._deliveries = shared.deliveries
        self._settler = settler
        self._transactions = transactions
        self._blocked_handlers = settler.blocked_handlers

    async def run(
        self, deliveries: Sequence[Delivery], call: BatchCall, judge: Judgement, lend: LendBatch
    ) -> Committed:
        """Call the handler in a transaction, and return what has become of the deliveries."""
        ending = await lend(conduct=partial(self._conduct, deliveries, call, judge))
        if isinstance(ending, Blocked):
            # Those that are blocked are now looked for first, and left out.
            self._blocked_handlers.beware(call.handler.name)
            ending = await lend(conduct=partial(self._conduct, deliveries, call, judge))
        if isinstance(ending, Blocked):
            ending = Committed(blocked=list(deliveries))
        if isinstance(ending, Faulted):
            delay = self._transactions.outage.begin(ending.fault)
            return Committed(again=[Snooze(each, delay) for each in deliveries])
        if isinstance(ending, BatchUnanswered):
            # A lease that is lost now was given up by the transaction. One that is not was not: the same for all of
            # them, unless other workers have claimed some in between.
            enter = partial(self._deliveries.enter_batch, batch=deliveries, idle=SILENCE)
            entered = await self._transactions.ask(enter)
            has_committed = self._deliveries.has_committed
            settled = {each for each, state in zip(deliveries, entered, strict=True) if has_committed(each, state)}
            everything = len(settled) == len(deliveries)
            ending = ending.otherwise if everything else ending.otherwise.only(settled, ending.error)
        # What another session blocks is due again later. This counts no attempt.
        ending.again += [Snooze(each, self._blocked_handlers.put_off(each)) for each in ending.blocked]
        return ending

    async def _conduct(
        self,
        deliveries: Sequence[Delivery],
        call: BatchCall,
        judge: Judgement,
        transaction: HandlerTransaction,
        run: HandlerCall[BatchResults],
    ) -> BatchEnding:
        """Begin and end the transaction around the call of the handler."""
        try:
            async with transaction.within(ENTER_PATIENCE):
                entered = await transaction.enter(partial(self._enter, deliveries))
                await transaction.set_savepoint()
        except Exception as fault:
            if sqlstate_of(fault) == LOCK_NOT_AVAILABLE:
                return Blocked()
            if not transaction.is_fault(fault):
                raise
            transaction.terminate()
            return Faulted(fault)
        self._transactions.outage.over()
        found = Committed(
            duplicates=_those(deliveries, entered, "duplicate"),
            lost=_those(deliveries, entered, "lost"),
            blocked=_those(deliveries, entered, "blocked"),
        )
        running = _those(deliveries, entered, "run")
        call.keep(index for index, state in enumerate(entered) if state == "run")
        committing = False
        try:
            results = await run() if running else []
            if transaction.forbidden:
                raise overran(call.handler)
            self._divide(running, results, judge, found)
            await transaction.finish()
            if found.settlements and not found.delivered:
                await transaction.undo()
            if found.settlements:
                await self._settle(transaction.connection, found.settlements)
            await self._deliveries.delete_delivered_batch(transaction.connection, [*found.delivered, *found.duplicates])
            committing = True
            if found.settlements and not found.delivered:
                await transaction.commit_undone()
            else:
                await transaction.commit(deliveries[0].handler)
        except BaseException as error:
            if isinstance(error, EndedByHand) and error.has_ended:
                found.delivered = running  # if it was a commit
                transaction.terminate()
                return BatchUnanswered(error, found)
            if committing and transaction.is_unanswered(error):
                transaction.terminate()
                return BatchUnanswered(error, found)
            if not isinstance(error, Exception):
                raise
            await self._roll_back(transaction)
            return Committed(lost=found.lost, blocked=found.blocked, error=error)
        return found

    async def _enter(self, deliveries: Sequence[Delivery], connection: Any, look: bool) -> list[str] | None:
        """Enter the handler for all deliveries. While its rows are blocked look first, and leave those out."""
        handler = deliveries[0].handler
        blocked: set[object] = set()
        if handler.name in self._blocked_handlers:
            blocked.update(await self._deliveries.blocked(connection, deliveries, record=True))
        free = [each for each in deliveries if each.id not in blocked]
        if not free:
            return ["blocked"] * len(deliveries)
        entered = await self._deliveries.enter_batch(connection, look, batch=free, idle=silence_of(handler))
        if entered is None:
            return None
        states = iter(entered)
        return ["blocked" if each.id in blocked else next(states) for each in deliveries]

    def _divide(self, running: list[Delivery], results: BatchResults, judge: Judgement, found: Committed) -> None:
        ended_at = time.monotonic()
        for delivery, result in zip(running, results, strict=True):
            delivery.ended_at = ended_at
            if isinstance(result, Done):
                found.delivered.append(delivery)
            else:
                found.settlements.append(judge(delivery, result))

    async def _settle(self, connection: Any, settlements: list[Settlement]) -> None:
        """Settle those that are not done, each in its way. Their rows are locked, and must be this transaction's."""
        if not await self._deliveries.reopen_batch(connection, [each.delivery for each in settlements]):
            raise ConnectionResetError("the transaction has not entered the handler")
        kinds = sorted(settlements, key=_kind)
        for _, some in groupby(kinds, _kind):
            if not await self._settler.settle_within(connection, list(some)):
                raise ConnectionResetError("the lease is lost in the transaction that has the row")

    async def _roll_back(self, transaction: HandlerTransaction) -> None:
        try:
            async with transaction.within(UNDO_PATIENCE):
                await transaction.rollback()
        except Exception:
            transaction.terminate()


def _those(deliveries: Sequence[Delivery], entered: Sequence[str], state: str) -> list[Delivery]:
    return [each for each, entered_as in zip(deliveries, entered, strict=True) if entered_as == state]


def _kind(settlement: Settlement) -> tuple[str, bool]:
    """What is settled by one statement: dead letters may go to the archive, others of those that fail do not."""
    return type(settlement).__name__, getattr(settlement, "dead", False)
