"""Verbs for dead letters in the outbox."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from holdfast.errors import ConfigurationError
from holdfast.operator.catalogue.selecting import Chosen, DeadLetters, Group
from holdfast.operator.catalogue.verb import (
    Arguments,
    Catalogue,
    Change,
    Cursor,
    Id,
    Limit,
    Name,
    ReasonedChange,
    Text,
    Whole,
)
from holdfast.operator.failed import MOST_HOURS, MOST_STEPS, Edited
from holdfast.operator.operator import Operator
from holdfast.operator.outcome import Moved
from holdfast.operator.selection import Selection
from holdfast.postgres.operations.failed import FailedEvent, FailureGroups, FailureHistograms

VERBS = Catalogue()


@dataclass(frozen=True, slots=True)
class FailedPage:
    """Dead letters, the newest first; `next` is the cursor of the next page. None: there are no more."""

    events: list[FailedEvent]
    next: str | None


class ListFailed(DeadLetters):
    discarded: bool = Field(False, description="Those that were discarded and can be restored.")
    payload: bool = Field(False, description="Include payload and headers.")
    before: Cursor | None = Field(None, description="The `next` of the page before.")
    limit: Limit = 50


class Histogram(Arguments):
    group: Group | None = None
    handler: Name | None = None
    hours: Annotated[int, Field(ge=1, le=MOST_HOURS)] = 24
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 24


class CountDiscarded(Arguments):
    most: Annotated[int, Field(ge=1, le=100_000)] = 10_000


class Replay(Chosen, Change):
    generation: Whole | None = Field(None, description="Left out: the newest that a living worker serves.")
    force: bool = Field(False, description="Also what is older than the inbox remembers; it may run twice.")


class Discard(Chosen, ReasonedChange):
    pass


class Restore(Chosen, Change):
    pass


class Edit(Change):
    id: Id
    payload: dict[str, Any] = Field(description="The corrected payload.")
    generation: Whole | None = None


class Note(Arguments):
    group: Group
    note: Annotated[Text, Field(min_length=1, max_length=2_000)] | None = Field(description="null removes the note.")
    dry_run: bool = False


@VERBS.reads("failed.list")
async def page(operator: Operator, given: ListFailed) -> FailedPage:
    """Dead letters, the newest first."""
    found = await operator.failed.page(
        given.selection(),
        limit=given.limit,
        before=None if given.before is None else _place(given.before),
        payload=given.payload,
        discarded=given.discarded,
    )
    if len(found) < given.limit:
        return FailedPage(found, None)
    return FailedPage(found, f"{found[-1].failed_at.isoformat()} {found[-1].id}")


@VERBS.reads("failed.groups")
async def groups(operator: Operator, given: DeadLetters) -> FailureGroups:
    """Dead letters by handler and cause, the largest group first."""
    return await operator.failed.groups(given.selection())


@VERBS.reads("failed.histogram")
async def histogram(operator: Operator, given: Histogram) -> FailureHistograms:
    """When the dead letters of each group failed, in the last hours."""
    selection = DeadLetters(group=given.group, handler=given.handler).selection()
    return await operator.failed.histogram(selection, hours=given.hours, steps=given.steps)


@VERBS.reads("failed.discarded")
async def count_discarded(operator: Operator, given: CountDiscarded) -> int:
    """How many discarded dead letters can be restored, up to a limit."""
    return await operator.failed.count_discarded(most=given.most)


@VERBS.changes("failed.replay")
async def replay(operator: Operator, given: Replay) -> Moved:
    """Put dead letters back to pending, in place: those with some ids, or that a filter selects, up to 10,000."""
    ids, selection = await given.rows(operator)
    return await operator.failed.replay(
        ids,
        generation=given.generation,
        reason=given.reason,
        force=given.force,
        dry_run=given.dry_run,
        selection=selection,
    )


@VERBS.changes("failed.discard")
async def discard(operator: Operator, given: Discard) -> Moved:
    """Set dead letters aside. They can be restored until retention disposes of them."""
    ids, selection = await given.rows(operator)
    return await operator.failed.discard(ids, reason=given.reason, dry_run=given.dry_run, selection=selection)


@VERBS.changes("failed.restore")
async def restore(operator: Operator, given: Restore) -> Moved:
    """Put discarded events back among the failed ones."""
    ids, selection = await given.rows(operator, discarded=True)
    return await operator.failed.restore(ids, reason=given.reason, dry_run=given.dry_run, selection=selection)


@VERBS.changes("failed.edit")
async def edit(operator: Operator, given: Edit) -> Edited:
    """Publish a corrected event for the handler that failed, and discard the failed one."""
    options: dict[str, Any] = {"generation": given.generation, "reason": given.reason, "dry_run": given.dry_run}
    return await operator.failed.edit(given.id, given.payload, **options)


@VERBS.changes("failed.note")
async def note(operator: Operator, given: Note) -> bool:
    """Set the note of a group of failures, or remove it; whether the group has a note now."""
    return await operator.failed.note(given.group, given.note, dry_run=given.dry_run)


def _place(cursor: str) -> tuple[datetime, UUID]:
    at, _, id = cursor.partition(" ")
    try:
        moment = datetime.fromisoformat(at)
        Selection(since=moment)  # checks it
        return moment, UUID(id)
    except ValueError:
        raise ConfigurationError("before", "is not a cursor", "copy the next of the page before") from None
