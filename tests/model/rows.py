"""The outbox in Python: what every call must answer, and what it must leave in the tables.

It knows one client at a time and one open transaction of a handler, no plans, no indexes and no locks but that one.
Times are those of the database: what a call sets is `About` so many seconds after it, until the table says when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from tests.outbox import CHANNEL, InFlight, Lane

OPEN = ("pending", "in_flight")
NOT_FOR_PEOPLE = ("cancelled", "expired")  # settled, and in no dead-letter queue


@dataclass(frozen=True)
class About:
    """So many seconds after the call that set it."""

    seconds: float


@dataclass
class Row:
    """One row of core.outbox. The fields are the columns that snapshot.py reads."""

    id: UUID
    event_type: str
    source: str
    target: str | None
    idempotency_key: str
    dedupe_key: str | None
    priority: int
    expired: bool  # past its expiry
    available_at: datetime | About
    channel: str = CHANNEL
    generation: int = 0
    origin_id: UUID | None = None
    handler_name: str | None = None
    status: str = "pending"
    attempts: int = 0
    claimed_by: UUID | None = None
    lease_token: UUID | None = None
    lease_over: bool | None = None
    last_error: str | None = None
    failing: bool = False  # some attempt has failed
    failure_reason: str | None = None
    error_signature: str | None = None
    deleted: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    version: int | None = None  # xmin; None: written since the table was last read

    @property
    def route(self) -> str:
        return self.handler_name or f"{self.target or '*'}/{self.event_type}"

    @property
    def open(self) -> bool:
        return self.status in OPEN

    @property
    def place(self) -> tuple[datetime, UUID]:
        assert isinstance(self.available_at, datetime)
        return self.available_at, self.id

    def write(self, **columns: Any) -> None:
        for name, value in columns.items():
            setattr(self, name, value)
        self.version = None

    def settle(self, status: str, **columns: Any) -> None:
        self.write(status=status, lease_token=None, lease_over=None, **columns)

    def learn(self, found: Mapping[str, Any], since: datetime, until: datetime) -> None:
        """Take over what only the database knows: when it wrote, and the row's new version."""
        if isinstance(self.available_at, About):
            at = found["available_at"]
            assert since <= at - timedelta(seconds=self.available_at.seconds) <= until, (
                f"{self.id} is available at {at}, which is not {self.available_at} between {since} and {until}"
            )
            self.available_at = at
        if self.version is None:
            self.version = found["version"]


class Running(NamedTuple):
    """A handler's open transaction: it holds its row, and perhaps an inbox row that nobody sees yet."""

    held: InFlight
    first: bool


class Model:
    """Rows by id, the inbox, and what stands around them."""

    def __init__(self, now: datetime, secret: bytes) -> None:
        self.now = now  # when the tables were last read
        self.secret = secret  # of the schema: it enters the ids of siblings
        self.rows: dict[UUID, Row] = {}
        self.inbox: set[tuple[str, str]] = set()
        self.effects: list[tuple[str, str]] = []
        self.keys: dict[tuple[str, str], UUID] = {}
        self.to_cancel: set[UUID] = set()
        self.interest: dict[tuple[str, str], bool] = {}  # handler, event type: not retired
        self.subscriptions_version = 1
        self.running: Running | None = None

    # --- what a call finds ---

    def under(self, held: InFlight) -> Row | None:
        """The row, if the token is the one it is leased under."""
        row = self.rows.get(held.id)
        return row if row and row.status == "in_flight" and row.lease_token == held.token else None

    def locked(self, row: Row) -> bool:
        return self.running is not None and self.running.held.id == row.id

    def waits(self, held: InFlight) -> bool:
        """Whether a settle might wait for the handler's transaction: for its row, or for its inbox row."""
        row = self.under(held)
        if row is None or self.running is None:
            return False
        mine = self.rows[self.running.held.id]
        return row is mine or (self.running.first and row.idempotency_key == mine.idempotency_key)

    def handled(self, held: InFlight) -> bool:
        row = self.rows.get(held.id)
        return row is not None and (row.handler_name or held.handler, row.idempotency_key) in self.inbox

    def _due(self, lanes: Sequence[Lane], channel: str, generation: int) -> Iterator[tuple[Lane, list[Row]]]:
        for lane in lanes:
            waiting = [
                row
                for row in self.rows.values()
                if row.open
                and (row.channel, row.generation) == (channel, generation)
                and (row.route, row.priority) == (lane.route, lane.priority)
                and row.place >= lane.mark
                and row.place[0] <= self.now
                and (row.status == "pending" or row.lease_over)
                and not self.locked(row)
            ]
            yield lane, sorted(waiting, key=lambda row: row.place)[: lane.limit]

    def _subscribers(self, row: Row) -> set[str]:
        return {
            handler
            for (handler, kind), wanted in self.interest.items()
            if wanted
            and (row.event_type == kind or (kind.endswith("*") and row.event_type.startswith(kind[:-1])))
            and row.target in (None, handler.partition(".")[0])
        }

    # --- producers ---

    def publish(self, row: Row) -> None:
        self.rows[row.id] = row

    def hold_key(self, row: Row, reschedule: bool) -> UUID:
        """Which event holds the key: a pending one that is there, or the new one, which is published."""
        assert row.dedupe_key is not None
        key = row.source, row.dedupe_key
        holder = self.rows.get(self.keys.get(key, row.id))
        if holder is not None and holder.status == "pending":
            if reschedule:
                holder.write(available_at=row.available_at)
            return holder.id
        self.keys[key] = row.id
        self.publish(row)
        return row.id

    def _pending_holder(self, source: str, key: str) -> Row | None:
        row = self.rows.get(self.keys.get((source, key), UUID(int=0)))
        return row if row is not None and row.status == "pending" else None

    def cancel(self, source: str, key: str) -> bool:
        row = self._pending_holder(source, key)
        if row is None:
            return False
        row.settle("failed", failure_reason="cancelled", deleted=True, last_error="cancelled by its producer")
        del self.keys[source, key]
        return True

    def reschedule(self, source: str, key: str, delay: float) -> bool:
        row = self._pending_holder(source, key)
        if row is not None:
            row.write(available_at=About(delay))
        return row is not None

    # --- interest ---

    def subscribe(self, handler: str, kinds: Iterable[str]) -> None:
        wanted = {(handler, kind): True for kind in kinds}
        if not all(self.interest.get(each) for each in wanted):
            self.subscriptions_version += 1
            self.interest |= wanted

    def retire(self, handler: str, kind: str | None) -> int:
        ended = [each for each, wanted in self.interest.items() if wanted and each[0] == handler]
        ended = [each for each in ended if kind in (None, each[1])]
        self.interest |= dict.fromkeys(ended, False)
        self.subscriptions_version += bool(ended)
        return len(ended)

    def split(
        self, lanes: Sequence[Lane], channel: str, generation: int
    ) -> dict[tuple[str, int], tuple[int, datetime, UUID]]:
        """For each lane how many events were found, and where the first lies."""
        finds = {}
        for lane, origins in list(self._due(lanes, channel, generation)):
            if origins:
                finds[lane.route, lane.priority] = (len(origins), *origins[0].place)
            for origin in origins:
                owed = self._subscribers(origin)
                for handler in sorted(owed):
                    sibling = _sibling(origin, handler, self.secret)
                    self.rows[sibling.id] = sibling
                if owed:
                    origin.settle("delivered", handler_name="*", claimed_by=None)
        return finds

    # --- workers ---

    def claim(
        self, lanes: Sequence[Lane], token: UUID, worker: UUID, channel: str, generation: int
    ) -> dict[UUID, dict[str, Any]]:
        """The rows that are claimed, with what the claim says about them."""
        handlers = {lane.route: lane.handler for lane in reversed(lanes)}
        claimed = {}
        for row in [row for _, rows in self._due(lanes, channel, generation) for row in rows]:
            row.write(
                status="in_flight", attempts=row.attempts + 1, claimed_by=worker, lease_token=token, lease_over=False
            )
            claimed[row.id] = {
                "route": row.route,
                "priority": row.priority,
                "available_at": row.available_at,
                "origin_id": row.origin_id,
                "event_type": row.event_type,
                "idempotency_key": row.idempotency_key,
                "attempts": row.attempts,
                "failing": row.failing,
                "expired": row.expired,
                "cancelled": row.id in self.to_cancel,
                "handled": (handlers[row.route], row.idempotency_key) in self.inbox,
            }
        return claimed

    def extend(self, held: Sequence[InFlight]) -> list[UUID]:
        lost = []
        for each in held:
            row = self.under(each)
            if row is not None and not self.locked(row):
                row.write(lease_over=False)
            if row is None or row.id in self.to_cancel:
                lost.append(each.id)
        return lost

    def deliver(self, held: Sequence[InFlight], *, record: bool) -> list[UUID]:
        settled = [(row, each) for each in held if (row := self.under(each)) is not None]
        for row, each in settled:
            row.settle("delivered", handler_name=row.handler_name or each.handler)
            if record:
                self.inbox.add((str(row.handler_name), row.idempotency_key))
        return _lost(held, [row for row, _ in settled])

    def delivered(self, *, deleted: bool) -> list[Row]:
        return [row for row in self.rows.values() if row.status == "delivered" and row.deleted is deleted]

    def tombstone(self) -> int:
        """Retention of what was delivered before this moment; nothing else is its business."""
        due = self.delivered(deleted=False)
        for row in due:
            row.write(deleted=True)
        return len(due)

    def dispose(self) -> int:
        """Retention of tombstones whose grace is over. The inbox stays."""
        due = self.delivered(deleted=True)
        for row in due:
            del self.rows[row.id]
            self.to_cancel.discard(row.id)
        return len(due)

    def retry(self, held: Sequence[InFlight], delay: float, error: str) -> list[UUID]:
        settled = [(row, each) for each in held if (row := self.under(each)) is not None]
        for row, each in settled:
            row.settle(
                "pending",
                available_at=About(delay),
                last_error=error,
                failing=True,
                handler_name=each.handler,
                claimed_by=None,
            )
        return _lost(held, [row for row, _ in settled])

    def fail(
        self, held: Sequence[InFlight], reasons: Sequence[str], error: str | None, signature: str | None
    ) -> list[UUID]:
        leases = zip(held, reasons, strict=True)
        settled = [(row, each, reason) for each, reason in leases if (row := self.under(each)) is not None]
        for row, each, reason in settled:
            row.settle(
                "failed",
                failure_reason=reason,
                last_error=error or row.last_error,
                error_signature=signature,
                failing=True,
                deleted=reason in NOT_FOR_PEOPLE,
                handler_name=each.handler,
            )
            self.to_cancel.discard(row.id)
        return _lost(held, [row for row, _, _ in settled])

    def release(self, held: Sequence[InFlight], delay: float) -> list[UUID]:
        settled = {row.id: row for row in map(self.under, held) if row is not None}
        for row in settled.values():
            row.settle(
                "pending",
                attempts=row.attempts - 1,
                available_at=About(delay) if delay else row.available_at,
                claimed_by=row.claimed_by if delay else None,
            )
        return _lost(held, settled.values())

    # --- a handler's transaction ---

    def enter(self, held: InFlight) -> str:
        row = self.under(held)
        if row is None:
            return "lost"
        first = (held.handler, row.idempotency_key) not in self.inbox
        self.running = Running(held, first)
        return "run" if first else "duplicate"

    def leave(self, *, commit: bool) -> None:
        """The transaction ends. Without a commit it was never there."""
        assert self.running is not None
        (held, first), self.running = self.running, None
        if commit:
            row = self.rows[held.id]
            row.settle("delivered", handler_name=held.handler)
            self.inbox.add((held.handler, row.idempotency_key))
            if first:
                self.effects.append((held.handler, row.idempotency_key))

    # --- people ---

    def _deliveries(self, id: UUID) -> list[Row]:
        """What an id stands for: a delivery that was split off, or all deliveries of an event."""
        return [row for row in self.rows.values() if id in (row.id, row.origin_id)]

    def replay(self, id: UUID, generation: int, by: str) -> int:
        failed = [row for row in self._deliveries(id) if row.status == "failed" and not row.deleted]
        for row in failed:
            self._replay(row, generation, by)
        return len(failed)

    def _replay(self, row: Row, generation: int, by: str) -> None:
        cycle = {
            "attempts": row.attempts,
            "last_error": row.last_error,
            "raised_at": None,  # the machine's errors have no traceback
            "failure_reason": row.failure_reason,
            "generation": row.generation,
            "replayed_by": by,
        }
        row.settle(
            "pending",
            history=[*row.history, cycle],
            attempts=0,
            last_error=None,
            failing=False,
            failure_reason=None,
            error_signature=None,
            claimed_by=None,
            expired=False,  # whoever replays an event has decided that it runs now
            generation=generation,
            channel=CHANNEL if generation == 0 else f"outbox_gen_{generation}",
            available_at=About(0),
        )
        self.to_cancel.discard(row.id)  # whoever replays an event wants it to run

    def cancel_event(self, id: UUID, by: str) -> int:
        still_open = [row for row in self._deliveries(id) if row.open]
        for row in still_open:
            if self.locked(row):
                self.to_cancel.add(row.id)
            else:
                row.settle("failed", failure_reason="cancelled", deleted=True, last_error=f"cancelled by {by}")
        return len(still_open)


def _lost(held: Iterable[InFlight], settled: Iterable[Row]) -> list[UUID]:
    """What a settle answers: the ids under whose lease nothing was settled."""
    done = {row.id for row in settled}
    return [each.id for each in held if each.id not in done]


def _sibling(origin: Row, handler: str, secret: bytes) -> Row:
    digest = hashlib.sha256(secret + f"{origin.id}/{handler}".encode()).hexdigest()
    variant = "89ab"[int(digest[3:5], 16) & 3]
    return replace(
        origin,
        id=UUID(f"{str(origin.id)[:13]}-7{digest[:3]}-{variant}{digest[5:8]}-{digest[8:20]}"),
        origin_id=origin.id,
        handler_name=handler,
        dedupe_key=None,
        status="pending",
        attempts=0,
        claimed_by=None,
        lease_token=None,
        lease_over=None,
        last_error=None,
        failing=False,
        history=[],
        version=None,
    )
