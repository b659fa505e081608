"""holdfast notify: when commits wake the workers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.cli.options import JsonOption, ReasonOption, Target, spread
from holdfast.operator import Operator


class Mode(StrEnum):
    """When a commit that published events sends a NOTIFY."""

    WHEN_IDLE = "when_idle"
    ALWAYS = "always"
    NEVER = "never"


@spread
def notify(
    where: Target,
    mode: Annotated[
        Mode | None,
        typer.Argument(
            help="when_idle: while a worker sleeps (the default). always: with every commit, which makes producers "
            "wait for each other. never: workers only poll. Left out: show the mode.",
        ),
    ] = None,
    reason: ReasonOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show or set the wake-up mode: when publishing wakes the workers, for all users of the schema."""

    async def act(operator: Operator) -> tuple[str, str]:
        if mode is None or dry_run:
            return operator.schema, await operator.wakeup.mode()
        return operator.schema, await operator.wakeup.set_mode(mode.value, reason=reason)

    schema, before = where.run(act)
    now = before if mode is None else mode.value
    if as_json:
        output.print_json({"schema": schema, "wakeup_mode": now, "before": before, "dry_run": dry_run}, indent=None)
        return
    change = f" (it {'is' if dry_run else 'was'} {before})" if now != before else ""
    output.print_line(f"schema {schema}: {'would be ' if dry_run else ''}wake-up mode {now}{change}")
