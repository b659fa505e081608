"""holdfast failed: dead letters, and what can be done about them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import typer

from holdfast.cli import misspelt, output, several, timeline
from holdfast.cli.command_group import command_group
from holdfast.cli.editor import edited
from holdfast.cli.groups import show_groups, show_histograms
from holdfast.cli.options import (
    Change,
    ForceOption,
    GenerationOption,
    JsonOption,
    LimitOption,
    PayloadOption,
    Target,
    Where,
    spread,
)
from holdfast.cli.selection import Chosen, FailedSelection, Filter, failed_selection
from holdfast.cli.unmoved import print_archived, print_unmoved
from holdfast.errors import ConfigurationError, NothingSelected
from holdfast.operator import Edited, FailedEvent, FailureGroups, FailureHistograms, Moved, Operator
from holdfast.operator.arguments import MOST_AT_ONCE
from holdfast.operator.encoding import plain

# A replay of more rows than this should begin with a few of them.
PLAN_FROM = 1_000

app = command_group("Dead letters: list, replay, discard or correct them.")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of a failed row, or of an event.")]


# --- reading ---


@app.command("list")
@spread
def list_(
    where: Where,
    which: Filter,
    limit: LimitOption = 50,
    discarded: Annotated[bool, typer.Option("--discarded", help="Discarded ones, which can be restored.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, the newest first."""
    selection = which.selection()

    async def read(operator: Operator) -> _Page:
        found = await operator.failed.page(selection, limit=limit, discarded=discarded)
        hint = await misspelt.hinted(operator, selection.handler, found)
        return _Page(found, 0 if discarded else await operator.archive.count(selection.handler), hint)

    if where.several:
        _list_each(where.run_in_each(read), limit, as_json)
        return
    found, archived, hint = where.run(read)
    misspelt.point_out_hint(hint)
    if as_json:
        output.print_json(found)
        output.print_left_out(found, limit, as_json=True)
        print_archived(archived, selection.handler, as_json=True)
        return
    output.print_table(_HEADERS, map(_row, found))
    output.print_left_out(found, limit)
    print_archived(archived, selection.handler)


class _Page(NamedTuple):
    """Dead letters of one database, how many are in its archive, and what to say of a handler that it does not know."""

    found: list[FailedEvent]
    archived: int
    hint: str | None


_HEADERS = ("id", "failed at", "handler", "event type", "reason", "attempts", "cycles", "raised at", "error")


def _row(event: FailedEvent) -> tuple[object, ...]:
    return (
        event.id,
        event.failed_at,
        event.handler_name,
        event.event_type,
        event.failure_reason,
        event.attempts,
        event.cycles,
        event.raised_at,
        output.first_line(event.last_error),
    )


def _list_each(found: Mapping[str, _Page | BaseException], limit: int, as_json: bool) -> None:
    """List the newest of several databases, each with the name of its own."""
    pages = several.read(found)
    misspelt.point_out_in_each({name: page.hint for name, page in pages.items()})
    events = [(name, event) for name, page in pages.items() for event in page.found]
    newest = sorted(events, key=lambda each: each[1].failed_at, reverse=True)[:limit]
    if as_json:
        output.print_json([{"database": name, **plain(event)} for name, event in newest])
    elif not newest and len(pages) < len(found):  # "none" alone would be taken for all of them
        if pages:
            output.print_line(f"none in {', '.join(pages)}", "dim")
    else:
        output.print_table(("database", *_HEADERS), [(name, *_row(event)) for name, event in newest])
    output.print_left_out(newest, limit, as_json=as_json)
    archived = {name: page.archived for name, page in pages.items() if page.archived}
    if archived and not as_json:
        output.print_line(f"in the archive: {output.shown(archived)}", "yellow")
    several.end(found)


@app.command("groups")
@spread
def groups(where: Where, which: Filter, as_json: JsonOption = False) -> None:
    """Group dead letters by handler and cause."""
    selection = which.selection()

    async def read(operator: Operator) -> tuple[FailureGroups, int]:
        found = await operator.failed.groups(selection)
        await misspelt.point_out(operator, selection.handler, found.groups)
        return found, await operator.archive.count(selection.handler)

    found, archived = where.run(read)
    show_groups(found, as_json)
    print_archived(archived, selection.handler, as_json=as_json)


@app.command("histogram")
@spread
def histogram(
    where: Where,
    group: Annotated[
        str | None, typer.Option("--group", metavar="HANDLER/SIGNATURE", help="A group, as in failed groups.")
    ] = None,
    handler: Annotated[str | None, typer.Option("--handler", metavar="NAME", help="Failed for this handler.")] = None,
    hours: Annotated[int, typer.Option("--hours", help="How far to look back.")] = 24,
    steps: Annotated[int, typer.Option("--steps", help="Into how many steps of time.")] = 24,
    as_json: JsonOption = False,
) -> None:
    """Show when the dead letters of each group failed, the oldest step first."""
    selection = Filter(group=group, handler=handler).selection()

    async def read(operator: Operator) -> FailureHistograms:
        found = await operator.failed.histogram(selection, hours=hours, steps=steps)
        await misspelt.point_out(operator, selection.handler, found.groups)
        return found

    show_histograms(where.run(read), as_json)


@app.command("show")
@spread
def show(where: Where, id: IdArgument, payload: PayloadOption = False, as_json: JsonOption = False) -> None:
    """Show a dead letter: its error, earlier cycles, other deliveries, and the actions of operators."""
    timeline.show(where.run(lambda operator: operator.events.detail(id, payload=payload)), as_json)


@app.command("export")
@spread
def export(where: Where, which: Filter, payload: PayloadOption = False) -> None:
    """Write dead letters as JSON lines."""

    async def write(operator: Operator) -> None:
        async for each in operator.failed.pages(which.selection(), payload=payload):
            output.print_json(each, indent=None)

    where.run(write)


@app.command("note")
@spread
def note(
    where: Target,
    group: Annotated[str, typer.Argument(metavar="HANDLER/SIGNATURE", help="The group, as in failed groups.")],
    text: Annotated[str | None, typer.Argument(help="The note. Left out: the note is removed.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing.")] = False,
) -> None:
    """Set or remove the note of a group of failures."""
    noted = where.run(lambda operator: operator.failed.note(group, text, dry_run=dry_run))
    output.print_line(f"{group}: {'noted' if noted else 'no note'}{' (dry run)' if dry_run else ''}")


# --- changing ---


@app.command("replay")
@spread
def replay(
    where: Target,
    chosen: Chosen,
    which: Filter,
    change: Change,
    generation: GenerationOption = None,
    force: ForceOption = False,
) -> None:
    """Put dead letters back to pending: by id, by group or by filter."""
    selected = failed_selection(chosen, which)

    async def act(operator: Operator) -> Moved:
        rows = await _rows(selected, operator, change)
        if len(rows) > PLAN_FROM and selected.selection is not None:
            raise ConfigurationError(
                "selection",
                f"matches {_many(len(rows))} dead letters, more than {PLAN_FROM:,}",
                "use a replay plan, which begins with a few: holdfast plans create",
            )
        if len(rows) > 1:
            change.confirm(f"Replay {output.events(len(rows))}?")
        options: dict[str, Any] = {"generation": generation, "force": force, "selection": selected.selection}
        return await operator.failed.replay(rows, **options, reason=change.reason, dry_run=change.dry_run)

    _show_moved(where.run(act), change, "replayed")


@app.command("discard")
@spread
def discard(where: Target, chosen: Chosen, which: Filter, change: Change) -> None:
    """Discard dead letters. They can be restored until retention disposes of them."""
    selected = failed_selection(chosen, which)

    async def act(operator: Operator) -> Moved:
        rows = await _rows(selected, operator, change)
        change.confirm(f"Discard {_newest(len(rows))}{output.events(len(rows))}?")
        options: dict[str, Any] = {"reason": change.reason, "dry_run": change.dry_run}
        return await operator.failed.discard(rows, **options, selection=selected.selection)

    _show_moved(where.run(act), change, "discarded")


@app.command("restore")
@spread
def restore(where: Target, chosen: Chosen, which: Filter, change: Change) -> None:
    """Put discarded events back among the dead letters: by id, by group or by filter."""
    selected = failed_selection(chosen, which)

    async def act(operator: Operator) -> Moved:
        rows = await _rows(selected, operator, change, discarded=True)
        if len(rows) > 1:
            change.confirm(f"Restore {_newest(len(rows))}{output.events(len(rows))}?")
        options: dict[str, Any] = {"reason": change.reason, "dry_run": change.dry_run}
        return await operator.failed.restore(rows, **options, selection=selected.selection)

    _show_moved(where.run(act), change, "restored")


@app.command("edit")
@spread
def edit(
    where: Target,
    id: IdArgument,
    change: Change,
    payload: Annotated[
        str | None,
        typer.Option(
            "--payload",
            metavar="FILE",
            help="A file with the corrected payload; - is stdin. Left out: an editor opens.",
        ),
    ] = None,
    generation: GenerationOption = None,
) -> None:
    """Publish a corrected event in place of a failed one, for the handler that failed."""
    corrected = _parsed(_read(payload) if payload is not None else _edited(where, id))

    async def act(operator: Operator) -> Edited:
        change.confirm(f"Publish a corrected event in place of {id}?")
        options: dict[str, Any] = {"generation": generation, "reason": change.reason, "dry_run": change.dry_run}
        return await operator.failed.edit(id, corrected, **options)

    done = where.run(act)
    if change.as_json:
        output.print_json(done)
        return
    output.print_line(
        f"{done.id} {change.would}discarded; {done.new_id} {change.would}published for {done.handler_name}, "
        f"generation {done.generation}"
    )


# --- output and input ---


async def _rows(
    selected: FailedSelection, operator: Operator, change: Change, *, discarded: bool = False
) -> list[UUID]:
    """The selected rows. None of a known handler, or none at all, is no mistake: the command ends well."""
    try:
        return await selected.rows(operator, discarded=discarded)
    except NothingSelected as nothing:
        handler = None if selected.selection is None else selected.selection.handler
        if selected.selection is None or (selected.selection.criteria and handler is None):
            raise
        if handler is not None and not await operator.handlers.known(handler):
            raise
        if change.as_json:
            output.print_json({"moved": [], "left": {}, "dry_run": change.dry_run})
        else:
            output.print_line(f"none: the selection {nothing.problem}", "dim")
            if not discarded:
                print_archived(await operator.archive.count(handler), handler)
        raise typer.Exit(0) from None


def _show_moved(done: Moved, change: Change, verb: str) -> None:
    if change.as_json:
        output.print_json(done)
    else:
        where_to = "" if done.generation is None else f" into generation {done.generation}"
        until = "" if done.purge_at is None else f"; restorable until {done.purge_at:%Y-%m-%d %H:%M} UTC"
        output.print_line(f"{output.events(done.count)} {change.would}{verb}{where_to}{until}")
        if change.dry_run:
            _list_ids(done)
        print_unmoved(done.left)
        if done.warning:
            output.print_line(done.warning, "yellow")
        if done.count == MOST_AT_ONCE:
            output.print_line("there may be more, older ones: run it again", "yellow")
    if not done.moved:
        raise typer.Exit(1)


def _list_ids(done: Moved) -> None:
    for id in done.moved[:_LISTED]:
        output.print_line(f"  {id}", "dim")
    if done.count > _LISTED:
        output.print_line(f"  and {done.count - _LISTED:,} more; --json lists them all", "dim")


_LISTED = 10  # ids that a dry run shows


def _newest(count: int) -> str:
    return "the newest " if count == MOST_AT_ONCE else ""


def _many(count: int) -> str:
    return f"{count:,}" if count < MOST_AT_ONCE else f"{count:,} or more"


def _read(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError("--payload", f"cannot be read: {error}", "name a file with a JSON object") from None


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigurationError("--payload", f"is not JSON: {error}", "write a JSON object") from None
    if not isinstance(found, dict):
        raise ConfigurationError("--payload", f"is {type(found).__name__}, not an object", 'wrap it: {"value": ...}')
    return found


def _edited(where: Target, id: str) -> str:
    if not sys.stdin.isatty():
        raise ConfigurationError("--payload", "is missing", "name a file with the corrected payload, or - for stdin")
    found = where.run(lambda operator: operator.events.detail(id, payload=True))
    text = edited(json.dumps(found.payload, indent=2, ensure_ascii=False), suffix=".json")
    if text is None:
        output.print_line("nothing was changed")
        raise typer.Exit(1)
    return text
