"""Subscriptions: which handler is owed which events, whether a worker runs or not.

The functions stand with their reasons in `sql/functions/subscriptions.sql`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import asyncpg

from holdfast.handlers import Handler
from holdfast.postgres.connection import own_transaction
from holdfast.postgres.statements import NamedStatements

# Handlers in one transaction, for which other workers that start wait.
_AT_ONCE = 100


class Subscription(NamedTuple):
    """One handler is owed the events of one type, or of the types that match a pattern."""

    domain_context: str
    handler_name: str
    event_type: str


@dataclass(frozen=True, slots=True)
class Subscriptions:
    """The subscriptions in force, as recorded at one version."""

    version: int
    entries: tuple[Subscription, ...]


class SubscriptionsChanged(Exception):
    """The lanes of a claim or a split were worked out with outdated subscriptions; nothing was changed."""


class SubscriptionStatements:
    """Reads and records subscriptions. Every method takes the connection it runs on."""

    def __init__(self, statements: NamedStatements) -> None:
        self._fetch = statements.fetch

    async def read(self, connection: asyncpg.Connection) -> Subscriptions:
        """Read the subscriptions in force, with their version."""
        rows = await self._fetch(connection, "subscriptions_read")
        return Subscriptions(
            rows[0]["version"],
            tuple(
                Subscription(row["domain_context"], row["handler_name"], row["event_type"])
                for row in rows
                if row["handler_name"]
            ),
        )

    async def subscribe(self, connection: asyncpg.Connection, handlers: Iterable[Handler]) -> None:
        """Record durably what the handlers are owed; most starts find all of it on record."""
        known = set((await self.read(connection)).entries)
        missing = [
            handler
            for handler in sorted(handlers, key=attrgetter("name"))
            if any((handler.domain_context, handler.name, each) not in known for each in handler.event_types)
        ]
        for first in range(0, len(missing), _AT_ONCE):
            async with own_transaction(connection):
                some = [(each, kind) for each in missing[first : first + _AT_ONCE] for kind in each.event_types]
                await self._fetch(
                    connection,
                    "subscribe_handlers",
                    domain_contexts=[handler.domain_context for handler, _ in some],
                    handlers=[handler.name for handler, _ in some],
                    event_types=[event_type for _, event_type in some],
                )
