"""Verbs for events."""

from __future__ import annotations

from typing import Annotated, cast
from uuid import UUID

from pydantic import Field

from holdfast.operator.catalogue.verb import (
    Arguments,
    Catalogue,
    Change,
    Counted,
    Id,
    Key,
    Limit,
    Moment,
    Name,
    ReasonedChange,
    Text,
    Whole,
)
from holdfast.operator.operator import Operator
from holdfast.operator.outcome import Moved
from holdfast.operator.selection import OpenFilters
from holdfast.postgres.operations.events import EventDetail, OpenEvent
from holdfast.postgres.operations.search import Children, EventPage, EventState, Relative

VERBS = Catalogue()


class OpenFilter(Arguments):
    event_type: Name | None = None
    handler: Name | None = Field(None, description="Owed to this handler, also before one has claimed them.")
    source: Name | None = None
    generation: Whole | None = None
    channel: Annotated[Text, Field(min_length=1, max_length=63)] | None = None
    route: Annotated[Text, Field(min_length=1, max_length=500)] | None = None

    def filters(self) -> OpenFilters:
        """The filters that are given."""
        return cast(OpenFilters, self.model_dump(include=set(OpenFilter.model_fields)))


class Open(OpenFilter):
    limit: Limit = 50


class Search(Arguments):
    state: EventState | None = None
    event_type: Name | None = None
    handler: Name | None = None
    source: Name | None = None
    generation: Whole | None = None
    domain_id: Id | None = None
    key: Key | None = Field(None, description="An idempotency key, or the key that a producer gave.")
    since: Moment | None = Field(None, description="Made at that time or later.")
    until: Moment | None = Field(None, description="Made before that time.")
    before: Id | None = Field(None, description="The `next` of the page before.")
    limit: Limit = 50


class Find(Arguments):
    key: Key = Field(description="An id, an idempotency key, or the key that a producer gave.")
    limit: Limit = 50


class Named(Arguments):
    id: Id = Field(description="Id of an event, or of one of its deliveries.")


class Shown(Named):
    payload: bool = Field(False, description="Include payload and headers.")


class ChildrenOf(Named):
    after: Id | None = Field(None, description="The `next` of the page before.")
    limit: Limit = 50


class Cancel(Named, Change):
    pass


class Reveal(Named, ReasonedChange):
    pass


class CancelMany(Counted, OpenFilter, Change):
    async def rows(self, operator: Operator) -> list[UUID]:
        """What is to be cancelled."""
        return await operator.events.select(**self.filters()) if self._counted is None else list(self._counted)


@VERBS.reads("events.list")
async def open_events(operator: Operator, given: Open) -> list[OpenEvent]:
    """Some of the events that are pending or in flight."""
    return await operator.events.page(limit=given.limit, **given.filters())


@VERBS.reads("events.search")
async def search(operator: Operator, given: Search) -> EventPage:
    """Deliveries of any state, the newest first. A page examines 20,000 rows at most, and may be empty."""
    return await operator.events.search(**given.model_dump())


@VERBS.reads("events.find")
async def find(operator: Operator, given: Find) -> EventPage:
    """Deliveries of the event with an id, an idempotency key, or the key that its producer gave it."""
    return await operator.events.find(given.key, limit=given.limit)


@VERBS.reads("events.show")
async def show(operator: Operator, given: Shown) -> EventDetail:
    """Everything about one event: its deliveries, their errors and cycles, and the actions of operators."""
    return await operator.events.detail(given.id, payload=given.payload)


@VERBS.changes("events.reveal")
async def reveal(operator: Operator, given: Reveal) -> EventDetail:
    """An event with its payload and headers, for somebody from whom they are hidden; the audit says why."""
    if given.dry_run or given.reason is None:
        return await operator.events.detail(given.id)
    return await operator.events.reveal(given.id, reason=given.reason)


@VERBS.reads("events.children")
async def children(operator: Operator, given: ChildrenOf) -> Children:
    """Events that an event has caused, among the 20,000 rows that were made next."""
    return await operator.events.children(given.id, after=given.after, limit=given.limit)


@VERBS.reads("events.causes")
async def causes(operator: Operator, given: Named) -> list[Relative]:
    """An event, what caused it, what caused that, and so on: 50 steps at most."""
    return await operator.events.ancestors(given.id)


@VERBS.changes("events.cancel")
async def cancel(operator: Operator, given: Cancel) -> Moved:
    """Cancel an event that is pending or in flight, for all its handlers."""
    return await operator.events.cancel(given.id, reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("events.cancel_many")
async def cancel_many(operator: Operator, given: CancelMany) -> Moved:
    """Cancel the open events that a filter selects, up to 10,000 at a time; of a handler what is owed to no other."""
    rows = await given.rows(operator)
    return await operator.events.cancel_many(rows, reason=given.reason, dry_run=given.dry_run)
