"""Handlers that take `tx`: their writes, the inbox row and the settle commit together, so they happen exactly once."""

import asyncio
from collections.abc import Callable

import asyncpg

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.outcome import Done, Outcome, Snooze
from holdfast.postgres.connection import CONNECT_TIMEOUT, Address
from holdfast.postgres.deliveries import Deliveries, Delivery
from holdfast.telemetry import Counters

# What a transaction may stay silent beyond the handler's own limit before the server ends it.
_SILENCE = 5.0


class LeaseLost(Exception):
    """Another worker has the row: everything the handler wrote is rolled back."""


class _RolledBack(Exception):
    """Leaves the transaction block so that it rolls back."""


class Transactions:
    """A pool of its own: handlers that use it up never keep the worker from claiming or settling."""

    def __init__(self, address: Address, deliveries: Deliveries, counters: Counters, *, size: int) -> None:
        self._address = address
        self._deliveries = deliveries
        self._counters = counters
        self._size = size
        self._pool: asyncpg.Pool | None = None
        self._opening = asyncio.Lock()

    async def _open(self) -> asyncpg.Pool:
        async with self._opening:
            if self._pool is None:
                self._pool = await asyncpg.create_pool(
                    self._address.dsn,
                    min_size=0,
                    max_size=self._size,
                    timeout=CONNECT_TIMEOUT,
                    max_inactive_connection_lifetime=60,
                    **self._address.options("handler", {}),
                )
            return self._pool

    async def run(
        self, delivery: Delivery, event: EventEnvelope, context: HandlerContext, start: Callable[[], None]
    ) -> Outcome | None:
        """None when delivery and effects are committed; else the outcome to settle, with the effects rolled back.

        `start` is called once there is a connection.
        """
        handler = delivery.handler
        pool = self._pool or await self._open()
        outcome: Outcome = Done()
        async with pool.acquire() as connection:
            start()
            try:
                async with connection.transaction(isolation="read_committed"):
                    try:
                        entered = await self._deliveries.enter(connection, delivery, handler.timeout + _SILENCE)
                    except asyncpg.LockNotAvailableError:
                        # A transaction that is gone but not yet ended holds the row: nobody's fault, no attempt.
                        outcome = Snooze(1.0)
                        raise _RolledBack from None
                    if entered == "lost":
                        raise LeaseLost
                    if entered == "run":
                        result = await handler.function(event, **handler.extras(event, context, connection))
                        outcome = handler.outcome_of(result)
                        if not isinstance(outcome, Done):
                            raise _RolledBack
                    if not await self._deliveries.leave(connection, delivery):
                        raise LeaseLost
            except _RolledBack:
                return outcome
        if entered == "run":
            self._counters.delivered += 1
        else:
            self._counters.duplicates += 1
        return None

    async def close(self) -> None:
        if self._pool is not None:
            try:
                async with asyncio.timeout(2):
                    await self._pool.close()
            except TimeoutError:
                self._pool.terminate()
