"""Searching the outbox: events of any state, of a key or a domain, and what caused what.

Nothing here needs an index that is not there for delivery. A page examines so many rows at most, the newest first, and
says how far back it has looked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal
from uuid import UUID

from holdfast.postgres.operations.connection import Statements

EventState = Literal["pending", "in_flight", "delivered", "failed", "discarded"]

MOST_EXAMINED: Final = 20_000
MOST_FEW: Final = 5_000
MOST_SOURCES: Final = 200
MOST_NODES: Final = 50
ERROR_LENGTH: Final = 500
NEWEST: Final = UUID(int=2**128 - 1)
OLDEST: Final = UUID(int=0)
# How far the clock of who publishes may be ahead of the one that wrote when an event was handled.
_SKEW: Final = timedelta(minutes=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class EventLine:
    """A delivery in a list: of any state, without its payload."""

    id: UUID
    event_id: UUID
    event_type: str
    source: str
    target: str | None
    route: str
    handler_name: str | None  # None: not yet known
    state: EventState
    attempts: int
    last_error: str | None  # the first 500 characters
    created_at: datetime
    available_at: datetime
    settled_at: datetime | None
    channel: str
    generation: int
    domain_id: UUID | None


@dataclass(frozen=True, slots=True)
class EventPage:
    """Deliveries, the newest first. `next` is the cursor of the next page; None: there are no more.

    `searched_until` is the time of the oldest row that was examined, when the page ends before it is full.
    """

    events: list[EventLine]
    next: UUID | None = None
    searched_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Relative:
    """An event among those that caused it, or that it caused. `distance` is 1 for a cause and for an effect."""

    event_id: UUID
    event_type: str
    source: str
    occurred_at: datetime
    created_at: datetime
    status: str  # of the published row; archived: only the archive has it
    cause: str | None  # the causation id that it has
    distance: int


@dataclass(frozen=True, slots=True)
class Children:
    """Events that name another as their cause, in their order; `next` and `searched_until` as in a page of events."""

    children: list[Relative]
    next: UUID | None = None
    searched_until: datetime | None = None


def first_id(at: datetime) -> UUID:
    """The id below which every one is of an earlier time."""
    milliseconds = (at - _EPOCH) // timedelta(milliseconds=1)
    return UUID(int=min(max(milliseconds, 0), 2**48 - 1) << 80)


def time_of(id: UUID) -> datetime | None:
    """The time in an id; None when no date is that late, as for an id of another version."""
    try:
        return _EPOCH + timedelta(milliseconds=id.int >> 80)
    except OverflowError:
        return None


async def page(
    statements: Statements, filters: Mapping[str, object], *, before: UUID, first: UUID, limit: int
) -> EventPage:
    """Deliveries that match the filters, the newest first."""
    await statements.fetch("begin_search")
    values = {**filters, "before": before, "first": first, "most": limit, "error_length": ERROR_LENGTH}
    if filters["state"] in ("pending", "in_flight", "failed", "discarded"):
        rows = await statements.fetch("search_few", **values, most_few=MOST_FEW)
        if rows[0]["few"] < MOST_FEW:
            found = [_line(row) for row in rows if row["id"] is not None]
            return EventPage(found, found[-1].id if len(found) == limit else None)
    found = [_line(row) for row in await statements.fetch("search_events", **values, most_examined=MOST_EXAMINED)]
    if len(found) == limit:
        return EventPage(found, found[-1].id)
    ends = await statements.fetch("search_end", before=before, first=first, most_examined=MOST_EXAMINED)
    if not ends:
        return EventPage(found)
    return EventPage(found, ends[0]["id"], time_of(ends[0]["id"]))


async def of_ids(statements: Statements, ids: list[UUID], *, limit: int) -> list[EventLine]:
    """Deliveries of the events that ids name."""
    rows = await statements.fetch("search_ids", ids=ids, most=limit, error_length=ERROR_LENGTH)
    return [_line(row) for row in rows]


async def with_key(statements: Statements, key: str, *, limit: int) -> EventPage:
    """Deliveries with an idempotency key or a producer's key, wherever they are likely to be."""
    await statements.fetch("begin_search")
    try:
        named = [UUID(key)]  # the key that an event has without another is its id
    except ValueError:
        named = []
    named += [row["event_id"] for row in await statements.fetch("list_key_holders", key=key, most_sources=MOST_SOURCES)]
    if found := await of_ids(statements, named, limit=limit):
        return EventPage(found)
    filters: dict[str, object] = dict.fromkeys(("event_type", "source", "generation", "handler", "domain_id", "state"))
    filters["key"] = key
    states: tuple[EventState, ...] = ("pending", "in_flight", "failed")
    for state in states:
        values = {**filters, "state": state, "before": NEWEST, "first": OLDEST, "most": limit}
        rows = await statements.fetch("search_few", **values, most_few=MOST_FEW, error_length=ERROR_LENGTH)
        if found := [_line(row) for row in rows if row["id"] is not None]:
            return EventPage(found)
    handled_at = (await statements.row("read_first_handled", key=key))["handled_at"]
    if handled_at is not None:
        near = await page(statements, filters, before=first_id(handled_at + _SKEW), first=OLDEST, limit=limit)
        if near.events:
            return near
    return await page(statements, filters, before=NEWEST, first=OLDEST, limit=limit)


async def ancestors(statements: Statements, id: UUID) -> list[Relative]:
    """The event itself, what caused it, what caused that, and so on; empty when there is no such event."""
    found: dict[UUID, Relative] = {}
    for row in await statements.fetch("list_ancestors", id=id, most=MOST_NODES):
        relative = Relative(**row)
        if relative.event_id in found:
            break  # a producer has named an effect as the cause
        found[relative.event_id] = relative
    return list(found.values())


async def children(statements: Statements, id: UUID, *, after: UUID, limit: int) -> Children:
    """Events that name an event as their cause, among those that were made after it."""
    await statements.fetch("begin_search")
    rows = await statements.fetch("list_children", cause=str(id), after=after, most=limit, most_examined=MOST_EXAMINED)
    found = [Relative(**row) for row in rows]
    if len(found) == limit:
        return Children(found, found[-1].event_id)
    ends = await statements.fetch("children_end", after=after, most_examined=MOST_EXAMINED)
    return Children(found, ends[0]["id"], time_of(ends[0]["id"])) if ends else Children(found)


def _line(row: Mapping[str, object]) -> EventLine:
    return EventLine(**{name: row[name] for name in EventLine.__dataclass_fields__})  # type: ignore[arg-type]
