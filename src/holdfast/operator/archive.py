"""The archive: dead letters that workers with `dead_letters="archive"` have moved out of the outbox.

A row of it has a number of its own; the verbs take that, or the id of an event or of a delivery.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.errors import ConfigurationError
from holdfast.failure import FailureCycle
from holdfast.operator import arguments
from holdfast.operator.actions import Moved
from holdfast.operator.failures import MOST, MOST_GROUPS, FailureGroups, grouped
from holdfast.operator.selection import Selection
from holdfast.operator.session import Operator, Refused

LONGEST_PAGE = 1_000
ERROR_LENGTH = 500


@dataclass(frozen=True, slots=True)
class ArchivedEvent:
    """A dead letter in the archive. `original_id` was its row in the outbox, and will be again."""

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
    created_at: datetime
    failed_at: datetime
    channel: str
    generation: int
    deleted_at: datetime | None  # since when it is set aside


@dataclass(frozen=True, slots=True)
class ArchivedDetail(ArchivedEvent):
    """Everything that is known of it."""

    event_version: int
    occurred_at: datetime
    content_class: str
    domain_id: UUID | None
    idempotency_key: str
    trace_context: str | None
    first_failed_at: datetime | None
    failure_history: list[FailureCycle]
    payload: Any  # None when it was not asked for, or retention took it; like the headers
    headers: Any


async def page(
    operator: Operator,
    *,
    handler: str | None = None,
    discarded: bool = False,
    limit: int = 50,
    before: int | None = None,
) -> list[ArchivedEvent]:
    """The newest first; `before` is the number of the last one of the page before."""
    arguments.whole("limit", limit, 1, LONGEST_PAGE)
    async with operator.reading():
        rows = await operator.fetch(
            "list_archived",
            queue=None if handler is None else arguments.handler(handler),
            discarded=discarded,
            most=limit,
            before=None if before is None else arguments.whole("before", before),
            error_length=ERROR_LENGTH,
        )
    return [ArchivedEvent(**row) for row in rows]


async def groups(operator: Operator) -> FailureGroups:
    """By handler and cause, as dead letters are."""
    async with operator.reading():
        rows = await operator.fetch(
            "list_archive_groups", most=MOST, most_groups=MOST_GROUPS, error_length=ERROR_LENGTH
        )
    return grouped(rows)


async def select(operator: Operator, group: str) -> list[int]:
    """Numbers of the archived rows of a group, which is written as handler/signature; the newest first."""
    meant = Selection.group(group)
    async with operator.reading():
        rows = await operator.fetch(
            "select_archived", queue=meant.handler, signature=meant.signature, most=arguments.MOST_AT_ONCE
        )
    if not rows:
        raise ConfigurationError(
            "group", f"{group[:80]!r} has nothing in the archive", "holdfast archive groups has them"
        )
    return [row["id"] for row in rows]


async def detail(operator: Operator, id: int | UUID | str, *, payload: bool = False) -> ArchivedDetail:
    """One of them, with its payload only if that is asked for."""
    (number,) = (await resolve(operator, [id]))[:1]
    async with operator.reading():
        rows = await operator.fetch("read_archived", id=number)
    if not rows:
        raise _unknown(id)
    return _detail(rows[0], payload)


async def resolve(operator: Operator, ids: Iterable[int | UUID | str]) -> list[int]:
    """Numbers of archived rows, for what names them: a number, or the id of an event or of a delivery."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ConfigurationError("ids", f"is {type(ids).__name__}", "pass a list of numbers or ids")
    numbers: dict[int, None] = {}
    events: dict[UUID, None] = {}
    for each in ids:
        if isinstance(each, int) or (isinstance(each, str) and each.isascii() and each.isdigit() and len(each) < 20):
            numbers[arguments.whole("ids", each if isinstance(each, int) else int(each), 1)] = None
        else:
            events[arguments.identity(each, "ids")] = None
        _bounded(len(numbers) + len(events))
    if events:
        async with operator.reading():
            rows = await operator.fetch("find_archived", ids=list(events), most=2 * arguments.MOST_AT_ONCE)
        for row in rows:
            if row["number"] is None:
                raise _unknown(row["asked"])
            numbers[row["number"]] = None
    _bounded(len(numbers))
    return list(numbers)


def _bounded(count: int) -> None:
    if not 1 <= count <= arguments.MOST_AT_ONCE:
        problem = "are none" if count == 0 else f"are more than {arguments.MOST_AT_ONCE:,}"
        raise ConfigurationError("ids", problem, f"name 1 to {arguments.MOST_AT_ONCE:,}")


async def replay(
    operator: Operator,
    ids: Iterable[int | UUID | str],
    *,
    generation: int | None = None,
    reason: str | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> Moved:
    """Move them back into the outbox, pending: same id, same key, with the history of what they went through."""
    numbers = await resolve(operator, ids)
    asked = {"reason": arguments.reason(reason), "generation": generation, "force": force, "archive_ids": len(numbers)}
    async with operator.changing("archive.replay", dry_run=dry_run, **asked):
        into = await operator.generation(generation)
        found = await operator.fetch(
            "replay_archived", ids=numbers, generation=into, actor=operator.actor, reason=reason, force=force
        )
        moved = _moved(
            "archive.replay", found, dry_run, generation=into, unknown_generation=not await operator.knows(into)
        )
        if not moved.moved and set(moved.left) == {"too_old"}:
            raise Refused(
                f"{len(numbers)} were published before what the inbox remembers: their handlers may have handled them",
                "look at them first, and replay them with force",
            )
    return moved


async def discard(
    operator: Operator, ids: Iterable[int | UUID | str], *, reason: str | None = None, dry_run: bool = False
) -> Moved:
    """Set them aside; retention disposes of them when their time is over."""
    return await _set_aside(operator, ids, False, reason, dry_run)


async def restore(
    operator: Operator, ids: Iterable[int | UUID | str], *, reason: str | None = None, dry_run: bool = False
) -> Moved:
    """Take that back, while they still have their payload."""
    return await _set_aside(operator, ids, True, reason, dry_run)


async def _set_aside(
    operator: Operator, ids: Iterable[int | UUID | str], restoring: bool, reason: str | None, dry_run: bool
) -> Moved:
    action = "archive.restore" if restoring else "archive.discard"
    numbers = await resolve(operator, ids)
    asked = {"reason": arguments.reason(reason), "archive_ids": len(numbers)}
    async with operator.changing(action, dry_run=dry_run, **asked):
        found = await operator.fetch(
            "discard_archived", ids=numbers, restore=restoring, actor=operator.actor, reason=reason
        )
    return _moved(action, found, dry_run)


def _moved(action: str, rows: list[asyncpg.Record], dry_run: bool, **others: Any) -> Moved:
    left = Counter(row["outcome"] for row in rows if row["outcome"] != "moved")
    moved = [row["original_id"] for row in rows if row["outcome"] == "moved"]
    return Moved(action, moved, dict(left), dry_run, **others)


def _detail(row: asyncpg.Record, payload: bool) -> ArchivedDetail:
    found = dict(row)
    for name in ("payload", "headers"):
        found[name] = json.loads(row[name]) if payload and row[name] is not None else None
    found["failure_history"] = [FailureCycle.model_validate(cycle) for cycle in json.loads(row["failure_history"])]
    return ArchivedDetail(**found)


def _unknown(id: object) -> ConfigurationError:
    return ConfigurationError(
        "ids", f"{str(id)[:80]} is not in the archive", "copy a number from holdfast archive list"
    )
