"""Reads the status: open events by route, their age, dead letters and workers.

Nothing here counts settled rows, so a read costs the same beside ten delivered events or ten million. Counts end at a
limit: one that equals its limit means "or more".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TypeVar
from uuid import UUID

import asyncpg

from holdfast.names import meant_type
from holdfast.postgres.operations.excerpt import Excerpt
from holdfast.postgres.operations.flow import HandlerFlow
from holdfast.postgres.queries import Queries

T = TypeVar("T")

MOST = 100_000
MOST_IN_ROUTE = 10_000
MOST_ROUTES = 200
MOST_WORKERS = 200
MOST_UNSERVED = 20
ERROR_LENGTH = 500
MOST_CHANNELS = 20_000
MOST_LANES = 50_000
# Messages of a handler that a broker holds and nobody has taken: so many are told of.
MUCH_LAG = 10_000
MISSED_HEARTBEAT = 20.0  # seconds; a worker sends one every ten, and counts as living for a minute
_OF_ALL = ("total", "oldest_of_all")
_MOST_TYPES = 1_000  # of those that handlers subscribe to, to find one that was meant


@dataclass(frozen=True, slots=True)
class RouteStatus:
    """Open events of one route: a handler's own, or those of an event type before they are known to be owed to one."""

    channel: str
    generation: int
    route: str
    target: str | None
    event_type: str | None  # None: a handler's route
    handlers: list[str]  # to whom its events are owed; none: they are unrouted, and wait
    open: int
    oldest: float | None  # seconds since the first one is due; None: nothing is due
    unserved: list[str]  # of the handlers, those that no living worker has
    pending: int = 0  # of the open ones, those that are due; of all routes together, up to the limit
    in_flight: int = 0
    # Of an unrouted one: a type that some handler subscribes to, and that is spelt nearly alike.
    meant: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker that has not shut down."""

    id: UUID
    name: str
    host: str
    pid: int
    version: str
    generation: int
    channels: list[str]
    handlers: list[str]
    started_at: datetime
    heartbeat_at: datetime
    silent_for: float
    living: bool
    connected: bool  # it has a session in the database; behind a pooler it may have none while it is idle

    @property
    def late(self) -> bool:
        """Whether it counts as living and has missed a heartbeat; workers send one every ten seconds."""
        return self.living and self.silent_for > MISSED_HEARTBEAT

    @property
    def gone(self) -> bool:
        """Whether it counts as living and was most likely killed: a heartbeat is missing, and so are its sessions."""
        return self.late and not self.connected


@dataclass(frozen=True, slots=True)
class NewestFailure:
    """The newest dead letter, in the outbox or in the archive."""

    handler_name: str
    failed_at: datetime
    last_error: str | None
    raised_at: str | None  # file, line and function in the user's code
    archived: bool = False


@dataclass(frozen=True, slots=True)
class BlockedKeys:
    """Ordering keys of one handler whose events wait behind a dead letter."""

    handler_name: str
    keys: int
    since: datetime  # the first of the dead letters


@dataclass(frozen=True, slots=True)
class BrokerBacklog:
    """What a broker holds for a handler, as a worker has last asked it; None where the broker does not tell."""

    broker: str
    handler_name: str
    seconds: float | None  # since the answer; None: there was none
    waiting: int | None  # messages that nobody has taken: the lag
    unacknowledged: int | None  # taken, and not acknowledged
    redelivered: int | None  # of those, the ones that were delivered before


@dataclass(frozen=True, slots=True)
class BrokerWeakness:
    """A setting of a broker that breaks a promise, and its remedy."""

    broker: str
    subject: str
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class StrandedMessages:
    """What a broker holds for a handler by names that its workers had before, and where nobody takes it."""

    broker: str
    handler_name: str
    naming: str  # the templates of the names, as options of the broker's address
    waiting: int | None  # None: not known


@dataclass(frozen=True, slots=True)
class Status:
    """One moment of a schema."""

    pending: int
    delayed: int
    in_flight: int
    expired_leases: int  # of those in flight: the next claim takes them
    failed: int
    archived: int  # failed, and moved to the archive
    open_is_more: bool  # there are more open rows than were counted
    routes: Excerpt[RouteStatus]
    unserved: list[tuple[str, int]]  # channel and generation; a few, if there are many
    unserved_channels: int  # how many there are
    workers: Excerpt[WorkerStatus]
    wakeup_mode: str | None  # None: the trigger is missing
    newest_failure: NewestFailure | None = None
    oldest: float | None = None  # age of the oldest due event, in seconds, also of routes that are left out
    flows: tuple[HandlerFlow, ...] = ()  # of the handlers that are limited or paused, or have a breaker
    blocked: tuple[BlockedKeys, ...] = ()
    backlogs: tuple[BrokerBacklog, ...] = ()  # of the handlers that get their events by a broker
    weaknesses: tuple[BrokerWeakness, ...] = ()
    stranded: tuple[StrandedMessages, ...] = ()

    @property
    def more_unserved(self) -> int:
        """How many channels without a living worker there are beside those that are named."""
        return self.unserved_channels - len(self.unserved)

    @property
    def open(self) -> str:
        """How many events are pending, delayed or in flight."""
        return f"{self.pending + self.delayed + self.in_flight}{'+' if self.open_is_more else ''}"

    @property
    def unserved_is_more(self) -> bool:
        """Whether there are more channels without a living worker than were counted."""
        return self.unserved_channels >= MOST_CHANNELS

    @property
    def failed_is_more(self) -> bool:
        return self.failed >= MOST

    @property
    def archived_is_more(self) -> bool:
        return self.archived >= MOST

    @property
    def unrouted(self) -> list[RouteStatus]:
        return [route for route in self.routes if not route.handlers]


@dataclass(frozen=True, slots=True)
class Notifications:
    """The state of the server's notification queue."""

    queue_usage: float  # from 0 to 1; when the server's queue is full, commits that notify fail
    listeners: int  # connections of workers that listen, in this database


async def notifications(connection: asyncpg.Connection) -> Notifications:
    """Read how full the notification queue is, and how many workers listen."""
    queries = Queries("core")
    async with connection.transaction(isolation="read_committed", readonly=True):
        await connection.fetch(queries.asyncpg("begin_read").sql)
        row = await connection.fetchrow(queries.asyncpg("read_notifications").sql)
    return Notifications(**row)


async def read(connection: asyncpg.Connection, schema: str = "core", limit: str | None = None) -> Status:
    """Read the status in one snapshot; `limit` is the time that each statement has, as the server writes it."""
    queries = Queries(schema)

    async def fetch(name: str, **values: object) -> list[asyncpg.Record]:
        statement = queries.asyncpg(name)
        rows: list[asyncpg.Record] = await connection.fetch(statement.sql, *statement.bind(values))
        return rows

    async with connection.transaction(isolation="repeatable_read", readonly=True):
        await fetch("begin_read")
        if limit is not None:
            await fetch("limit_read", limit=limit)
        (counts,) = await fetch("count_open", most=MOST)
        (failed,) = await fetch("count_failed", most=MOST)
        newest = await fetch("newest_failure", error_length=ERROR_LENGTH)
        (archived,) = await fetch("count_archived", most=MOST)
        walk = {"most_channels": MOST_CHANNELS, "most_lanes": MOST_LANES}
        routes = await fetch("list_routes", most_routes=MOST_ROUTES, most_in_route=MOST_IN_ROUTE, most=MOST, **walk)
        unrouted = list(islice((row["event_type"] for row in routes if not row["handlers"]), MOST_UNSERVED))
        subscribed = await fetch("list_subscribed_types", most=_MOST_TYPES) if unrouted else []
        unserved = await fetch("list_unserved", most_unserved=MOST_UNSERVED, **walk)
        workers = await fetch("list_workers", most_workers=MOST_WORKERS)
        flows = await fetch("list_handler_flow", only=None)
        blocked = await fetch("count_blocked_keys", most=MOST)
        backlogs = await fetch("list_broker_reports", most_handlers=MOST_ROUTES)
        weaknesses = await fetch("list_broker_weaknesses")
        stranded = await fetch("list_stranded")
        wakeup_mode = await fetch("read_wakeup_mode")
    types = [row["event_type"] for row in subscribed]
    meant = {each: meant_type(each, types) for each in dict.fromkeys(unrouted) if each is not None}
    return Status(
        # Beside more open events than are counted, those of the routes may not be among the counted ones.
        pending=max(counts["pending"], sum(row["pending"] for row in routes)),
        delayed=counts["delayed"],
        in_flight=max(counts["in_flight"], sum(row["in_flight"] for row in routes)),
        expired_leases=counts["expired_leases"],
        failed=failed["count"],
        archived=archived["count"],
        open_is_more=counts["examined"] >= MOST,
        routes=_excerpt(lambda **row: RouteStatus(**row, meant=meant.get(row["event_type"])), routes),
        unserved=[(row["channel"], row["generation"]) for row in unserved],
        unserved_channels=unserved[0]["total"] if unserved else 0,
        workers=_excerpt(WorkerStatus, workers),
        wakeup_mode=wakeup_mode[0][0] if wakeup_mode else None,
        newest_failure=NewestFailure(**newest[0]) if newest else None,
        oldest=routes[0]["oldest_of_all"] if routes else None,
        flows=tuple(HandlerFlow(**row) for row in flows),
        blocked=tuple(BlockedKeys(**row) for row in blocked),
        backlogs=tuple(BrokerBacklog(**row) for row in backlogs),
        weaknesses=tuple(BrokerWeakness(**row) for row in weaknesses),
        stranded=tuple(StrandedMessages(**row) for row in stranded),
    )


def _excerpt(kind: Callable[..., T], rows: list[asyncpg.Record]) -> Excerpt[T]:
    """The rows, without what they say of all."""
    shown = [{name: value for name, value in row.items() if name not in _OF_ALL} for row in rows]
    return Excerpt((kind(**each) for each in shown), rows[0]["total"] if rows else 0)
