"""The worker's conversation with the outbox: claim, split, extend, settle. One method, one statement."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from holdfast.handlers import Handler
from holdfast.postgres.connection import Address
from holdfast.postgres.queries import Queries

_CRASHES_ALLOWED = 3
NO_MARK = (datetime(1, 1, 2, tzinfo=UTC), UUID(int=0))


class Delivery:
    """One claimed row: an event, the handler it is owed to, and the lease under which it is held."""

    # What outbox_claim returns, in its order.
    id: UUID
    route: str
    priority: int
    available_at: datetime
    origin_id: UUID | None
    event_type: str
    event_version: int
    occurred_at: datetime
    source: str
    target: str | None
    domain_id: UUID | None
    payload: str
    idempotency_key: str
    trace_context: str | None
    headers: str | None
    attempts: int
    failing_for: float | None
    expired: bool
    stopped: bool
    handled: bool
    # What this worker knows beside it.
    token: UUID
    handler: Handler
    key: tuple[str, str]
    twin: bool  # the worker has another copy of the same key
    claimed_at: float
    started_at: float | None  # when the handler began to run

    __slots__ = tuple(__annotations__)

    def __init__(self, record: Iterable[Any], token: UUID, handlers: Mapping[str, Handler], claimed_at: float) -> None:
        (
            self.id, self.route, self.priority, self.available_at, self.origin_id,
            self.event_type, self.event_version, self.occurred_at, self.source, self.target, self.domain_id,
            self.payload, self.idempotency_key, self.trace_context, self.headers,
            self.attempts, self.failing_for, self.expired, self.stopped, self.handled,
        ) = record  # fmt: skip
        self.token = token
        self.handler = handler = handlers[self.route]
        self.key = (handler.name, self.idempotency_key)
        self.twin = False
        self.claimed_at = claimed_at
        self.started_at = None

    @property
    def event_id(self) -> UUID:
        return self.origin_id or self.id

    @property
    def allowance(self) -> int:
        """How many deliveries there may be: the handler's budget, but a few as long as no attempt came to an end.

        A worker that dies takes an attempt from everything it holds, also from what it had not started.
        """
        budget = self.handler.retry.budget
        return budget if self.failing_for is not None else max(budget, _CRASHES_ALLOWED)

    @property
    def suspect(self) -> bool:
        """Whether this is the last delivery, and no earlier one came to an end: its workers may have died of it."""
        return self.attempts > 1 and self.attempts == self.allowance and self.failing_for is None


@dataclass(frozen=True, slots=True)
class Subscriptions:
    """Who wants which events, as recorded at one version."""

    version: int
    entries: tuple[tuple[str, str, str], ...]  # context, handler name, event type or pattern


@dataclass(frozen=True, slots=True)
class LaneClaim:
    """One lane of a claim: at most `limit` rows at or after `mark`."""

    route: str
    priority: int
    handler: Handler
    limit: int
    mark: tuple[datetime, UUID]


@dataclass(frozen=True, slots=True)
class LaneFind:
    """What a claim or a split found in a lane: how many rows, and where the first of them lies."""

    route: str
    priority: int
    count: int
    first: tuple[datetime, UUID]


class SubscriptionsChanged(Exception):
    """The claim was planned with outdated subscriptions; nothing was claimed."""


class Deliveries:
    """The statements of one worker. Every method takes the connection it runs on."""

    def __init__(self, queries: Queries, address: Address, *, worker: UUID, generation: int, lease: float) -> None:
        self._queries = queries
        self._address = address
        self._worker = worker
        self._generation = generation
        self._lease = timedelta(seconds=lease)
        self.consuming = False  # retention keeps delivered rows of some class not at all

    async def _fetch(self, connection: asyncpg.Connection, name: str, **values: object) -> list[asyncpg.Record]:
        statement = self._queries.asyncpg(name)
        records: list[asyncpg.Record]
        if self._address.pooled and not connection.is_in_transaction():
            async with connection.transaction(isolation="read_committed"):
                records = await connection.fetch(statement.sql, *statement.bind(values))
        else:
            records = await connection.fetch(statement.sql, *statement.bind(values))
        return records

    async def claim(
        self, connection: asyncpg.Connection, registry: int, channel: str, lanes: Sequence[LaneClaim]
    ) -> list[Delivery]:
        """Lease what is due under a token of its own, the most urgent first."""
        token = uuid4()
        records = await self._fetch(
            connection,
            "claim",
            worker=self._worker,
            token=token,
            lease=self._lease,
            registry=registry,
            channel=channel,
            generation=self._generation,
            handlers=[lane.handler.name for lane in lanes],
            **_columns(lanes),
        )
        if records and records[0]["id"] is None:
            raise SubscriptionsChanged
        now, handlers = time.monotonic(), {lane.route: lane.handler for lane in lanes}
        claimed = [Delivery(record, token, handlers, now) for record in records]
        claimed.sort(key=_urgency)
        return claimed

    async def split(
        self, connection: asyncpg.Connection, registry: int, channel: str, lanes: Sequence[LaneClaim]
    ) -> list[LaneFind]:
        """Split what several handlers want; says how much was found in which lane."""
        rows = await self._fetch(
            connection,
            "split",
            registry=registry,
            channel=channel,
            generation=self._generation,
            **_columns(lanes),
        )
        if rows and rows[0]["route"] is None:
            raise SubscriptionsChanged
        return [LaneFind(row["route"], row["priority"], row["n"], (row["first_at"], row["first_id"])) for row in rows]

    async def extend(self, connection: asyncpg.Connection, held: Sequence[Delivery]) -> list[UUID]:
        """Extend the leases; returns the ids that are lost."""
        rows = await self._fetch(connection, "extend", **_fence(held), lease=self._lease)
        return [row[0] for row in rows]

    async def deliver(self, connection: asyncpg.Connection, held: Sequence[Delivery], *, record: bool) -> list[UUID]:
        # A route that is not a handler's own says nothing about who has handled its events.
        handlers = {each.route: each.handler.name for each in held}
        if len(handlers) < len({(each.route, each.handler.name) for each in held}):
            # The registry has changed hands in between: the batch is settled handler by handler, or not at all.
            async with connection.transaction():
                by_name = attrgetter("handler.name")
                groups = [list(some) for _, some in groupby(sorted(held, key=by_name), by_name)]
                return [lost for some in groups for lost in await self.deliver(connection, some, record=record)]
        rows = await self._fetch(
            connection,
            "consume" if self.consuming else "deliver",
            **_fence(held),
            routes=list(handlers),
            handlers=list(handlers.values()),
            record=record,
        )
        return [row[0] for row in rows]

    async def retry(
        self,
        connection: asyncpg.Connection,
        held: Sequence[Delivery],
        delays: Iterable[float],
        errors: Sequence[str],
    ) -> list[UUID]:
        rows = await self._fetch(
            connection,
            "retry",
            **_fence(held),
            handlers=_names(held),
            delays=_intervals(delays),
            errors=list(errors),
        )
        return [row[0] for row in rows]

    async def fail(
        self,
        connection: asyncpg.Connection,
        held: Sequence[Delivery],
        reasons: Sequence[str],
        errors: Sequence[str | None],
        signatures: Sequence[str | None],
    ) -> list[UUID]:
        """The dead letter, in place."""
        rows = await self._fetch(connection, "fail", **_fence(held), **_failures(held, reasons, errors, signatures))
        return [row[0] for row in rows]

    async def archive(
        self,
        connection: asyncpg.Connection,
        held: Sequence[Delivery],
        reasons: Sequence[str],
        errors: Sequence[str | None],
        signatures: Sequence[str | None],
    ) -> list[UUID]:
        """The dead letter, moved to the archive."""
        rows = await self._fetch(connection, "archive", **_fence(held), **_failures(held, reasons, errors, signatures))
        return [row[0] for row in rows]

    async def release(
        self, connection: asyncpg.Connection, held: Sequence[Delivery], delays: Iterable[float]
    ) -> list[UUID]:
        rows = await self._fetch(connection, "release", **_fence(held), delays=_intervals(delays))
        return [row[0] for row in rows]

    async def enter(self, connection: asyncpg.Connection, delivery: Delivery, idle: float) -> str:
        """The first statement of a transactional handler: settle the row, write the inbox. run, duplicate or lost."""
        rows = await self._fetch(
            connection,
            "enter",
            id=delivery.id,
            token=delivery.token,
            handler=delivery.handler.name,
            idle=timedelta(seconds=idle),
        )
        return str(rows[0][0])

    async def reopen(self, connection: asyncpg.Connection, delivery: Delivery) -> bool:
        """Take that back after a failure, in the same transaction; false when it was not done there."""
        rows = await self._fetch(
            connection,
            "reopen",
            id=delivery.id,
            token=delivery.token,
            handler=delivery.handler.name,
            route=delivery.route,
        )
        return bool(rows[0][0])

    async def forget(self, connection: asyncpg.Connection, delivery: Delivery) -> None:
        """The last statement of a transactional handler's transaction, if rows are not kept: delete what it settled."""
        if self.consuming:
            await self._fetch(connection, "forget", id=delivery.id, handler=delivery.handler.name)

    async def due_in(
        self, connection: asyncpg.Connection, channel: str, lanes: Sequence[tuple[str, int]], since: float
    ) -> float | None:
        """Seconds until the first delayed row of the lanes is due; negative for one that became due since then."""
        rows = await self._fetch(
            connection,
            "due_in",
            channel=channel,
            generation=self._generation,
            routes=[route for route, _ in lanes],
            priorities=[priority for _, priority in lanes],
            since=timedelta(seconds=since),
        )
        value = rows[0][0]
        return None if value is None else float(value)

    async def lanes(self, connection: asyncpg.Connection, channel: str) -> list[str]:
        """The routes that have open rows on a channel."""
        rows = await self._fetch(connection, "lanes", channel=channel, generation=self._generation)
        return [row[0] for row in rows]

    async def subscriptions(self, connection: asyncpg.Connection) -> Subscriptions:
        rows = await self._fetch(connection, "subscriptions")
        wanted = tuple((row["context"], row["handler_name"], row["event_type"]) for row in rows if row["handler_name"])
        return Subscriptions(rows[0]["version"], wanted)

    async def subscribe(self, connection: asyncpg.Connection, handlers: Iterable[Handler]) -> None:
        async with connection.transaction():
            await self._fetch(connection, "make_durable")
            for handler in sorted(handlers, key=lambda each: each.name):
                await self._fetch(
                    connection,
                    "subscribe",
                    context=handler.domain_context,
                    handler=handler.name,
                    event_types=list(handler.event_types),
                )


_urgency = attrgetter("priority", "available_at", "id")


def _columns(lanes: Sequence[LaneClaim]) -> dict[str, object]:
    return {
        "routes": [lane.route for lane in lanes],
        "priorities": [lane.priority for lane in lanes],
        "limits": [lane.limit for lane in lanes],
        "marks_at": [lane.mark[0] for lane in lanes],
        "marks_id": [lane.mark[1] for lane in lanes],
    }


def _fence(held: Sequence[Delivery]) -> dict[str, object]:
    return {"ids": [each.id for each in held], "tokens": [each.token for each in held]}


def _failures(
    held: Sequence[Delivery],
    reasons: Sequence[str],
    errors: Sequence[str | None],
    signatures: Sequence[str | None],
) -> dict[str, object]:
    return {
        "handlers": _names(held),
        "reasons": list(reasons),
        "errors": list(errors),
        "signatures": list(signatures),
    }


def _names(held: Sequence[Delivery]) -> list[str]:
    return [each.handler.name for each in held]


def _intervals(delays: Iterable[float]) -> list[timedelta]:
    return [timedelta(seconds=delay) for delay in delays]
