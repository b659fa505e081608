"""Brokers, as operators see and change them: which handlers they carry events to, and what was relayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from holdfast.postgres.operations.connection import Statements


@dataclass(frozen=True, slots=True)
class CarriedHandler:
    """A handler that gets its events by a broker, or did, and is still given the last of them."""

    handler_name: str
    domain_context: str
    event_types: list[str]
    via: str  # what carries its events now: outbox, or the name of a broker
    since: datetime | None  # None: from the first day on
    decided_by: str | None  # None: a worker that was started with the broker
    draining: str | None  # the broker from which the last ones are taken
    relayed_by: list[str]  # living workers that send to the broker
    taken_by: list[str]  # those of them that have the handler


@dataclass(frozen=True, slots=True)
class LostDelivery:
    """An event that a broker has confirmed, and that a handler of this database has not got."""

    id: UUID
    event_id: UUID
    handler_name: str
    event_type: str
    source: str
    relayed_at: datetime


async def carried(statements: Statements, only: str | None = None) -> list[CarriedHandler]:
    """Every handler that has to do with a broker, or one."""
    return [CarriedHandler(**row) for row in await statements.fetch("list_carried", only=only)]


async def channels(statements: Statements) -> list[str]:
    """The channels that living workers serve, and the one of applications without deployments."""
    return [row[0] for row in await statements.fetch("list_served_channels")]


async def set_via(statements: Statements, handlers: Sequence[str], via: str, *, actor: str, reason: str | None) -> int:
    """Let something else carry the events of handlers; how many have changed."""
    values = {"handlers": list(handlers), "via": via, "actor": actor, "reason": reason}
    return int(await statements.value("handler_via", **values))


async def set_drained(statements: Statements, handler: str, via: str, *, actor: str, reason: str | None) -> bool:
    """Note that a broker has nothing left for a handler; whether it had not been noted."""
    values = {"handler": handler, "via": via, "actor": actor, "reason": reason}
    return bool(await statements.value("handler_drained", **values))


async def unrelayed(statements: Statements, handler: str, via: str, most: int = 10_000) -> int:
    """How many events wait to be sent to a broker for a handler that has left it, up to `most`."""
    return int(await statements.value("count_unrelayed", handler=handler, via=via, most=most))


async def lost(statements: Statements, via: str, since: datetime, until: datetime, most: int) -> list[LostDelivery]:
    """What a broker has lost of what was relayed between two times; `most` rows are looked at."""
    rows = await statements.fetch("relay_lost", via=via, since=since, until=until, most=most)
    return [LostDelivery(**row) for row in rows]


async def relayed(statements: Statements, via: str, since: datetime, until: datetime, most: int) -> int | None:
    """How many events were relayed between two times, up to `most`; None: nothing is ever relayed to this broker."""
    (row,) = await statements.fetch("count_relayed", via=via, since=since, until=until, most=most)
    return row["rows"] if row["known"] else None


async def repair(
    statements: Statements, via: str, since: datetime, until: datetime, most: int, *, actor: str, reason: str | None
) -> int:
    """Put what was lost into the lanes of its handlers; how many deliveries."""
    values = {"via": via, "since": since, "until": until, "most": most, "actor": actor, "reason": reason}
    return int(await statements.value("relay_repair", **values))


async def again(
    statements: Statements,
    via: str,
    since: datetime,
    until: datetime,
    event_type: str | None,
    source: str | None,
    most: int,
    *,
    actor: str,
    reason: str | None,
) -> int:
    """Have rows relayed once more; how many."""
    values = {"via": via, "since": since, "until": until, "event_type": event_type, "source": source, "most": most}
    return int(await statements.value("relay_again", **values, actor=actor, reason=reason))


async def rotate(statements: Statements, drop: bool, *, actor: str, reason: str | None) -> int:
    """Make a new secret of relays; how many are accepted now."""
    return int(await statements.value("relay_rotate", drop=drop, actor=actor, reason=reason))
