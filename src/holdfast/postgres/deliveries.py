"""What a worker sends to the outbox: claim, split, extend, settle. One method calls one function of the same name.

`claim` calls `core.outbox_claim`, which stands with its reasons in `sql/functions/claim.sql`; those that end a lease
stand in `sql/functions/settle.sql`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple
from uuid import UUID

import asyncpg

from holdfast.handlers import Handler
from holdfast.ids import uuid7
from holdfast.postgres.clock import DatabaseClock, steady
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.keyed import Kind
from holdfast.postgres.statements import NamedStatements
from holdfast.postgres.subscriptions import SubscriptionsChanged
from holdfast.retention import RetentionPolicies

_REPAIR_BATCH = 5_000
# Of routes: how many a page has, and how many are looked at for it.
_PAGE = 128
_PAGE_STEPS = 1_000
NO_MARK = (datetime(1, 1, 2, tzinfo=UTC), UUID(int=0))


@dataclass(frozen=True, slots=True)
class LaneClaim:
    """One lane of a claim: at most `limit` rows at or after `mark`, for one handler."""

    route: str
    priority: int
    handler: Handler
    limit: int
    mark: tuple[datetime, UUID]


@dataclass(frozen=True, slots=True)
class LaneFind:
    """What a split found in a lane: how many rows, and the position of the first of them."""

    route: str
    priority: int
    count: int
    first: tuple[datetime, UUID]


class Ended(NamedTuple):
    """A session that was ended because its worker is silent."""

    worker: UUID
    session: str


@dataclass(frozen=True, slots=True)
class RoutePage:
    """Routes that have open rows. The next page begins after `after`; empty when this is the last.

    A page of `every` route has those that are due soon as well; another one only the first of these, as its last.
    """

    routes: list[str]
    after: str
    every: bool


# The range in which all routes lie: its beginning, and its end.
EVERY_ROUTE = [""], ["\U0010ffff"]


class Deliveries:
    """The statements of one worker. Every method takes the connection it runs on.

    A method that takes a batch of deliveries returns the ids whose lease is lost; nothing is changed for those.
    """

    def __init__(self, statements: NamedStatements, *, worker: UUID, generation: int, lease: float) -> None:
        self._fetch = statements.fetch
        self._filled_in = statements.filled_in
        self._partly_filled_in = statements.partly_filled_in
        # What `entering` says for each handler; only the ids are missing.
        self._entering: dict[tuple[str, float, bool], str] = {}
        self._worker = worker
        self._generation = generation
        self._lease = timedelta(seconds=lease)
        self.clock = DatabaseClock(lease)
        self._deletes_delivered = False

    @property
    def deletes_delivered(self) -> bool:
        """Whether some rows are deleted with their delivery."""
        return self._deletes_delivered

    def follow(self, policies: RetentionPolicies) -> None:
        """Delete rows with their delivery where the retention policies keep no delivered rows of some content class."""
        self._deletes_delivered = any(
            policy.deletes_at_once for (entity, _), policy in policies.items() if entity == "outbox_row"
        )

    async def claim(
        self,
        connection: asyncpg.Connection,
        subscriptions: int,
        channel: str,
        lanes: Sequence[LaneClaim],
        keyed: bool = False,
    ) -> tuple[list[Delivery], Kind]:
        """Lease what is due under a new token, and return it, the most urgent first; with `keyed`, also what has a key.

        Raises SubscriptionsChanged when the subscriptions are no longer at the version that is passed.
        """
        token = uuid7()  # which says when the rows were claimed
        records = await self._fetch(
            connection,
            "outbox_claim",
            worker=self._worker,
            token=token,
            lease=self._lease,
            subscriptions_version=subscriptions,
            channel=channel,
            generation=self._generation,
            handlers=[lane.handler.name for lane in lanes],
            ended_before=self.clock.ended_before(),
            keyed=keyed,
            **_columns(lanes),
        )
        kind: Kind = ""
        if records and records[-1]["id"] is None:
            kind = records.pop()["route"] or ""
            if not kind:
                raise SubscriptionsChanged
        now, handlers = time.monotonic(), {lane.route: lane.handler for lane in lanes}
        claimed = [Delivery(record, token, handlers, now) for record in records]
        claimed.sort(key=_urgency)
        return claimed, kind

    async def split(
        self, connection: asyncpg.Connection, subscriptions: int, channel: str, lanes: Sequence[LaneClaim]
    ) -> list[LaneFind]:
        """Split the events that several handlers want, and return how much was found in which lane.

        Raises SubscriptionsChanged like `claim`.
        """
        rows = await self._fetch(
            connection,
            "outbox_split",
            subscriptions_version=subscriptions,
            channel=channel,
            generation=self._generation,
            ended_before=self.clock.ended_before(),
            **_columns(lanes),
        )
        if rows and rows[0]["route"] is None:
            raise SubscriptionsChanged
        return [LaneFind(row["route"], row["priority"], row["n"], (row["first_at"], row["first_id"])) for row in rows]

    async def extend(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> list[UUID]:
        """Extend the leases. An event that is to be cancelled counts as lost."""
        rows = await self._fetch(connection, "outbox_extend", **_fence(batch), lease=self._lease)
        return [row[0] for row in rows]

    async def alive(self, connection: asyncpg.Connection) -> None:
        """Extend the worker's own lease, and look at the database's clock."""
        asked = steady()
        (row,) = await self._fetch(connection, "worker_alive", id=self._worker, lease=self._lease)
        self.clock.observe(row["clock"], asked, steady(), row["longest_lease"])

    async def end_silent_sessions(self, connection: asyncpg.Connection) -> list[Ended]:
        """End sessions of workers whose lease has expired, if they hold a transaction and wait for their client."""
        rows = await self._fetch(connection, "end_silent_sessions", ended_before=self.clock.ended_before())
        return [Ended(row["worker"], row["application_name"]) for row in rows if row["ended"]]

    async def unrecorded_step(self, connection: asyncpg.Connection) -> float | None:
        """Return the step back, in seconds, that heartbeats show and no worker has reported, such as one made while
        none lived."""
        step: float | None = (await self._fetch(connection, "clock_unrecorded"))[0][0]
        return step

    async def repair_clock(self, connection: asyncpg.Connection, step: float) -> int:
        """Report a step of the database's clock, and repair the times that it left in the future; how many rows."""
        values = {"worker": self._worker, "by": timedelta(seconds=step), "lease": self._lease}
        await self._fetch(connection, "clock_stepped", **values)
        repaired = 0
        while step < 0 and (count := (await self._fetch(connection, "clock_repair", most=_REPAIR_BATCH))[0][0]):
            repaired += count
        return repaired

    async def blocked(
        self, connection: asyncpg.Connection, batch: Sequence[Delivery], *, record: bool, delete: bool = False
    ) -> list[UUID]:
        """Return the ids of rows that another session keeps from being settled, with an inbox row or by a deletion."""
        rows = await self._fetch(
            connection, "outbox_blocked", **_fence(batch), handlers=_names(batch), record=record, delete=delete
        )
        return [row[0] for row in rows]

    async def deliver(
        self,
        connection: asyncpg.Connection,
        batch: Sequence[Delivery],
        outcome: Literal["delivered", "duplicate"],
        *,
        record: bool,
        delete: bool = True,
    ) -> list[UUID]:
        """Settle deliveries as delivered and, with `record`, write the inbox. `outcome` is what they are counted as.

        Without `delete`, rows that the retention policies do not keep are left to the next sweep.
        """
        # The route of an event that was not split does not name its handler.
        handlers = {each.route: each.handler.name for each in batch}
        if len(handlers) < len({(each.route, each.handler.name) for each in batch}):
            # The subscriptions have changed in between: the batch is settled handler by handler, or not at all.
            async with connection.transaction():
                by_name = attrgetter("handler.name")
                groups = [list(some) for _, some in groupby(sorted(batch, key=by_name), by_name)]
                return [
                    lost
                    for some in groups
                    for lost in await self.deliver(connection, some, outcome, record=record, delete=delete)
                ]
        rows = await self._fetch(
            connection,
            "outbox_deliver_and_delete" if delete and self._deletes_delivered else "outbox_deliver",
            **_fence(batch),
            routes=list(handlers),
            handlers=list(handlers.values()),
            record=record,
            outcome=outcome,
        )
        return [row[0] for row in rows]

    async def retry(
        self,
        connection: asyncpg.Connection,
        batch: Sequence[Delivery],
        delays: Iterable[float],
        errors: Sequence[str],
    ) -> list[UUID]:
        """Make deliveries due again after their delays, each with the error of the attempt."""
        rows = await self._fetch(
            connection,
            "outbox_retry",
            **_fence(batch),
            handlers=_names(batch),
            delays=_intervals(delays),
            errors=list(errors),
        )
        return [row[0] for row in rows]

    async def fail(
        self,
        connection: asyncpg.Connection,
        batch: Sequence[Delivery],
        reasons: Sequence[str],
        errors: Sequence[str | None],
        signatures: Sequence[str | None],
    ) -> list[UUID]:
        """Make deliveries dead letters, in place."""
        rows = await self._fetch(
            connection, "outbox_fail", **_fence(batch), **_failures(batch, reasons, errors, signatures)
        )
        return [row[0] for row in rows]

    async def archive(
        self,
        connection: asyncpg.Connection,
        batch: Sequence[Delivery],
        reasons: Sequence[str],
        errors: Sequence[str | None],
        signatures: Sequence[str | None],
    ) -> list[UUID]:
        """Make deliveries dead letters, moved to the archive."""
        rows = await self._fetch(
            connection, "outbox_archive", **_fence(batch), **_failures(batch, reasons, errors, signatures)
        )
        return [row[0] for row in rows]

    async def release(
        self, connection: asyncpg.Connection, batch: Sequence[Delivery], delays: Iterable[float]
    ) -> list[UUID]:
        """Give deliveries back without counting the attempt; a delay above zero is a snooze."""
        rows = await self._fetch(
            connection, "outbox_release", **_fence(batch), delays=_intervals(delays), handlers=_names(batch)
        )
        return [row[0] for row in rows]

    async def enter(self, connection: asyncpg.Connection, look: bool, *, delivery: Delivery, idle: float) -> str | None:
        """Settle the row and write the inbox, as the first statement of a transactional handler.

        Returns `run`, `duplicate` when the handler has handled the event already, or `lost` for the lease. None: with
        `look`, another handler has left prepared statements or channels in the session.
        """
        rows = await self._fetch(
            connection,
            "enter_handler" if look else "outbox_enter",
            id=delivery.id,
            token=delivery.token,
            handler=delivery.handler.name,
            idle=timedelta(seconds=idle),
        )
        entered: str | None = rows[0][0]
        return entered

    async def enter_batch(
        self, connection: asyncpg.Connection, look: bool, *, batch: Sequence[Delivery], idle: float
    ) -> list[str] | None:
        """Do what `enter` does for several deliveries of one handler; the answer for each, in their order."""
        rows = await self._fetch(
            connection,
            "enter_batch" if look else "outbox_enter_batch",
            **_fence(batch),
            handler=batch[0].handler.name,
            idle=timedelta(seconds=idle),
        )
        return None if rows[0][0] is None else list(rows[0][0])

    async def reopen_batch(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> bool:
        """Undo `enter_batch` for some of its deliveries; False when this transaction has not entered one of them."""
        routes = [each.route for each in batch]
        rows = await self._fetch(
            connection, "reopen_batch", **_fence(batch), handler=batch[0].handler.name, routes=routes
        )
        return not rows

    async def delete_delivered_batch(self, connection: asyncpg.Connection, batch: Sequence[Delivery]) -> None:
        """Do what `delete_delivered` does for several deliveries of one handler."""
        if self._deletes_delivered and batch:
            values = {"ids": [each.id for each in batch], "handler": batch[0].handler.name}
            await self._fetch(connection, "delete_delivered_batch", **values)

    def entering(self, delivery: Delivery, idle: float, look: bool) -> str:
        """Return the statement of `enter` with its values, for a message of several. What is not `run` is an error."""
        common = delivery.handler.name, idle, look
        if (entering := self._entering.get(common)) is None:
            handler, seconds = delivery.handler.name, f"{idle} s"
            entering = self._partly_filled_in("enter_at_once", {"handler": handler, "idle": seconds, "look": look})
            self._entering[common] = entering
        return entering % {"id": delivery.id, "token": delivery.token}

    async def reopen(self, connection: asyncpg.Connection, delivery: Delivery) -> bool:
        """Undo `enter` after a failure, in the same transaction; False when that transaction has not entered."""
        rows = await self._fetch(
            connection,
            "outbox_reopen",
            id=delivery.id,
            token=delivery.token,
            handler=delivery.handler.name,
            route=delivery.route,
        )
        return bool(rows[0][0])

    def has_committed(self, delivery: Delivery, entered: str) -> bool:
        """Whether a transaction is committed, by what entering it again says: then the row is not this worker's."""
        return entered == "lost"

    def retrying(self, delivery: Delivery, delay: float, error: str) -> str | None:
        """Return a retry of what the transaction has entered, with its values, for a message of several.

        When the transaction has not entered it is an error. None: it takes more than one statement.
        """
        return self._filled_in(
            "retry_entered",
            {
                "id": delivery.id,
                "handler": delivery.handler.name,
                "delay": f"{delay:.6f} s",
                "error": error.encode().hex(),
            },
        )

    async def delete_delivered(self, connection: asyncpg.Connection, delivery: Delivery) -> None:
        """Delete the row that `enter` has settled, as the last statement of its transaction, if it is not kept."""
        if self._deletes_delivered:
            values = {"id": delivery.id, "handler": delivery.handler.name}
            await self._fetch(connection, "outbox_delete_delivered", **values)

    async def due_in(
        self, connection: asyncpg.Connection, channel: str, lanes: Sequence[tuple[str, int]], since: float
    ) -> float | None:
        """Seconds until the first delayed row of the lanes is due; None without one.

        `since` is the time since the last claim began, in seconds: for a row that became due after that and was not
        claimed the result is negative.
        """
        rows = await self._fetch(
            connection,
            "outbox_due_in",
            channel=channel,
            generation=self._generation,
            routes=[route for route, _ in lanes],
            priorities=[priority for _, priority in lanes],
            since=timedelta(seconds=since),
        )
        value = rows[0][0]
        return None if value is None else float(value)

    async def routes(self, connection: asyncpg.Connection, channel: str) -> list[str]:
        """Return the routes that have open rows on a channel."""
        rows = await self._fetch(connection, "outbox_routes", channel=channel, generation=self._generation)
        return [row[0] for row in rows]

    async def routes_within(
        self, connection: asyncpg.Connection, channel: str, ranges: tuple[list[str], list[str]], after: str
    ) -> RoutePage:
        """Return a page of the routes that have open rows and lie in the ranges: their beginnings, and their ends."""
        every = ranges is EVERY_ROUTE
        rows = await self._fetch(
            connection,
            "outbox_routes_within",
            channel=channel,
            generation=self._generation,
            begins=ranges[0],
            ends=ranges[1],
            after=after,
            most=_PAGE,
            most_steps=_PAGE_STEPS,
            only_next=not every,
        )
        stopped = bool(rows) and not rows[-1]["within"]
        return RoutePage([row["route"] for row in rows if row["within"]], rows[-1]["route"] if stopped else "", every)


_urgency = attrgetter("priority", "available_at", "id")


def _columns(lanes: Sequence[LaneClaim]) -> dict[str, object]:
    return {
        "routes": [lane.route for lane in lanes],
        "priorities": [lane.priority for lane in lanes],
        "limits": [lane.limit for lane in lanes],
        "marks_at": [lane.mark[0] for lane in lanes],
        "marks_id": [lane.mark[1] for lane in lanes],
    }


def _fence(batch: Sequence[Delivery]) -> dict[str, object]:
    return {"ids": [each.id for each in batch], "tokens": [each.token for each in batch]}


def _failures(
    batch: Sequence[Delivery],
    reasons: Sequence[str],
    errors: Sequence[str | None],
    signatures: Sequence[str | None],
) -> dict[str, object]:
    return {
        "handlers": _names(batch),
        "reasons": list(reasons),
        "errors": list(errors),
        "signatures": list(signatures),
    }


def _names(batch: Sequence[Delivery]) -> list[str]:
    return [each.handler.name for each in batch]


def _intervals(delays: Iterable[float]) -> list[timedelta]:
    return [timedelta(seconds=delay) for delay in delays]
