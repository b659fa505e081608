"""What an operator does with dead letters and events: replay, discard, restore, correct, note, cancel.

Every one is a transaction of its own with its line in the audit. A dry run does everything, says what became of each
row, and keeps nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.errors import ConfigurationError, PayloadError
from holdfast.ids import uuid7
from holdfast.operator import arguments, failures
from holdfast.operator.selection import Selection
from holdfast.operator.session import Operator, Refused
from holdfast.payload import encode_payload


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of the rows that were named. Those that were left are counted by what they are.

    `busy`: somebody else was changing the row at that moment. `too_old`: the inbox may have forgotten that the handler
    has handled the event; a replay moves it with force only.
    """

    action: str
    moved: list[UUID]
    left: dict[str, int] = field(default_factory=dict)
    dry_run: bool = False
    generation: int | None = None  # of a replay: where to
    purge_at: datetime | None = None  # of what was discarded: when the first of it is disposed of
    unknown_generation: bool = False  # of a replay: no deployment and no living worker has that generation

    @property
    def count(self) -> int:
        return len(self.moved)

    @property
    def warning(self) -> str | None:
        """What whoever did this should know."""
        if not self.unknown_generation:
            return None
        return (
            f"generation {self.generation} is no deployment and no worker serves it: the events wait until one does; "
            "holdfast generations list has those that are known"
        )


@dataclass(frozen=True, slots=True)
class Edited:
    """A dead letter, and the event that takes its place."""

    id: UUID
    new_id: UUID
    handler_name: str
    generation: int
    dry_run: bool = False


async def replay(
    operator: Operator,
    ids: Iterable[UUID | str],
    *,
    generation: int | None = None,
    reason: str | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> Moved:
    """Put failed events back to pending, in place: same id, same key, attempts from zero."""
    rows = await failures.resolve(operator, ids)
    asked = {"reason": arguments.reason(reason), "generation": generation, "force": force, "rows": len(rows)}
    async with operator.changing("replay", dry_run=dry_run, **asked):
        into = await operator.generation(generation)
        found = await operator.fetch(
            "replay_rows", ids=rows, generation=into, actor=operator.actor, reason=reason, force=force
        )
        moved = _moved("replay", found, dry_run, generation=into, unknown_generation=not await operator.knows(into))
        if not moved.moved and set(moved.left) == {"too_old"}:
            raise Refused(
                f"{len(rows)} failed before what the inbox remembers: their handlers may have handled them",
                "look at them with holdfast failed show, and replay them with --force",
            )
    return moved


async def discard(
    operator: Operator, ids: Iterable[UUID | str], *, reason: str | None = None, dry_run: bool = False
) -> Moved:
    """Set dead letters aside. They can be restored until `purge_at`."""
    rows = await failures.resolve(operator, ids)
    async with operator.changing("discard", dry_run=dry_run, reason=arguments.reason(reason), rows=len(rows)):
        found = await operator.fetch("discard_rows", ids=rows, actor=operator.actor, reason=reason)
    purges = [row["purge_at"] for row in found if row["purge_at"] is not None]
    return _moved("discard", found, dry_run, purge_at=min(purges, default=None))


async def restore(
    operator: Operator, ids: Iterable[UUID | str], *, reason: str | None = None, dry_run: bool = False
) -> Moved:
    """Put what was discarded back among the dead letters."""
    rows = await failures.resolve(operator, ids)
    async with operator.changing("restore", dry_run=dry_run, reason=arguments.reason(reason), rows=len(rows)):
        found = await operator.fetch("restore_rows", ids=rows, actor=operator.actor, reason=reason)
    return _moved("restore", found, dry_run)


async def edit(
    operator: Operator,
    id: UUID | str,
    payload: dict[str, Any],
    *,
    generation: int | None = None,
    reason: str | None = None,
    dry_run: bool = False,
) -> Edited:
    """Publish a corrected event for the handler that failed, and set the dead letter aside.

    The new event has an id and a key of its own; its causation id is the event it corrects.
    """
    try:
        text = encode_payload(payload)
    except PayloadError as error:
        raise ConfigurationError(error.field, error.problem, error.remedy) from None
    rows = await failures.resolve(operator, [id])
    if len(rows) > 1:
        raise ConfigurationError(
            "id", f"{id} failed for {len(rows)} handlers", "name one: holdfast failed show has them"
        )
    new_id = uuid7()
    async with operator.changing("edit", dry_run=dry_run, reason=arguments.reason(reason), id=rows[0]):
        into = await operator.generation(generation)
        values = {"id": rows[0], "new_id": new_id, "payload": text, "generation": into}
        outcome = (await operator.fetch("edit_row", **values, actor=operator.actor, reason=reason))[0][0]
        if outcome != "moved":
            raise Refused(f"the event is {outcome}, not failed", "look at it: holdfast events show " + str(id))
        (found,) = await operator.fetch("read_handler", id=new_id)
    return Edited(rows[0], new_id, found["handler_name"], into, dry_run)


async def note(operator: Operator, group: str, text: str | None, *, dry_run: bool = False) -> bool:
    """Write down what is known about a group of failures, or take it away; whether there is a note now."""
    wanted = Selection.group(group)
    if text is not None:
        arguments.line("note", text, 2_000)
        await failures.select(operator, wanted, most=1)
    async with operator.changing("note", dry_run=dry_run):
        values = {"handler": wanted.handler, "signature": wanted.signature, "note": text}
        return bool((await operator.fetch("note_group", **values, actor=operator.actor))[0][0])


async def cancel(operator: Operator, id: UUID | str, *, reason: str | None = None, dry_run: bool = False) -> Moved:
    """Stop an event that waits or runs, for every handler if it was split. A handler that runs is told to end."""
    asked = arguments.identity(id)
    stopped: list[UUID] = []
    async with operator.changing("cancel", dry_run=dry_run, reason=arguments.reason(reason), id=asked):
        rows = await _deliveries(operator, asked)
        while True:
            for row in rows:
                if (await operator.fetch("cancel_row", id=row, actor=operator.actor, reason=reason))[0][0]:
                    stopped.append(row)
            seen, rows = rows, await _deliveries(operator, asked)
            if stopped or rows == seen:
                break  # else it was split at this very moment
    left = len(rows) - len(stopped)
    return Moved("cancel", stopped, {"settled": left} if left else {}, dry_run)


async def _deliveries(operator: Operator, asked: UUID) -> list[UUID]:
    rows = [row["id"] for row in await operator.fetch("resolve_deliveries", id=asked)]
    if not rows:
        raise ConfigurationError("id", f"{asked} names no event", "holdfast events list has those that are open")
    return rows


def _moved(action: str, rows: list[asyncpg.Record], dry_run: bool, **others: Any) -> Moved:
    left = Counter(row["outcome"] for row in rows if row["outcome"] != "moved")
    return Moved(action, [row["id"] for row in rows if row["outcome"] == "moved"], dict(left), dry_run, **others)
