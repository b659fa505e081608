"""Verbs for dead letters in the outbox: list, group, select, replay, discard, restore, edit, note."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from holdfast.characters import shell_word
from holdfast.errors import ConfigurationError, NotFound, NothingSelected, PayloadError
from holdfast.ids import uuid7
from holdfast.operator import arguments
from holdfast.operator.outcome import Moved, moved, require_remembered
from holdfast.operator.selection import Selection
from holdfast.operator.session import Refused, Session, generation_for
from holdfast.payload import encode_payload
from holdfast.postgres.operations import archive, failed, generations
from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.failed import FailedEvent, FailureGroups, FailureHistograms, NamedDelivery

_STREAM_PAGE = 500
MOST_HOURS = 366 * 24
MOST_STEPS = 200
EVERYTHING = Selection()


@dataclass(frozen=True, slots=True)
class Edited:
    """A dead letter, and the corrected event that replaces it."""

    id: UUID
    new_id: UUID
    handler_name: str
    generation: int
    dry_run: bool = False


class FailedEvents:
    """Dead letters, as `operator.failed`.

    Every change is one transaction with a line in the audit. A dry run does all of it, returns what would become of
    each row, and rolls back.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    async def page(
        self,
        selection: Selection = EVERYTHING,
        *,
        limit: int = 50,
        before: FailedEvent | tuple[datetime, UUID] | None = None,
        payload: bool = False,
        discarded: bool = False,
    ) -> list[FailedEvent]:
        """Dead letters, the newest first; `before` is the last one of the previous page, or its time and id.

        With `discarded` it is those that were discarded and can be restored.
        """
        arguments.page("limit", limit)
        wanted = selection.as_json(discarded=discarded)
        async with self._session.reading() as statements:
            place = (before.failed_at, before.id) if isinstance(before, FailedEvent) else before
            return await failed.page(statements, wanted, limit=limit, before=place, payload=payload)

    async def pages(self, selection: Selection = EVERYTHING, *, payload: bool = False) -> AsyncIterator[FailedEvent]:
        """All dead letters, read a page at a time: a read that takes minutes must not hold one snapshot."""
        last: FailedEvent | None = None
        while found := await self.page(selection, limit=_STREAM_PAGE, before=last, payload=payload):
            for event in found:
                yield event
            last = found[-1]

    async def groups(self, selection: Selection = EVERYTHING) -> FailureGroups:
        """Dead letters by handler and cause."""
        async with self._session.reading() as statements:
            return await failed.groups(statements, selection.as_json())

    async def histogram(
        self, selection: Selection = EVERYTHING, *, hours: int = 24, steps: int = 24
    ) -> FailureHistograms:
        """When the dead letters of each group failed, in the last hours. Those of the archive are not counted."""
        arguments.whole("hours", hours, 1, MOST_HOURS)
        arguments.whole("steps", steps, 1, MOST_STEPS)
        if selection.since is not None or selection.until is not None or selection.archived:
            raise ConfigurationError("selection", "has a time, or is of the archive", "name the hours instead")
        async with self._session.reading() as statements:
            return await failed.histogram(
                statements, json.loads(selection.as_json()), hours=timedelta(hours=hours), steps=steps
            )

    async def select(
        self, selection: Selection, *, most: int = arguments.MOST_AT_ONCE, discarded: bool = False
    ) -> list[UUID]:
        """Ids of the rows that a selection matches now, the newest first. An error when it matches none."""
        wanted = selection.required()
        async with self._session.reading() as statements:
            rows = await failed.select(statements, wanted.as_json(discarded=discarded), most=most)
            if not rows:
                raise await no_match(statements, selection, discarded=discarded)
        return rows

    async def count_discarded(self, *, most: int = arguments.MOST_AT_ONCE) -> int:
        """How many discarded dead letters can be restored; one that equals `most` means "or more"."""
        async with self._session.reading() as statements:
            return await failed.count_discarded(statements, most=arguments.whole("most", most, 1, failed.MOST))

    async def resolve(self, ids: Iterable[UUID | str]) -> list[UUID]:
        """The rows that ids name, in the outbox or in the archive. An unknown id is an error.

        An event's own id names its failed deliveries. Where none has failed it names all of them, so that the outcome
        says what they are.
        """
        asked = arguments.ids(ids)
        async with self._session.reading() as statements:
            found = await failed.resolve(statements, asked)
        return list(dict.fromkeys(each.id for deliveries in named(found).values() for each in deliveries))

    async def _rows(self, ids: Iterable[UUID | str], selection: Selection | None) -> list[UUID]:
        """Rows that are to be changed: those of a selection are what they are, and other ids may name events."""
        return await self.resolve(ids) if selection is None else arguments.ids(ids)

    async def replay(
        self,
        ids: Iterable[UUID | str],
        *,
        generation: int | None = None,
        reason: str | None = None,
        force: bool = False,
        dry_run: bool = False,
        selection: Selection | None = None,
    ) -> Moved:
        """Put dead letters back to pending, in place: same id, same key, attempts from zero.

        `selection` is how the ids were chosen, for the audit; likewise in the other verbs.
        """
        rows, actor = await self._rows(ids, selection), self._session.actor
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "selection": selection}
        asked |= {"generation": generation, "force": force, "rows": len(rows)}
        changing = self._session.changing("replay", dry_run=dry_run, **asked)
        async with self._session.replaying(rows, dry_run=dry_run), changing as statements:
            into = await generation_for(statements, generation)
            found = await failed.replay(statements, rows, generation=into, actor=actor, reason=reason, force=force)
            unknown = not await generations.known(statements, into)
            require_remembered(found)
        return moved("replay", found, dry_run, generation=into, unknown_generation=unknown)

    async def discard(
        self,
        ids: Iterable[UUID | str],
        *,
        reason: str | None = None,
        dry_run: bool = False,
        selection: Selection | None = None,
    ) -> Moved:
        """Discard dead letters. They can be restored until `purge_at`."""
        rows, actor = await self._rows(ids, selection), self._session.actor
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "selection": selection, "rows": len(rows)}
        async with self._session.changing("discard", dry_run=dry_run, **asked) as statements:
            return moved("discard", await failed.discard(statements, rows, actor=actor, reason=reason), dry_run)

    async def restore(
        self,
        ids: Iterable[UUID | str],
        *,
        reason: str | None = None,
        dry_run: bool = False,
        selection: Selection | None = None,
    ) -> Moved:
        """Put discarded events back among the failed ones."""
        rows, actor = await self._rows(ids, selection), self._session.actor
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "selection": selection, "rows": len(rows)}
        async with self._session.changing("restore", dry_run=dry_run, **asked) as statements:
            return moved("restore", await failed.restore(statements, rows, actor=actor, reason=reason), dry_run)

    async def edit(
        self,
        id: UUID | str,
        payload: dict[str, Any],
        *,
        generation: int | None = None,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> Edited:
        """Publish a corrected event for the handler that failed, and discard the failed one.

        The new event has an id and a key of its own; its causation id is the event it corrects.
        """
        try:
            text = encode_payload(payload)
        except PayloadError as error:
            raise ConfigurationError(error.field, error.problem, error.remedy) from None
        rows = await self.resolve([id])
        if len(rows) > 1:
            raise ConfigurationError(
                "id", f"{id} failed for {len(rows)} handlers", "name one delivery: holdfast failed show lists them"
            )
        new_id, actor = uuid7(), self._session.actor
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "id": rows[0]}
        async with self._session.changing("edit", dry_run=dry_run, **asked) as statements:
            into = await generation_for(statements, generation)
            outcome = await failed.edit(statements, rows[0], new_id, text, generation=into, actor=actor, reason=reason)
            if outcome != "moved":
                what = "is being changed by another session" if outcome == "busy" else f"is {outcome}, not failed"
                raise Refused(f"the event {what}", f"holdfast events show {id}")
            handler = await failed.handler_of(statements, new_id)
        return Edited(rows[0], new_id, handler, into, dry_run)

    async def note(self, group: str, text: str | None, *, dry_run: bool = False) -> bool:
        """Set the note of a group of failures, or (None) remove it; whether the group has a note now."""
        handler, signature = Selection.parts(group)
        wanted = Selection(handler=handler, signature=signature)
        if text is not None:
            arguments.line("note", text, 2_000)
            await self.select(wanted, most=1)
        async with self._session.changing("note", dry_run=dry_run) as statements:
            return await failed.note(statements, handler, signature, text, actor=self._session.actor)


def named(found: dict[UUID, list[NamedDelivery]]) -> dict[UUID, list[NamedDelivery]]:
    """The failed ones of the deliveries that ids stand for; all of them, where none has failed. None is an error."""
    if unknown := [str(id) for id, deliveries in found.items() if not deliveries]:
        others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise NotFound(
            "ids",
            f"contains an id that no event and no delivery has: {unknown[0]}{others}",
            "check it, retention may have removed the event; holdfast failed list has the dead letters",
        )
    return {id: [each for each in all_ if each.has_failed] or all_ for id, all_ in found.items()}


async def no_match(statements: Statements, selection: Selection, *, discarded: bool = False) -> NothingSelected:
    """The error of a selection that matches no dead letter, or no discarded one."""
    if discarded:
        remedy = "holdfast failed list --discarded"
        return NothingSelected("selection", f"matches no discarded dead letter: {selection}", remedy)
    archived = {} if selection.archived else await archive.counts_by_handler(statements, selection.handler)
    if archived:
        of = "" if selection.handler is None else f" --handler {shell_word(selection.handler)}"
        problem = f"matches no dead letter in the outbox: {selection}; {sum(archived.values())} are in the archive"
        return NothingSelected("selection", problem, f"holdfast archive list{of}")
    remedy = f"holdfast {'archive' if selection.archived else 'failed'} groups"
    return NothingSelected("selection", f"matches no dead letter: {selection}", remedy)
