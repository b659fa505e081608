"""Verbs for events: list the open ones, show one with its history, cancel one."""

from __future__ import annotations

from uuid import UUID

from holdfast.errors import ConfigurationError
from holdfast.operator import arguments
from holdfast.operator.outcome import Moved
from holdfast.operator.session import Session
from holdfast.postgres.operations import archive, events
from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.events import EventDetail, OpenEvent


class Events:
    """Events, as `operator.events`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def page(
        self,
        *,
        limit: int = 50,
        event_type: str | None = None,
        handler: str | None = None,
        source: str | None = None,
        generation: int | None = None,
    ) -> list[OpenEvent]:
        """Some of the events that are pending or in flight."""
        arguments.page("limit", limit)
        if event_type is not None:
            arguments.name("event_type", event_type)
        if handler is not None:
            arguments.handler(handler)
        if source is not None:
            arguments.name("source", source)
        if generation is not None:
            arguments.whole("generation", generation)
        async with self._session.reading() as statements:
            return await events.page(
                statements, limit=limit, event_type=event_type, handler=handler, source=source, generation=generation
            )

    async def detail(self, id: UUID | str, *, payload: bool = False) -> EventDetail:
        """Everything about the event that an id names: its own, or that of one of its deliveries."""
        asked = arguments.identity(id)
        async with self._session.reading() as statements:
            found = await events.detail(statements, asked, payload=payload)
            if found is None:
                raise await _unknown(statements, asked)
        return found

    async def cancel(self, id: UUID | str, *, reason: str | None = None, dry_run: bool = False) -> Moved:
        """Cancel an event that is pending or in flight, for all its handlers. A running handler is asked to end."""
        asked, actor = arguments.identity(id), self._session.actor
        cancelled: list[UUID] = []
        named = {"reason": arguments.reason(reason), "id": asked}
        async with self._session.changing("cancel", dry_run=dry_run, **named) as statements:
            rows = await _deliveries(statements, asked)
            while True:
                cancelled += [row for row in rows if await events.cancel(statements, row, actor=actor, reason=reason)]
                seen, rows = rows, await _deliveries(statements, asked)
                if cancelled or rows == seen:
                    break  # else it was split at this very moment
        left = len(rows) - len(cancelled)
        return Moved("cancel", cancelled, {"settled": left} if left else {}, dry_run)


async def _deliveries(statements: Statements, id: UUID) -> list[UUID]:
    rows = await events.deliveries(statements, id)
    if not rows:
        raise ConfigurationError("id", f"{id} is not an event", "for open events see: holdfast events list")
    return rows


async def _unknown(statements: Statements, id: UUID) -> ConfigurationError:
    ((_, number),) = await archive.find(statements, [id], most=1)
    if number is not None:
        return ConfigurationError("id", f"{id} is in the archive", f"holdfast archive show {id}")
    return ConfigurationError("id", f"{id} is not an event", "check the id: retention may have removed the event")
