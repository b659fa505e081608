"""Verbs for events: list the open ones, show one with its history, cancel one or many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Unpack
from uuid import UUID

from holdfast.errors import ConfigurationError
from holdfast.operator import arguments
from holdfast.operator.outcome import Moved
from holdfast.operator.selection import OpenFilters, OpenSelection
from holdfast.operator.session import Refused, Session
from holdfast.postgres.operations import events, failed
from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.events import EventDetail, OpenEvent

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
            raise ConfigurationError("id", f"{id} is not an event", "check it: retention may have removed the event")
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
        raise ConfigurationError("id", f"{id} is not an event", "holdfast events list has the open ones")
    return rows
