"""The database connections of one worker, except the lease keeper's, which lives in its thread."""

import asyncio
from uuid import UUID

from holdfast.handlers import HandlerRegistry
from holdfast.handling.application.sources import Sources, Transactions
from holdfast.handling.sessions import SILENCE, Sessions
from holdfast.postgres.connection import LOCK_TIMEOUT, Address, ReservedConnection
from holdfast.settings import WorkerSettings

# How often the listening connection is asked whether it is still alive.
PING_INTERVAL = 5.0
# If a worker is frozen while it sleeps, the server ends its connections as idle: producers stop notifying.
IDLE_LIMIT = 5 * PING_INTERVAL


class Connections:
    """Each loop has a connection of its own, opened when it is first used; transactional handlers share `sessions`."""

    def __init__(
        self,
        dsn: str,
        worker: UUID,
        registry: HandlerRegistry,
        settings: WorkerSettings,
        transactions: Transactions = None,
    ) -> None:
        self.address = Address(dsn, owner=str(worker))
        # LISTEN needs a direct connection.
        self.listen_address = self.address
        if settings.listen_dsn:
            field = "WorkerSettings.listen_dsn"
            self.listen_address = Address(settings.listen_dsn, owner=str(worker), field=field)
        # A statement that takes longer than this is a sign of trouble, and must end before the lease does.
        limit = settings.lease / 3
        # Not durable: a claim that a crash of the server undoes counts as not made, because its token settles nothing.
        self.claim = ReservedConnection(self.address, "claim", statement_timeout=limit, durable=False)
        # A row that another session has locked, or whose inbox row another has not committed, is settled later.
        self.settle = ReservedConnection(self.address, "settle", statement_timeout=limit, lock_timeout=LOCK_TIMEOUT)
        self.maintenance = ReservedConnection(self.address, "maintenance", statement_timeout=limit)
        self.schedule = ReservedConnection(self.address, "schedule", statement_timeout=limit)
        self.listen = ReservedConnection(
            self.listen_address, "listen", statement_timeout=limit, idle_timeout=IDLE_LIMIT
        )
        self.sleeper = ReservedConnection(self.listen_address, "sleeper", idle_timeout=IDLE_LIMIT)
        self.sessions = Sessions(
            self.address,
            size=settings.connections,
            most=settings.sessions_at_most(sum(handler.transactional for handler in registry)),
            patience=settings.lease,
            statement_timeout=max((handler.timeout for handler in registry), default=0.0) + SILENCE,
        )

        # The application's own, for handlers that take one of its transactions.
        self.sources = Sources(transactions, settings.schema)
        self.sources.serve(registry)

    def drop(self) -> None:
        """Forget all connections but those for wake-ups: the server has not answered, and will not answer on them."""
        for connection in (self.claim, self.settle, self.maintenance, self.schedule):
            connection.drop()
        self.sessions.drop(PING_INTERVAL)  # the last answer is at least that old
        self.sources.drop(PING_INTERVAL)

    async def close(self) -> None:
        """Close all of them at once, except the sleeper's, which the sleeper closes."""
        reserved = (self.claim, self.settle, self.maintenance, self.schedule, self.listen)
        await asyncio.gather(
            self.sessions.close(),
            self.sources.stop(),
            *(connection.close() for connection in reserved),
            return_exceptions=True,
        )
