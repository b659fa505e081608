"""Verbs for the archive of dead letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from pydantic import Field

from holdfast.errors import ConfigurationError
from holdfast.operator.catalogue.overview import Nothing
from holdfast.operator.catalogue.selecting import Group
from holdfast.operator.catalogue.verb import (
    Arguments,
    Catalogue,
    Change,
    Counted,
    Id,
    Limit,
    Name,
    ReasonedChange,
    Whole,
)
from holdfast.operator.operator import Operator
from holdfast.operator.outcome import Moved
from holdfast.postgres.operations.archive import ArchivedDetail, ArchivedEvent
from holdfast.postgres.operations.failed import FailureGroups

VERBS = Catalogue()

Number = Annotated[int, Field(ge=1, le=2**63 - 1)]


@dataclass(frozen=True, slots=True)
class ArchivePage:
    """Archived events, the newest first; `next` is the cursor of the next page. None: there are no more."""

    events: list[ArchivedEvent]
    next: int | None


class ListArchived(Arguments):
    handler: Name | None = None
    discarded: bool = False
    before: Number | None = Field(None, description="The `next` of the page before.")
    limit: Limit = 50


class ShowArchived(Arguments):
    id: Number | Id = Field(description="The number of an archived row, or the id of an event or a delivery.")
    payload: bool = Field(False, description="Include payload and headers.")


class ChosenArchived(Counted):
    """Numbers or ids, a group, or a handler: exactly one of them."""

    ids: Annotated[list[Number | Id], Field(min_length=1, max_length=10_000)] | None = None
    group: Group | None = None
    handler: Name | None = None

    async def rows(self, operator: Operator) -> list[int | UUID]:
        """What is to be changed."""
        if sum(each is not None for each in (self.ids, self.group, self.handler)) != 1:
            raise ConfigurationError("ids", "or a group or a handler is needed", "give exactly one of them")
        if self._counted is not None:
            return list(self._counted)
        if self.ids is not None:
            return list(self.ids)
        return [*await operator.archive.select(self.group, handler=self.handler)]


class Replay(ChosenArchived, Change):
    generation: Whole | None = None
    force: bool = False


class Discard(ChosenArchived, ReasonedChange):
    pass


class Restore(ChosenArchived, Change):
    pass


@VERBS.reads("archive.list")
async def page(operator: Operator, given: ListArchived) -> ArchivePage:
    """Archived dead letters, the newest first."""
    found = await operator.archive.page(
        handler=given.handler, discarded=given.discarded, limit=given.limit, before=given.before
    )
    return ArchivePage(found, found[-1].id if len(found) == given.limit else None)


@VERBS.reads("archive.groups")
async def groups(operator: Operator, given: Nothing) -> FailureGroups:
    """Archived dead letters by handler and cause."""
    return await operator.archive.groups()


@VERBS.reads("archive.show")
async def show(operator: Operator, given: ShowArchived) -> ArchivedDetail:
    """One archived dead letter."""
    return await operator.archive.detail(given.id, payload=given.payload)


@VERBS.changes("archive.replay")
async def replay(operator: Operator, given: Replay) -> Moved:
    """Move archived events back into the outbox, pending."""
    return await operator.archive.replay(
        await given.rows(operator),
        generation=given.generation,
        reason=given.reason,
        force=given.force,
        dry_run=given.dry_run,
    )


@VERBS.changes("archive.discard")
async def discard(operator: Operator, given: Discard) -> Moved:
    """Discard archived events; retention disposes of them when their time is over."""
    return await operator.archive.discard(await given.rows(operator), reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("archive.restore")
async def restore(operator: Operator, given: Restore) -> Moved:
    """Undo a discard in the archive."""
    return await operator.archive.restore(await given.rows(operator), reason=given.reason, dry_run=given.dry_run)
