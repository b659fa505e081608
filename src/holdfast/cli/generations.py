"""holdfast generations: what each still has to do; beginning, retiring and moving one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.command_group import command_group
from holdfast.cli.options import Change, JsonOption, ReasonOption, Target, Where, spread
from holdfast.operator import Generation, MovedGeneration, Operator
from holdfast.operator.encoding import plain

app = command_group("Generations of the deployment.")

NumberArgument = Annotated[int, typer.Argument(metavar="NUMBER", help="The generation.")]


@app.command("list")
@spread
def list_(where: Where, as_json: JsonOption = False) -> None:
    """List generations with their backlog, their workers, and whether they can be retired."""
    found = where.run(lambda operator: operator.generations.all())
    if as_json:
        output.print_json(found)
        output.print_left_out(found, as_json=True)
        return
    output.print_table(
        ("generation", "label", "state", "open", "failed", "workers", "unserved channels", "can be retired"),
        [
            (
                g.generation,
                g.label,
                _state(g),
                g.open,
                g.failed,
                g.workers,
                _some(g.unserved),
                "retired already" if g.retired_at else f"no: {', '.join(g.in_the_way)}" if g.in_the_way else "yes",
            )
            for g in found
        ],
    )
    output.print_left_out(found)


@app.command("begin")
@spread
def begin(
    where: Target,
    label: Annotated[str | None, typer.Option(metavar="TEXT", help="What is deployed, like v1.4.2.")] = None,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
) -> None:
    """Begin a generation and print its number. Publishers that are given none use it from then on."""
    number = where.run(lambda operator: operator.generations.begin(label, reason=reason))
    if as_json:
        output.print_json({"generation": number, "label": label})
    else:
        output.print_line(str(number))


@app.command("retire")
@spread
def retire(
    where: Target,
    generation: NumberArgument,
    change: Change,
    force: Annotated[bool, typer.Option("--force", help="Retire it although events are open or workers live.")] = False,
) -> None:
    """Mark a generation as retired. Refused while it has open events or living workers."""

    async def act(operator: Operator) -> Generation:
        options: dict[str, Any] = {"force": force, "reason": change.reason}
        found = await operator.generations.retire(generation, dry_run=True, **options)
        change.confirm(f"Retire generation {generation}, which has {output.counted(found.open, 'open event')}?")
        return found if change.dry_run else await operator.generations.retire(generation, **options)

    found = where.run(act)
    if change.as_json:
        output.print_json(plain(found) | {"dry_run": change.dry_run})
    else:
        output.print_line(f"generation {generation} {change.would}retired")


@app.command("move")
@spread
def move(
    where: Target,
    generation: NumberArgument,
    to: Annotated[int, typer.Option("--to", metavar="NUMBER", help="The generation whose workers should handle them.")],
    change: Change,
    force: Annotated[
        bool, typer.Option("--force", help="Move them although no deployment and no living worker has that number.")
    ] = False,
) -> None:
    """Move the pending events of a generation to another one. Events in flight stay."""

    async def act(operator: Operator) -> MovedGeneration:
        options: dict[str, Any] = {"force": force, "reason": change.reason}
        found = await operator.generations.move(generation, to, **options, dry_run=True)
        change.confirm(f"Move {output.events(found.moved)} from generation {generation} to {to}?")
        return found if change.dry_run else await operator.generations.move(generation, to, **options)

    done = where.run(act)
    if change.as_json:
        output.print_json(done)
    else:
        output.print_line(f"{output.events(done.moved)} {change.would}moved from generation {generation} to {to}")
    if not done.moved:
        raise typer.Exit(1)


def _some(names: list[str], most: int = 10) -> list[str]:
    return names if len(names) <= most else [*names[:most], f"and {len(names) - most} more"]


def _state(found: Generation) -> str:
    if found.retired_at:
        return "retired"
    states = ["current"] * found.current + ["UNSERVED"] * bool(found.unserved)
    return ", ".join(states) or "-"
