"""holdfast partitions: whether the outbox is partitioned by time; partitioning it, and going back."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.cli.command_group import command_group
from holdfast.cli.options import Change, JsonOption, Target, Where, spread
from holdfast.operator import Operator, PartitionReport, PartitionStep

app = command_group("Partitions of the outbox by time.")

KINDS = {
    "first": "the table as it was",
    "period": "-",
    "default": "everything else",
    "left": "still to be emptied",
}


class Every(StrEnum):
    """How long the time of one partition is."""

    DAY = "day"
    WEEK = "week"


@app.command()
@spread
def status(where: Where, as_json: JsonOption = False) -> None:
    """Show whether the outbox is partitioned, and its partitions."""
    _print(where.run(lambda operator: operator.partitions.status()), as_json=as_json)


@app.command()
@spread
def enable(
    target: Target,
    change: Change,
    every: Annotated[Every, typer.Option("--every", help="The time that one partition holds.")] = Every.WEEK,
) -> None:
    """Partition the outbox by time, beside running producers and workers. Run again, it goes on where it ended."""

    async def act(operator: Operator) -> PartitionReport:
        if (await operator.partitions.status()).state != "partitioned":
            change.confirm(f"Partition {operator.schema}.outbox by {every.value}?")
        return await operator.partitions.enable(every.value, reason=change.reason, dry_run=change.dry_run, on_step=_say)

    found = target.run(act)
    if change.dry_run and not change.as_json:
        output.print_line(f"nothing is in the way of partitions by {every.value}")
    _print(found, as_json=change.as_json)


@app.command()
@spread
def disable(target: Target, change: Change) -> None:
    """Make the outbox one table again, beside running producers and workers. Run again, it goes on where it ended."""

    async def act(operator: Operator) -> PartitionReport:
        if (await operator.partitions.status()).state == "partitioned":
            change.confirm(f"Make {operator.schema}.outbox one table?")
        return await operator.partitions.disable(reason=change.reason, dry_run=change.dry_run, on_step=_say)

    _print(target.run(act), as_json=change.as_json)


def _say(step: PartitionStep) -> None:
    print(output.clean(step.text), file=sys.stderr)


def _print(found: PartitionReport, *, as_json: bool) -> None:
    if as_json:
        output.print_json(found)
        return
    if found.partitions:
        output.print_table(
            ("partition", "from (UTC)", "to (UTC)", "rows", "MB", "what"),
            [
                (
                    each.name,
                    f"{each.lower_at:%Y-%m-%d}" if each.lower_at else "-",
                    f"{each.upper_at:%Y-%m-%d}" if each.upper_at else "-",
                    "?" if each.rows is None else f"{each.rows:,}",
                    f"{each.bytes / 1e6:,.1f}",
                    KINDS[each.kind],
                )
                for each in found.partitions
            ],
        )
    output.print_hint(_in_words(found), "")
    if found.in_default:
        output.print_hint(
            f"! {output.counted(found.in_default, 'row')} of outbox_default should be in a partition: holdfast doctor"
        )


def _in_words(found: PartitionReport) -> str:
    match found.state:
        case "partitioned":
            return f"the outbox is partitioned by {found.every}, up to {found.ends:%Y-%m-%d}"
        case "converting":
            return (
                f"the outbox is not partitioned yet, and refuses ids from {found.bound:%Y-%m-%d} on; "
                "disable goes back, and to go on: holdfast partitions enable"
            )
        case "returning":
            return "the outbox is one table again, but for rows that are still to be moved: holdfast partitions disable"
    return "the outbox is one table; to make partitions of it: holdfast partitions enable"
