"""`core.archive`: dead letters that workers with `dead_letters="archive"` have moved out of the outbox."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.failure import FailureCycle
from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.failed import ERROR_LENGTH, MOST, MOST_GROUPS, FailureGroups, grouped
from holdfast.postgres.operations.outcomes import Outcomes
from holdfast.stored_json import decode


@dataclass(frozen=True, slots=True)
class ArchivedEvent:
    """A dead letter in the archive. `original_id` is its id in the outbox, before the move and after a replay."""

    id: int
    original_id: UUID
    event_id: UUID
    event_type: str
    source: str
    target: str | None
    queue: str  # the handler that it was owed to
    failure_reason: str
    deliveries_count: int
    error_signature: str | None
    last_exception: str | None  # in a list the first 500 characters
    raised_at: str | None  # file, line and function in the user's code
    created_at: datetime
    failed_at: datetime
    channel: str
    generation: int
    deleted_at: datetime | None  # since when it is discarded


@dataclass(frozen=True, slots=True)
class ArchivedDetail(ArchivedEvent):
    """An archived event with all its columns."""

    traceback: str | None
    event_version: int
    occurred_at: datetime
    content_class: str
    domain_id: UUID | None
    idempotency_key: str
    trace_context: str | None
    first_failed_at: datetime | None
    failure_history: list[FailureCycle]
    payload: Any  # None unless requested, and when retention took it; like the headers
    headers: Any
    others: list[int]  # numbers of the event's other deliveries in the archive

    @property
    def group(self) -> str:
        """The name of its group in other verbs."""
        return f"{self.queue}/{self.error_signature or ''}"


async def page(
    statements: Statements, *, handler: str | None, discarded: bool, limit: int, before: int | None
) -> list[ArchivedEvent]:
    """Archived events, the newest first."""
    values = {"queue": handler, "discarded": discarded, "most": limit, "before": before}
    rows = await statements.fetch("list_archived", **values, error_length=ERROR_LENGTH)
    return [ArchivedEvent(**row) for row in rows]


async def groups(statements: Statements) -> FailureGroups:
    """Archived events by handler and cause."""
    return grouped(
        await statements.fetch("list_archive_groups", most=MOST, most_groups=MOST_GROUPS, error_length=ERROR_LENGTH)
    )


async def counts_by_handler(statements: Statements, handler: str | None = None) -> dict[str, int]:
    """How many rows are not discarded, by handler, up to a limit; with a handler only its own."""
    rows = await statements.fetch("count_archived_by_handler", queue=handler, most=MOST)
    return {row["handler_name"]: row["count"] for row in rows}


async def select(statements: Statements, handler: str, signature: str | None, *, most: int) -> list[int]:
    """Numbers of the rows of a handler, or of one of its groups, the newest first."""
    rows = await statements.fetch("select_archived", queue=handler, signature=signature, most=most)
    return [row["id"] for row in rows]


async def find(statements: Statements, ids: list[UUID], *, most: int) -> list[tuple[UUID, int | None]]:
    """Each id of an event or of a delivery with the number of an archived row; None when there is none."""
    return [(row["asked"], row["number"]) for row in await statements.fetch("find_archived", ids=ids, most=most)]


async def detail(statements: Statements, number: int, *, payload: bool) -> ArchivedDetail | None:
    """One row."""
    rows = await statements.fetch("read_archived", id=number)
    return _detail(rows[0], payload) if rows else None


async def replay(
    statements: Statements, numbers: list[int], *, generation: int, actor: str, reason: str | None, force: bool
) -> Outcomes:
    """Move rows back into the outbox, pending."""
    values = {"ids": numbers, "new_generation": generation, "replayed_by": actor, "reason": reason, "force": force}
    return Outcomes.of(sorted(await statements.fetch("archive_replay", **values), key=itemgetter("id")), "original_id")


async def discard(
    statements: Statements, numbers: list[int], *, restore: bool, actor: str, reason: str | None
) -> Outcomes:
    """Mark rows as discarded, or undo that."""
    values = {"ids": numbers, "restore": restore, "actor": actor, "reason": reason}
    return Outcomes.of(sorted(await statements.fetch("archive_discard", **values), key=itemgetter("id")), "original_id")


def _detail(row: asyncpg.Record, payload: bool) -> ArchivedDetail:
    found = dict(row)
    for name in ("payload", "headers"):
        found[name] = decode(row[name]) if payload and row[name] is not None else None
    found["failure_history"] = [FailureCycle.model_validate(cycle) for cycle in json.loads(row["failure_history"])]
    return ArchivedDetail(**found)
