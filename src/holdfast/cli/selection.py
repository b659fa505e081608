"""The selection of events for a command: by ids, by group, by filter or all. Every command resolves it here."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Annotated, Any
from uuid import UUID

import typer

from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Selection
from holdfast.operator.arguments import MOST_AT_ONCE


@dataclass(frozen=True, slots=True)
class Filter:
    """Options that select dead letters by their properties."""

    group: Annotated[
        str | None, typer.Option("--group", metavar="HANDLER/SIGNATURE", help="A group, as in failed groups.")
    ] = None
    handler: Annotated[str | None, typer.Option("--handler", metavar="NAME", help="Failed for this handler.")] = None
    event_type: Annotated[str | None, typer.Option("--event-type", metavar="TYPE", help="Of this event type.")] = None
    source: Annotated[str | None, typer.Option("--source", metavar="NAME", help="Published by this source.")] = None
    signature: Annotated[str | None, typer.Option("--signature", metavar="TEXT", help="With this error signature.")] = (
        None
    )
    failure_reason: Annotated[
        str | None, typer.Option("--failure-reason", help="max_deliveries, retry_terminal or rejected.")
    ] = None
    of_generation: Annotated[int | None, typer.Option("--of-generation", help="Failed in this generation.")] = None
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Failed since: 2h, 7d, or 2026-01-31T08:00 (UTC).")
    ] = None
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Failed before this time.")] = None

    def selection(self, everything: bool = False) -> Selection:
        """The selection that the options describe."""
        given: dict[str, Any] = {
            "handler": self.handler,
            "event_type": self.event_type,
            "source": self.source,
            "signature": self.signature,
            "reason": self.failure_reason,
            "generation": self.of_generation,
            "since": moment("--since", self.since),
            "until": moment("--until", self.until),
            "everything": everything,
        }
        if self.group is None:
            return Selection(**given)
        if self.handler or self.signature:
            raise ConfigurationError(
                "--group", "names a handler and a signature", "leave --handler and --signature out"
            )
        return Selection.group(self.group, **given)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Options that select dead letters by their ids, or all of them."""

    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Ids of failed rows, or of events.", show_default=False)
    ] = None
    ids_from: Annotated[
        str | None, typer.Option("--ids-from", metavar="FILE", help="Read ids from a file, one per line; - is stdin.")
    ] = None
    everything: Annotated[bool, typer.Option("--all", help="Every dead letter.")] = False


@dataclass(frozen=True, slots=True)
class ChosenArchived:
    """Options that select archived events by their numbers, by their group or by their handler."""

    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Numbers of archived rows, or ids of events.", show_default=False),
    ] = None
    group: Annotated[
        str | None, typer.Option("--group", metavar="HANDLER/SIGNATURE", help="A group, as in archive groups.")
    ] = None
    handler: Annotated[str | None, typer.Option("--handler", metavar="NAME", help="Failed for this handler.")] = None


@dataclass(frozen=True, slots=True)
class FailedSelection:
    """Either ids as they were given, or a selection."""

    ids: list[str] | None
    selection: Selection | None

    async def rows(self, operator: Operator, *, discarded: bool = False) -> list[UUID]:
        """Ids of the selected rows, among the dead letters or among the discarded ones."""
        if self.selection is not None:
            return await operator.failed.select(self.selection, discarded=discarded)
        return await operator.failed.resolve(self.ids or [])


def failed_selection(chosen: Chosen, which: Filter, *, archived: bool = False) -> FailedSelection:
    """The dead letters that the options of a command select; `archived`: in the archive."""
    ids, selection = _ids(chosen), replace(which.selection(chosen.everything), archived=archived)
    if ids is None:
        return FailedSelection(None, selection)
    if selection.criteria or chosen.everything:
        raise ConfigurationError("ids", "are given together with a filter", "give one of them")
    return FailedSelection(ids, None)


async def archived_rows(operator: Operator, chosen: ChosenArchived) -> list[int | UUID]:
    """Numbers of the archived events that the options of a command select, as `operator.archive.resolve` does."""
    if chosen.group is None and chosen.handler is None:
        return await operator.archive.resolve(chosen.ids or [])
    if chosen.ids:
        raise ConfigurationError("ids", "are given together with a group or a handler", "give one of them")
    if chosen.group is not None and chosen.handler is not None:
        raise ConfigurationError("--group", "names a handler and a signature", "leave --handler out")
    return [*await operator.archive.select(chosen.group, handler=chosen.handler)]


def moment(option: str, text: str | None) -> datetime | None:
    """A time: now, 90s, 15m, 2h, 7d or 2w ago, or a date and time, in UTC unless it has a time zone."""
    if text is None:
        return None
    if text == "now":
        return datetime.now(UTC)
    if ago := re.fullmatch(r"([0-9]{1,6})([smhdw])", text):
        units = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
        try:
            return datetime.now(UTC) - timedelta(seconds=int(ago[1]) * units[ago[2]])
        except OverflowError:
            pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        remedy = "write 2h, 7d or 2026-01-31T08:00+01:00"
        raise ConfigurationError(option, f"{text[:80]!r} is not a time", remedy) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _ids(chosen: Chosen) -> list[str] | None:
    if chosen.ids_from is None:
        return chosen.ids or None
    if chosen.ids:
        raise ConfigurationError("--ids-from", "is given together with ids", "give one of them")
    try:
        with nullcontext(sys.stdin) if chosen.ids_from == "-" else open(chosen.ids_from, encoding="utf-8") as lines:
            # One more than are allowed, so that too many are refused and not cut.
            return [line.strip() for line in islice(filter(str.strip, lines), MOST_AT_ONCE + 1)]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError("--ids-from", f"cannot be read: {error}", "name a file of ids") from None
