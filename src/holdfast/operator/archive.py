"""Verbs for the archive, where workers with `dead_letters="archive"` move dead letters.

An archived row has a number of its own; the verbs take that, or the id of an event or of a delivery.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from holdfast.errors import ConfigurationError, NotFound
from holdfast.operator import arguments
from holdfast.operator.failed import named
from holdfast.operator.outcome import Moved, moved, require_remembered
from holdfast.operator.selection import Selection
from holdfast.operator.session import Session, generation_for
from holdfast.postgres.operations import archive, failed, generations
from holdfast.postgres.operations.archive import ArchivedDetail, ArchivedEvent
from holdfast.postgres.operations.failed import FailureGroups
from holdfast.postgres.operations.outcomes import Outcomes

ArchivedIds = Iterable[int | UUID | str]
NOTHING = Outcomes([], {})


class Archive:
    """Archived events, as `operator.archive`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def page(
        self, *, handler: str | None = None, discarded: bool = False, limit: int = 50, before: int | None = None
    ) -> list[ArchivedEvent]:
        """Archived events, the newest first; `before` is the number of the last one of the previous page."""
        arguments.page("limit", limit)
        if handler is not None:
            arguments.handler(handler)
        if before is not None:
            arguments.whole("before", before)
        async with self._session.reading() as statements:
            return await archive.page(statements, handler=handler, discarded=discarded, limit=limit, before=before)

    async def groups(self) -> FailureGroups:
        """Archived events by handler and cause."""
        async with self._session.reading() as statements:
            return await archive.groups(statements)

    async def count(self, handler: str | None = None) -> int:
        """How many events are archived and not discarded, of one handler or of all; up to a limit."""
        async with self._session.reading() as statements:
            return sum((await archive.counts_by_handler(statements, handler)).values())

    async def select(self, group: str | None = None, *, handler: str | None = None) -> list[int]:
        """Numbers of the archived rows of a group, written as handler/signature, or of a handler; the newest first."""
        signature = None
        if group is not None:
            handler, signature = Selection.parts(group)
        if handler is None:
            raise ConfigurationError("handler", "is missing", "name a handler, or a group")
        Selection(handler=handler, signature=signature)  # checks both
        async with self._session.reading() as statements:
            rows = await archive.select(statements, handler, signature, most=arguments.MOST_AT_ONCE)
        if not rows:
            field, name = ("handler", handler) if group is None else ("group", group)
            raise NotFound(field, f"{name[:80]!r} has nothing in the archive", "holdfast archive groups")
        return rows

    async def detail(self, id: int | UUID | str, *, payload: bool = False) -> ArchivedDetail:
        """One archived event, with its payload only on request."""
        named = (await self.resolve([id]))[0]
        if isinstance(named, UUID):
            raise NotFound("id", f"{id} is in the outbox, not in the archive", f"holdfast failed show {id}")
        async with self._session.reading() as statements:
            found = await archive.detail(statements, named, payload=payload)
        if found is None:
            raise _unknown(id)
        return found

    async def resolve(self, ids: ArchivedIds) -> list[int | UUID]:
        """Numbers of archived rows, for numbers and for ids of events or of deliveries.

        Deliveries of the same events that have failed in place follow by their ids: what is done to an event is done
        wherever its dead letters are.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            raise ConfigurationError("ids", f"is {type(ids).__name__}", "pass a list of numbers or ids")
        numbers: dict[int, None] = {}
        events: dict[UUID, None] = {}
        rows: dict[UUID, None] = {}
        for each in ids:
            if isinstance(each, int) or (
                isinstance(each, str) and each.isascii() and each.isdigit() and len(each) < 20
            ):
                numbers[arguments.whole("ids", each if isinstance(each, int) else int(each), 1)] = None
            else:
                events[arguments.identity(each, "ids", "holdfast archive list")] = None
            _require_bounded(len(numbers) + len(events))
        if events:
            async with self._session.reading() as statements:
                found = await archive.find(statements, list(events), most=2 * arguments.MOST_AT_ONCE)
                deliveries = named(await failed.resolve(statements, list(events)))
            numbers |= {number: None for _, number in found if number is not None}
            rows = {each.id: None for all_ in deliveries.values() for each in all_ if each.archive_id is None}
        _require_bounded(len(numbers) + len(rows))
        return [*numbers, *rows]

    async def replay(
        self,
        ids: ArchivedIds,
        *,
        generation: int | None = None,
        reason: str | None = None,
        force: bool = False,
        dry_run: bool = False,
    ) -> Moved:
        """Move archived events back into the outbox, pending: same id, same key, with their failure history."""
        numbers, rows = _parted(await self.resolve(ids))
        asked: dict[str, Any] = {
            "reason": arguments.reason(reason),
            "generation": generation,
            "force": force,
            "archive_ids": len(numbers),
            "rows": len(rows),
        }
        changing = self._session.changing("archive.replay", dry_run=dry_run, **asked)
        async with self._session.replaying(rows, numbers, dry_run=dry_run), changing as statements:
            into = await generation_for(statements, generation)
            how: dict[str, Any] = {"generation": into, "actor": self._session.actor, "reason": reason, "force": force}
            found = await archive.replay(statements, numbers, **how) if numbers else NOTHING
            found += await failed.replay(statements, rows, **how) if rows else NOTHING
            unknown = not await generations.known(statements, into)
            require_remembered(found)
        return moved("archive.replay", found, dry_run, generation=into, unknown_generation=unknown)

    async def discard(self, ids: ArchivedIds, *, reason: str | None = None, dry_run: bool = False) -> Moved:
        """Discard archived events; retention disposes of them when their time is over."""
        return await self._discard("archive.discard", ids, reason, dry_run)

    async def restore(self, ids: ArchivedIds, *, reason: str | None = None, dry_run: bool = False) -> Moved:
        """Undo a discard, while the events still have their payload."""
        return await self._discard("archive.restore", ids, reason, dry_run, restore=True)

    async def _discard(
        self, action: str, ids: ArchivedIds, reason: str | None, dry_run: bool, *, restore: bool = False
    ) -> Moved:
        numbers, rows = _parted(await self.resolve(ids))
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "archive_ids": len(numbers), "rows": len(rows)}
        how: dict[str, Any] = {"actor": self._session.actor, "reason": reason}
        in_place = failed.restore if restore else failed.discard
        async with self._session.changing(action, dry_run=dry_run, **asked) as statements:
            found = await archive.discard(statements, numbers, restore=restore, **how) if numbers else NOTHING
            found += await in_place(statements, rows, **how) if rows else NOTHING
        return moved(action, found, dry_run)


def _parted(named: list[int | UUID]) -> tuple[list[int], list[UUID]]:
    """Numbers of the archive, and ids of rows of the outbox."""
    return [each for each in named if isinstance(each, int)], [each for each in named if isinstance(each, UUID)]


def _require_bounded(count: int) -> None:
    if not 1 <= count <= arguments.MOST_AT_ONCE:
        problem = "is empty" if count == 0 else arguments.TOO_MANY
        remedy = f"name 1 to {arguments.MOST_AT_ONCE:,} rows or events, or a group; holdfast archive list has them"
        raise ConfigurationError("ids", problem, remedy)


def _unknown(id: object) -> NotFound:
    return NotFound("ids", f"{str(id)[:80]} is not in the archive", "copy a number from holdfast archive list")
