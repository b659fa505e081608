"""What a worker asks and tells the database about a broker that carries its events.

The functions stand with their reasons in `sql/functions/brokers.sql` and `sql/functions/relay.sql`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

import asyncpg

from holdfast.postgres.retention import policies_of
from holdfast.postgres.statements import NamedStatements
from holdfast.retention import inbox_days


class Owed(NamedTuple):
    """What a handler is to get from a broker: events of these types, since a time."""

    handler_name: str
    domain_context: str
    event_types: tuple[str, ...]
    since: datetime
    draining: bool  # something else carries its events now, and the last ones are taken from there


class Undecided(NamedTuple):
    """A handler for which nobody has decided what carries its events."""

    handler_name: str
    domain_context: str
    event_types: tuple[str, ...]


class RelayDetails(NamedTuple):
    """What a relay tells a broker about a row, besides the event."""

    id: UUID
    channel: str
    content_class: str
    priority: int
    ordering_key: str | None
    fairness_key: str | None
    expires_at: datetime | None
    cycle: int


class RelayKeys(NamedTuple):
    """The secrets of relays that the database has, and what keys of foreign events are made with."""

    signing: bytes
    accepted: tuple[bytes, ...]
    apart: bytes

    def __repr__(self) -> str:
        return "RelayKeys(***)"


class BrokerStatements:
    """Every method takes the connection it runs on."""

    def __init__(self, statements: NamedStatements) -> None:
        self._fetch = statements.fetch

    async def owed(self, connection: asyncpg.Connection, via: str, handlers: Iterable[str]) -> list[Owed]:
        """Return what those of the handlers are owed that a broker carries events to."""
        rows = await self._fetch(connection, "broker_interests", via=via, handlers=list(handlers))
        return [
            Owed(row["handler_name"], row["domain_context"], tuple(row["event_types"]), row["since"], row["draining"])
            for row in rows
        ]

    async def carried(
        self, connection: asyncpg.Connection, brokers: Iterable[str], handlers: Iterable[str]
    ) -> dict[str, str]:
        """Return those of the handlers that get their events from one of the brokers, and from which."""
        values = {"brokers": list(brokers), "handlers": list(handlers)}
        rows = await self._fetch(connection, "list_carried_by_brokers", **values)
        return {row["handler_name"]: row["via"] for row in rows}

    async def undecided(self, connection: asyncpg.Connection, handlers: Iterable[str]) -> list[Undecided]:
        """Return those of the handlers for which nobody has decided what carries their events."""
        rows = await self._fetch(connection, "broker_undecided", handlers=list(handlers))
        return [Undecided(row["handler_name"], row["domain_context"], tuple(row["event_types"])) for row in rows]

    async def adopt(self, connection: asyncpg.Connection, handlers: Iterable[str], via: str, worker: str) -> int:
        """Let a broker carry the events of those; return how many have changed."""
        rows = await self._fetch(connection, "broker_adopt", handlers=list(handlers), via=via, worker=worker)
        return int(rows[0][0])

    async def due_reports(
        self, connection: asyncpg.Connection, broker: str, channel: str, handlers: Iterable[str], every: float
    ) -> list[str]:
        """Return those of the handlers about which nobody has asked the broker for so many seconds."""
        values = {"broker": broker, "channel": channel, "handlers": list(handlers), "every": timedelta(seconds=every)}
        rows = await self._fetch(connection, "broker_report_due", **values)
        return list(rows[0][0])

    async def remembered(self, connection: asyncpg.Connection) -> float:
        """Return for how many seconds the inbox knows what was handled."""
        rows = await self._fetch(connection, "retention_policies_read")
        return 86_400.0 * inbox_days(policies_of(rows))

    async def report(
        self,
        connection: asyncpg.Connection,
        broker: str,
        channel: str,
        held: Mapping[str, tuple[int | None, int | None, int | None]],
        weaknesses: Sequence[Mapping[str, str]],
    ) -> None:
        """Store what the broker holds for handlers: waiting, unacknowledged, redelivered."""
        waiting, unacknowledged, redelivered = zip(*held.values(), strict=True)
        await self._fetch(
            connection,
            "broker_report",
            broker=broker,
            channel=channel,
            handlers=list(held),
            waiting=list(waiting),
            unacknowledged=list(unacknowledged),
            redelivered=list(redelivered),
            weaknesses=json.dumps(list(weaknesses)),
        )

    async def former_names(
        self, connection: asyncpg.Connection, broker: str, channel: str, handlers: Iterable[str], naming: str
    ) -> dict[str, list[str]]:
        """Note by which names a broker is used for handlers; return those that they had before, by handler."""
        values = {"broker": broker, "channel": channel, "handlers": list(handlers), "naming": naming}
        rows = await self._fetch(connection, "broker_naming", **values)
        return {row["handler_name"]: list(row["former"]) for row in rows}

    async def stranded(
        self, connection: asyncpg.Connection, broker: str, channel: str, handler: str, naming: str, waiting: int | None
    ) -> None:
        """Store how many messages are left for a handler by names that it had before; with 0 they are forgotten."""
        values = {"broker": broker, "channel": channel, "handler": handler, "naming": naming, "waiting": waiting}
        await self._fetch(connection, "broker_stranded", **values)

    async def details(self, connection: asyncpg.Connection, ids: Sequence[UUID]) -> dict[UUID, RelayDetails]:
        """Return what a relay tells a broker about rows, by their ids."""
        rows = await self._fetch(connection, "relay_details", ids=list(ids))
        return {row["id"]: RelayDetails(*row) for row in rows}

    async def relay_keys(self, connection: asyncpg.Connection) -> RelayKeys:
        """Return the secrets of relays."""
        (row,) = await self._fetch(connection, "relay_keys")
        return RelayKeys(row["signing"], tuple(row["accepted"]), row["apart"])
