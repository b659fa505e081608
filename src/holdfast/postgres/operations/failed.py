"""Dead letters in the outbox: listing, grouping, selecting and changing them.

Nothing here reads delivered rows. Counts end at a limit: one that equals it means "or more".
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import asyncpg

from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.excerpt import Excerpt
from holdfast.postgres.operations.outcomes import Outcomes
from holdfast.stored_json import decode

MOST = 100_000
MOST_GROUPS = 500
ERROR_LENGTH = 500


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """A failed delivery. `id` is its row, one for each handler; `event_id` is what producers and handlers know."""

    id: UUID
    event_id: UUID
    event_type: str
    event_version: int
    source: str
    target: str | None
    handler_name: str
    failure_reason: str
    attempts: int
    error_signature: str | None
    last_error: str | None  # the first 500 characters
    raised_at: str | None  # file, line and function in the user's code
    first_failed_at: datetime | None
    failed_at: datetime
    discarded_at: datetime | None
    occurred_at: datetime
    channel: str
    generation: int
    cycles: int  # how often it was replayed
    payload: Any = None  # only on request, like the headers
    headers: Any = None


# What a delivery is that has not failed, or only by an operator's or the clock's decision.
NOT_FAILED: Final = ("pending", "in_flight", "delivered", "cancelled", "expired")


@dataclass(frozen=True, slots=True)
class NamedDelivery:
    """A delivery that an id stands for. `state` is a status of the outbox, archived, discarded, edited or stripped."""

    id: UUID
    state: str
    archive_id: int | None  # its number, if it is in the archive

    @property
    def has_failed(self) -> bool:
        return self.state not in NOT_FAILED


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failures of one handler with one cause."""

    handler_name: str
    signature: str
    count: int
    first_seen: datetime | None
    last_seen: datetime
    reasons: list[str]
    event_types: list[str]
    generations: list[int]
    sample_id: UUID  # the newest of them
    sample_error: str | None
    note: str | None
    noted_by: str | None
    noted_at: datetime | None
    raised_at: str | None = None  # where the newest of them was raised

    @property
    def name(self) -> str:
        """The group's name in other verbs."""
        return f"{self.handler_name}/{self.signature}"


@dataclass(frozen=True, slots=True)
class FailureGroups:
    """The groups, the largest first. When `examined` equals `limit`, only that many of the newest were examined."""

    groups: Excerpt[FailureGroup]
    examined: int
    limit: int = MOST

    @property
    def is_more(self) -> bool:
        return self.examined >= self.limit


@dataclass(frozen=True, slots=True)
class FailureHistogram:
    """How many dead letters of a group failed in each step of time, the oldest first."""

    handler_name: str
    signature: str
    counts: list[int]

    @property
    def name(self) -> str:
        """The group's name in other verbs."""
        return f"{self.handler_name}/{self.signature}"


@dataclass(frozen=True, slots=True)
class FailureHistograms:
    """When the dead letters of groups failed: from `since` on, in steps of so many seconds.

    When `examined` equals `limit`, only that many of the newest were examined, and early steps may be too low.
    """

    since: datetime
    step: float
    groups: list[FailureHistogram]
    examined: int
    limit: int = MOST

    @property
    def is_more(self) -> bool:
        return self.examined >= self.limit


async def page(
    statements: Statements, selection: str, *, limit: int, before: tuple[datetime, UUID] | None, payload: bool
) -> list[FailedEvent]:
    """Dead letters that a selection (JSON) matches, the newest first."""
    rows = await statements.fetch(
        "list_failed",
        filter=selection,
        most=limit,
        before_at=before and before[0],
        before_id=before and before[1],
        error_length=ERROR_LENGTH,
        payload=payload,
    )
    return [_event(row) for row in rows]


async def groups(statements: Statements, selection: str) -> FailureGroups:
    """Dead letters by handler and cause."""
    rows = await statements.fetch(
        "list_failure_groups", filter=selection, most=MOST, most_groups=MOST_GROUPS, error_length=ERROR_LENGTH
    )
    return grouped(rows)


async def histogram(
    statements: Statements, selection: dict[str, Any], *, hours: timedelta, steps: int
) -> FailureHistograms:
    """When the dead letters that a selection matches failed, by group."""
    since = await statements.value("read_time") - hours
    step = hours.total_seconds() / steps
    wanted = json.dumps(selection | {"since": since.isoformat()})
    values = {"filter": wanted, "since": since, "step": step, "most_examined": MOST}
    counts: dict[tuple[str, str], list[int]] = {}
    rows = await statements.fetch("count_failures_over_time", **values)
    for row in rows:
        of_group = counts.setdefault((row["handler_name"], row["signature"]), [0] * steps)
        of_group[min(max(row["step"], 0), steps - 1)] += row["count"]
    largest = sorted(counts.items(), key=lambda each: -sum(each[1]))[:MOST_GROUPS]
    groups = [FailureHistogram(*group, each) for group, each in largest]
    return FailureHistograms(since, step, groups, sum(row["count"] for row in rows))


def grouped(rows: list[asyncpg.Record]) -> FailureGroups:
    """Groups of the outbox or of the archive."""
    examined = rows[0]["examined"] if rows else 0
    fields = FailureGroup.__dataclass_fields__
    groups = (FailureGroup(**{name: row[name] for name in fields}) for row in rows)
    return FailureGroups(Excerpt(groups, rows[0]["total"] if rows else 0), examined)


async def select(statements: Statements, selection: str, *, most: int) -> list[UUID]:
    """Ids of the rows that a selection matches, the newest first."""
    return [row["id"] for row in await statements.fetch("select_failed", filter=selection, most=most)]


async def count_discarded(statements: Statements, *, most: int) -> int:
    """How many discarded rows can be restored, up to a limit."""
    return int(await statements.value("count_discarded", most=most))


async def resolve(statements: Statements, ids: list[UUID]) -> dict[UUID, list[NamedDelivery]]:
    """The deliveries that each id stands for, in the outbox and in the archive."""
    found: dict[UUID, list[NamedDelivery]] = {id: [] for id in ids}
    for row in await statements.fetch("resolve_rows", ids=ids):
        found[row["asked"]].append(NamedDelivery(row["row_id"], row["state"], row["archive_id"]))
    return found


async def replay(
    statements: Statements, ids: list[UUID], *, generation: int, actor: str, reason: str | None, force: bool
) -> Outcomes:
    """Put failed rows back to pending."""
    values = {"ids": ids, "new_generation": generation, "replayed_by": actor, "reason": reason, "force": force}
    return Outcomes.of(await statements.fetch("outbox_replay_many", **values))


async def discard(statements: Statements, ids: list[UUID], *, actor: str, reason: str | None) -> Outcomes:
    """Mark failed rows as discarded."""
    return Outcomes.of(await statements.fetch("outbox_discard", ids=ids, actor=actor, reason=reason))


async def restore(statements: Statements, ids: list[UUID], *, actor: str, reason: str | None) -> Outcomes:
    """Undo a discard."""
    return Outcomes.of(await statements.fetch("outbox_restore", ids=ids, actor=actor, reason=reason))


async def edit(
    statements: Statements, id: UUID, new_id: UUID, payload: str, *, generation: int, actor: str, reason: str | None
) -> str:
    """Publish a corrected event and discard the failed row; `moved`, or the state of a row that is not failed."""
    values = {"id": id, "new_id": new_id, "payload": payload, "new_generation": generation}
    return str(await statements.value("outbox_edit", **values, actor=actor, reason=reason))


async def handler_of(statements: Statements, id: UUID) -> str:
    """The handler that a row is owed to."""
    return str((await statements.row("read_handler", id=id))["handler_name"])


async def note(statements: Statements, handler: str, signature: str, text: str | None, *, actor: str) -> bool:
    """Set or remove the note of a group; whether it has one now."""
    return bool(await statements.value("failure_note", handler=handler, signature=signature, note=text, actor=actor))


async def counts_by_handler(statements: Statements, *, most: int) -> Iterable[tuple[str, int, int]]:
    """Failed rows: handler, generation and count."""
    rows = await statements.fetch("count_failed_by_handler", most=most)
    return [(row["handler_name"], row["generation"], row["count"]) for row in rows]


def _event(row: asyncpg.Record) -> FailedEvent:
    parsed = {name: None if row[name] is None else decode(row[name]) for name in ("payload", "headers")}
    return FailedEvent(**(dict(row) | parsed))
