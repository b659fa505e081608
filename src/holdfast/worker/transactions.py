"""Handlers that take `tx`: their writes, the inbox row and the settle commit together, so they happen exactly once.

BEGIN; lock the row; SAVEPOINT; inbox row; handler; settle as delivered; COMMIT

When the handler fails, only the savepoint is rolled back, and the retry or the failure is settled in the same
transaction: the row stays locked, so nobody can claim it in between, however long ago its lease ended.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from weakref import WeakKeyDictionary

import asyncpg

from holdfast.errors import TerminalHandlerError
from holdfast.outcome import Done, Outcome, Reject, Retry, Snooze
from holdfast.postgres.connection import CONNECT_TIMEOUT, CONNECTION_FAULTS, Address
from holdfast.postgres.deliveries import Deliveries, Delivery
from holdfast.telemetry import Counters, Observer
from holdfast.worker.outage import Outage
from holdfast.worker.settler import Settlement, Settler

# What a transaction may stay silent beyond the handler's own limit before the server ends it.
_SILENCE = 5.0
# For the lock and the inbox row, each of which the server lets wait for five seconds.
_ENTER_PATIENCE = 12.0
# For what follows a handler's failure. A connection that takes longer is taken for dead.
_UNDO_PATIENCE = 2.0

Call = Callable[[asyncpg.Connection], Awaitable[Outcome]]
Setback = Retry | Snooze | Reject | BaseException
Judge = Callable[[Setback], Settlement | None]


class LeaseLost(Exception):
    """The row is another worker's, or will be: the handler's writes are rolled back, and there is nothing to settle."""


class NoConnection(Exception):
    """All connections were taken for too long."""


class Transactions:
    """A pool of its own: handlers that use it up never keep the worker from claiming or settling."""

    def __init__(
        self,
        address: Address,
        deliveries: Deliveries,
        settler: Settler,
        counters: Counters,
        observe: Observer,
        *,
        size: int,
        patience: float,
        longest: float,
    ) -> None:
        self._address = address
        self._deliveries = deliveries
        self._settler = settler
        self._counters = counters
        self._size = size
        self._patience = patience
        self._longest = longest  # time limit of a handler
        self._free = asyncio.Semaphore(size)
        self._pool: asyncpg.Pool | None = None
        self._opening = asyncio.Lock()
        self._releasing: set[asyncio.Task[None]] = set()
        self._connections: WeakKeyDictionary[asyncpg.Connection, float] = WeakKeyDictionary()  # opened when
        self._drops = 0
        self._outage = Outage("handle", observe)

    async def run(self, delivery: Delivery, call: Call, start: Callable[[], None], judge: Judge) -> Outcome | None:
        """None when the delivery is settled; else the outcome to settle, with the effects rolled back.

        `start` is called when the handler's own time begins. `judge` says how to settle what did not end well, or
        that it is not ours to settle.
        """
        pool, connection = None, None
        await self._take_turn()
        try:
            pool = self._pool or await self._open()
            connection = await pool.acquire(timeout=CONNECT_TIMEOUT + 1)
            return await self._attempt(connection, delivery, call, start, judge)
        except BaseException as fault:
            if connection is None and isinstance(fault, CONNECTION_FAULTS):
                return Snooze(self._outage.begin(fault))  # the handler has not begun: no attempt
            _terminate(connection)  # in what state, nobody knows
            raise
        finally:
            # Not waited for: what is settled must not be cancelled any more.
            releasing = asyncio.create_task(self._release(pool, connection))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

    async def _attempt(
        self,
        connection: asyncpg.Connection,
        delivery: Delivery,
        call: Call,
        start: Callable[[], None],
        judge: Judge,
    ) -> Outcome | None:
        drops = self._drops
        transaction = connection.transaction(isolation="read_committed")
        savepoint = connection.transaction()
        try:
            async with asyncio.timeout(_ENTER_PATIENCE):
                await transaction.start()
                if not await self._deliveries.lock(connection, delivery, delivery.handler.timeout + _SILENCE):
                    raise LeaseLost
                await savepoint.start()
                first = await self._deliveries.note(connection, delivery)
        except asyncpg.LockNotAvailableError:
            # A transaction that is gone but not yet ended holds the row: nobody's fault, no attempt.
            _terminate(connection)
            return Snooze(1.0)
        except CONNECTION_FAULTS as fault:
            _terminate(connection)
            return Snooze(self._outage.begin(fault))
        self._outage.over()
        result: Outcome | BaseException = Done()
        try:
            if first:
                start()
                result = await call(connection)
                _require_open(connection, delivery)
            if isinstance(result, Done):
                if not await self._deliveries.leave(connection, delivery):
                    raise LeaseLost
                await transaction.commit()  # and with it the savepoint
        except LeaseLost:
            raise
        except BaseException as error:
            result = error
        if not isinstance(result, Done):
            return await self._undo(connection, transaction, savepoint, result, judge, drops)
        if first:
            self._counters.delivered += 1
        else:
            self._counters.duplicates += 1
        return None

    async def _undo(
        self,
        connection: asyncpg.Connection,
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
                if await self._settler.send(connection, settlement):
                    raise LeaseLost
                await transaction.commit()
                done = True
        except LeaseLost:
            raise
        except Exception as fault:
            _terminate(connection)
            if isinstance(fault, TimeoutError) or drops != self._drops:
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

    def drop(self, silence: float) -> None:
        """The other side has not answered for so long: end connections that are older, those in use as well."""
        self._drops += 1
        for connection, opened_at in tuple(self._connections.items()):
            if time.monotonic() - opened_at > silence:
                connection.terminate()

    async def close(self) -> None:
        if self._pool is not None:
            try:
                async with asyncio.timeout(1):
                    await self._pool.close()
            except TimeoutError:
                self._pool.terminate()

    async def _take_turn(self) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError:
            raise NoConnection from None

    async def _release(self, pool: asyncpg.Pool | None, connection: asyncpg.Connection | None) -> None:
        try:
            if pool is not None and connection is not None:
                with contextlib.suppress(Exception):  # what cannot be used again is closed by the pool
                    await pool.release(connection, timeout=_UNDO_PATIENCE)
        finally:
            self._free.release()

    async def _open(self) -> asyncpg.Pool:
        async with self._opening:
            if self._pool is None:
                # While a statement runs, or is being sent, the limit for idle transactions does not help the server
                # to get rid of a client that is gone.
                settings = {
                    "statement_timeout": str(int((self._longest + _SILENCE) * 1000)),
                    "tcp_keepalives_idle": "5",
                    "tcp_keepalives_interval": "3",
                    "tcp_keepalives_count": "3",
                }
                self._pool = await asyncpg.create_pool(
                    self._address.dsn,
                    min_size=0,
                    max_size=self._size,
                    timeout=CONNECT_TIMEOUT,
                    max_inactive_connection_lifetime=60,
                    init=self._opened,
                    **self._address.options("handler", settings),
                )
            return self._pool

    async def _opened(self, connection: asyncpg.Connection) -> None:
        self._connections[connection] = time.monotonic()


def _terminate(connection: asyncpg.Connection | None) -> None:
    if connection is not None:
        with contextlib.suppress(asyncpg.InterfaceError):  # it was already
            connection.terminate()


def _require_open(connection: asyncpg.Connection, delivery: Delivery) -> None:
    if not connection.is_in_transaction():
        raise TerminalHandlerError(
            f"{delivery.handler.name} ended its transaction by hand; it commits with the delivery: raise or return "
            "Retry, Snooze or Reject to roll back, and use tx.transaction() for a part that may fail"
        )
