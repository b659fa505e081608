"""holdfast archive: dead letters that workers with --dead-letters archive have moved out of the outbox."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from holdfast.cli.command_group import command_group
from holdfast.cli.groups import show_groups
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
from holdfast.cli.output import (
    events,
    first_line,
    print_hint,
    print_json,
    print_left_out,
    print_line,
    print_table,
    shown,
)
from holdfast.cli.selection import ChosenArchived, archived_rows
from holdfast.cli.unmoved import print_unmoved
from holdfast.operator import Moved, Operator

_SHOWN_BELOW = ("failure_history", "traceback", "raised_at", "others")

app = command_group("Dead letters in the archive.")

NumbersArgument = Annotated[
    list[str], typer.Argument(metavar="ID...", help="Numbers of archived rows, or ids of events.", show_default=False)
]


@app.command("list")
@spread
def list_(
    where: Where,
    handler: Annotated[str | None, typer.Option("--handler", metavar="NAME", help="Failed for this handler.")] = None,
    discarded: Annotated[bool, typer.Option("--discarded", help="Only discarded ones.")] = False,
    limit: LimitOption = 50,
    before: Annotated[int | None, typer.Option("--before", help="Older than this number: the next page.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List archived dead letters, the newest first."""
    found = where.run(
        lambda operator: operator.archive.page(handler=handler, discarded=discarded, limit=limit, before=before)
    )
    if as_json:
        print_json(found)
        print_left_out(found, limit, as_json=True)
        return
    print_table(
        ["number", "failed at", "handler", "event type", "reason", "deliveries", "raised at", "error", "event"],
        [
            (
                each.id,
                each.failed_at,
                each.queue,
                each.event_type,
                each.failure_reason,
                each.deliveries_count,
                each.raised_at,
                first_line(each.last_exception),
                each.event_id,
            )
            for each in found
        ],
    )
    print_left_out(found, limit)


@app.command()
@spread
def groups(where: Where, as_json: JsonOption = False) -> None:
    """Group archived dead letters by handler and cause."""
    show_groups(where.run(lambda operator: operator.archive.groups()), as_json)


@app.command()
@spread
def show(
    where: Where,
    id: Annotated[str, typer.Argument(metavar="ID", help="Number of an archived row, or id of an event.")],
    payload: PayloadOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show one archived event."""
    found = where.run(lambda operator: operator.archive.detail(id, payload=payload))
    if as_json:
        print_json(found)
        return
    print_line(f"{'group':<17} {shown(found.group)}")
    for name, value in asdict(found).items():
        if name not in _SHOWN_BELOW and (payload or name not in ("payload", "headers")):
            print_line(f"{name:<17} {shown(value)}")
    for line in (found.traceback or "").splitlines():
        print_line(f"  {line}", "dim")
    for cycle in found.failure_history:
        print_line(
            f"replayed by {cycle.replayed_by} at {shown(cycle.replayed_at)} after {cycle.attempts} attempts: "
            f"{first_line(cycle.last_error)}",
            "dim",
        )
    for number in found.others:
        print_hint(f"the archive has another delivery of this event: holdfast archive show {number}")


@app.command()
@spread
def replay(
    target: Target,
    chosen: ChosenArchived,
    change: Change,
    generation: GenerationOption = None,
    force: ForceOption = False,
) -> None:
    """Move archived dead letters back into the outbox, to be delivered again."""

    async def act(operator: Operator) -> Moved:
        numbers = await archived_rows(operator, chosen)
        change.confirm(f"Replay {len(numbers):,} from the archive?")
        options: dict[str, Any] = {"generation": generation, "force": force}
        return await operator.archive.replay(numbers, **options, reason=change.reason, dry_run=change.dry_run)

    _show_moved(target.run(act), change, "replayed")


@app.command()
@spread
def discard(target: Target, chosen: ChosenArchived, change: Change) -> None:
    """Discard archived dead letters. They can be restored until retention disposes of them."""

    async def act(operator: Operator) -> Moved:
        numbers = await archived_rows(operator, chosen)
        change.confirm(f"Discard {len(numbers):,} of the archive?")
        return await operator.archive.discard(numbers, reason=change.reason, dry_run=change.dry_run)

    _show_moved(target.run(act), change, "discarded")


@app.command()
@spread
def restore(target: Target, change: Change, ids: NumbersArgument) -> None:
    """Undo a discard."""
    moved = target.run(lambda operator: operator.archive.restore(ids, reason=change.reason, dry_run=change.dry_run))
    _show_moved(moved, change, "restored")


def _show_moved(moved: Moved, change: Change, done: str) -> None:
    if change.as_json:
        print_json(moved)
    else:
        where_to = "" if moved.generation is None else f" into generation {moved.generation}"
        print_line(f"{events(moved.count)} {change.would}{done}{where_to}")
        print_unmoved(moved.left, archive=True)
        if moved.warning:
            print_line(moved.warning, "yellow")
    if not moved.moved:
        raise typer.Exit(1)
