"""Dead letters: what failed, why, since when and how much.

Nothing here reads delivered rows. Counts end at a limit: one that equals it means "or more".
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.errors import ConfigurationError
from holdfast.operator import arguments
from holdfast.operator.selection import Selection
from holdfast.operator.session import Operator

MOST = 100_000
MOST_GROUPS = 500
LONGEST_PAGE = 1_000
ERROR_LENGTH = 500


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """A dead letter. `id` is its row, one for each handler; `event_id` is what producers and handlers know."""

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
    first_failed_at: datetime | None
    failed_at: datetime
    occurred_at: datetime
    channel: str
    generation: int
    cycles: int  # how often it was replayed
    payload: Any = None  # only when it was asked for, like the headers
    headers: Any = None


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

    @property
    def name(self) -> str:
        """How other verbs are told which group is meant."""
        return f"{self.handler_name}/{self.signature}"


@dataclass(frozen=True, slots=True)
class FailureGroups:
    """The groups, the largest first. When `examined` equals `limit`, only that many of the newest were looked at."""

    groups: list[FailureGroup]
    examined: int
    limit: int = MOST

    @property
    def is_more(self) -> bool:
        return self.examined >= self.limit


EVERYTHING = Selection()


async def page(
    operator: Operator,
    selection: Selection = EVERYTHING,
    *,
    limit: int = 50,
    before: FailedEvent | None = None,
    payload: bool = False,
) -> list[FailedEvent]:
    """Dead letters, the newest first; `before` is the last one of the page before."""
    arguments.whole("limit", limit, 1, LONGEST_PAGE)
    async with operator.reading():
        rows = await operator.fetch(
            "list_failed",
            filter=selection.as_json(),
            most=limit,
            before_at=before and before.failed_at,
            before_id=before and before.id,
            error_length=ERROR_LENGTH,
            payload=payload,
        )
    return [_event(row) for row in rows]


async def pages(
    operator: Operator, selection: Selection = EVERYTHING, *, payload: bool = False
) -> AsyncIterator[FailedEvent]:
    """All of them, a page at a time: a look that takes minutes must not hold a snapshot as long."""
    last: FailedEvent | None = None
    while found := await page(operator, selection, limit=500, before=last, payload=payload):
        for event in found:
            yield event
        last = found[-1]


async def groups(operator: Operator, selection: Selection = EVERYTHING) -> FailureGroups:
    """Dead letters by handler and cause."""
    async with operator.reading():
        rows = await operator.fetch(
            "list_failure_groups",
            filter=selection.as_json(),
            most=MOST,
            most_groups=MOST_GROUPS,
            error_length=ERROR_LENGTH,
        )
    return grouped(rows)


def grouped(rows: list[asyncpg.Record]) -> FailureGroups:
    examined = rows[0]["examined"] if rows else 0
    fields = FailureGroup.__dataclass_fields__
    return FailureGroups([FailureGroup(**{name: row[name] for name in fields}) for row in rows], examined)


async def select(operator: Operator, selection: Selection, *, most: int = arguments.MOST_AT_ONCE) -> list[UUID]:
    """The ids that a selection means now, the newest first. An error when it means none."""
    async with operator.reading():
        rows = await operator.fetch("select_failed", filter=selection.required().as_json(), most=most)
    if not rows:
        raise ConfigurationError(
            "selection", f"matches no failed event: {selection}", "holdfast failed groups shows what there is"
        )
    return [row["id"] for row in rows]


async def resolve(operator: Operator, ids: Iterable[UUID | str]) -> list[UUID]:
    """The rows that ids mean. An event's own id stands for its deliveries that failed; an unknown one is an error."""
    asked = arguments.ids(ids)
    async with operator.reading():
        rows = await operator.fetch("resolve_rows", ids=asked)
    unknown = sorted({str(row["asked"]) for row in rows if row["row_id"] is None})
    if unknown:
        others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ConfigurationError(
            "ids",
            f"name no event, or one without a failed delivery: {unknown[0]}{others}",
            "holdfast failed list has them",
        )
    return list(dict.fromkeys(row["row_id"] for row in rows))


def _event(row: asyncpg.Record) -> FailedEvent:
    parsed = {name: None if row[name] is None else json.loads(row[name]) for name in ("payload", "headers")}
    return FailedEvent(**(dict(row) | parsed))
