"""Verbs for events: list the open ones, search among all, show one with its history, cancel one or many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final, Unpack, get_args
from uuid import UUID

from holdfast.checks import UNPRINTABLE, quoted
from holdfast.errors import ConfigurationError, NotFound
from holdfast.operator import arguments
from holdfast.operator.outcome import Moved
from holdfast.operator.selection import OpenFilters, OpenSelection, Selection
from holdfast.operator.session import Refused, Session
from holdfast.postgres.operations import audit, events, failed, search
from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.events import EventDetail, OpenEvent
from holdfast.postgres.operations.search import Children, EventPage, EventState, Relative

STATES: Final[tuple[EventState, ...]] = get_args(EventState)
LONGEST_KEY: Final = 1_020

_LISTED_BY = "holdfast events list, or holdfast failed list"


class Events:
    """Events, as `operator.events`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def page(self, *, limit: int = 50, **filters: Unpack[OpenFilters]) -> list[OpenEvent]:
        """Some of the events that are pending or in flight."""
        arguments.page("limit", limit)
        selection = OpenSelection(**filters)
        async with self._session.reading() as statements:
            return await events.page(statements, asdict(selection), limit=limit)

    async def search(
        self,
        *,
        state: EventState | None = None,
        event_type: str | None = None,
        handler: str | None = None,
        source: str | None = None,
        generation: int | None = None,
        domain_id: UUID | str | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        before: UUID | str | None = None,
        limit: int = 50,
    ) -> EventPage:
        """Deliveries of any state, the newest first; `before` is the cursor of the previous page.

        `since` and `until` mean the time in the id, when the event was made. A page examines 20,000 rows at most: it
        may be empty, and still have a `next`; `searched_until` says how far back it has looked.
        """
        arguments.page("limit", limit)
        if state is not None and state not in STATES:
            raise ConfigurationError("state", f"{quoted(state)} is unknown", f"use one of {', '.join(STATES)}")
        OpenSelection(event_type=event_type, handler=handler, source=source, generation=generation)  # checks them
        Selection(since=since, until=until)  # likewise
        last = search.NEWEST if until is None else search.first_id(until)
        first = search.OLDEST if since is None else search.first_id(since)
        if before is not None:
            last = min(last, arguments.identity(before, "before", "the next of the page before"))
        filters = {
            "state": state,
            "event_type": event_type,
            "handler": handler,
            "source": source,
            "generation": generation,
            "domain_id": domain_id and arguments.identity(domain_id, "domain_id", "the domain_id of your events"),
            "key": None if key is None else _key(key),
        }
        async with self._session.reading() as statements:
            return await search.page(statements, filters, before=last, first=first, limit=limit)

    async def find(self, key: str, *, limit: int = 50) -> EventPage:
        """Deliveries of the event with an id, an idempotency key, or the key that its producer gave it.

        The id, the keys of pending events, what is open and failed, and what the inbox remembers are looked up. If that
        is in vain, it is a page of `search`, to be continued there.
        """
        arguments.page("limit", limit)
        async with self._session.reading() as statements:
            return await search.with_key(statements, _key(key), limit=limit)

    async def children(self, id: UUID | str, *, after: UUID | str | None = None, limit: int = 50) -> Children:
        """Events that an event has caused: they name it as their causation id.

        `after` is the cursor of the page before. They are looked for among the 20,000 rows that were made next;
        `next` is where to go on.
        """
        arguments.page("limit", limit)
        asked = arguments.identity(id, listed_by=_LISTED_BY)
        async with self._session.reading() as statements:
            line = await search.ancestors(statements, asked)
            parent = line[0].event_id if line else asked
            start = parent if after is None else arguments.identity(after, "after", "the next of the page before")
            return await search.children(statements, parent, after=max(parent, start), limit=limit)

    async def ancestors(self, id: UUID | str) -> list[Relative]:
        """What caused an event, what caused that, and so on: the event itself first, and 50 at most."""
        asked = arguments.identity(id, listed_by=_LISTED_BY)
        async with self._session.reading() as statements:
            found = await search.ancestors(statements, asked)
        if not found:
            raise _unknown(id)
        return found

    async def select(self, *, most: int = arguments.MOST_AT_ONCE, **filters: Unpack[OpenFilters]) -> list[UUID]:
        """Ids of the open deliveries that match, the first due first. An error when none matches.

        For a handler only those that are owed to no other: what is done to them concerns all their handlers.
        """
        selection = OpenSelection(**filters).required()
        async with self._session.reading() as statements:
            found = [each.id for each in await events.page(statements, asdict(selection), limit=most, alone=True)]
        if not found:
            raise Refused("no open event matches", "holdfast events list")
        return found

    async def detail(self, id: UUID | str, *, payload: bool = False) -> EventDetail:
        """Everything about the event that an id names: its own, or that of one of its deliveries."""
        asked = arguments.identity(id, listed_by=_LISTED_BY)
        async with self._session.reading() as statements:
            found = await events.detail(statements, asked, payload=payload)
        if found is None:
            raise _unknown(id)
        return found

    async def reveal(self, id: UUID | str, *, reason: str) -> EventDetail:
        """An event with its payload and headers, for somebody from whom they are hidden; the audit says why."""
        why = arguments.line("reason", reason, 2_000)
        found = await self.detail(id, payload=True)
        async with self._session.changing("event.reveal", reason=why) as statements:
            rows = [each.id for each in found.deliveries] or [found.event_id]
            await audit.note_reveal(statements, rows[0], actor=self._session.actor, reason=why)
        return found

    async def cancel(self, id: UUID | str, *, reason: str | None = None, dry_run: bool = False) -> Moved:
        """Cancel an event that is pending or in flight, for all its handlers. A running handler is asked to end."""
        asked, actor = arguments.identity(id, listed_by=_LISTED_BY), self._session.actor
        cancelled: list[UUID] = []
        named: dict[str, Any] = {"reason": arguments.reason(reason), "id": asked}
        async with self._session.changing("cancel", dry_run=dry_run, **named) as statements:
            rows = await _deliveries(statements, asked)
            while True:
                cancelled += [row for row in rows if await events.cancel(statements, row, actor=actor, reason=reason)]
                seen, rows = rows, await _deliveries(statements, asked)
                if cancelled or rows.keys() == seen.keys():
                    break  # else it was split at this very moment
        left = Counter(state for row, state in rows.items() if row not in cancelled)
        return Moved("cancel", cancelled, dict(left), dry_run)

    async def cancel_many(
        self, ids: Iterable[UUID | str], *, reason: str | None = None, dry_run: bool = False
    ) -> Moved:
        """Cancel open deliveries, as `select` returns them."""
        rows = arguments.ids(ids)
        if dry_run:
            return Moved("cancel", rows, {}, dry_run)  # not tried: what is cancelled for a moment cannot be settled
        named: dict[str, Any] = {"reason": arguments.reason(reason), "rows": len(rows)}
        async with self._session.changing("cancel", **named) as statements:
            cancelled = await events.cancel_many(statements, rows, actor=self._session.actor, reason=reason)
        left = len(rows) - len(cancelled)
        return Moved("cancel", cancelled, {"settled": left} if left else {})


async def _deliveries(statements: Statements, id: UUID) -> dict[UUID, str]:
    """The deliveries that an id stands for, with their states."""
    rows = {each.id: each.state for each in (await failed.resolve(statements, [id]))[id]}
    if not rows:
        raise NotFound("id", f"{id} is not an event", "holdfast events list has the open ones")
    return rows


def _unknown(id: object) -> NotFound:
    return NotFound("id", f"{id} is not an event", "check it: retention may have removed the event")


def _key(value: str) -> str:
    if not isinstance(value, str) or not value or len(value.encode(errors="replace")) > LONGEST_KEY:
        raise ConfigurationError("key", "is empty or too long", f"write 1 to {LONGEST_KEY:,} bytes")
    if UNPRINTABLE.search(value):
        raise ConfigurationError("key", "has control characters", "copy it from the event")
    return value
