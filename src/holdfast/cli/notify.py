"""holdfast notify: when commits wake the workers."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

from holdfast.cli import environment, output
from holdfast.cli.options import JsonOption, ReasonOption, Target, spread
from holdfast.operator import arguments
from holdfast.postgres.wakeup import mode as wakeup_mode


class Mode(StrEnum):
    """When a commit that published something sends a NOTIFY."""

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
            "wait for each other. never: workers only poll. Left out: say how it is set.",
        ),
    ] = None,
    reason: ReasonOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Set when publishing wakes the workers, for everybody who uses the schema."""
    name, address = environment.schema(where.schema), environment.dsn(where.dsn)
    if mode is None or dry_run:
        before = asyncio.run(wakeup_mode.mode(address, name))
    else:
        who, why = arguments.line("actor", where.who), arguments.reason(reason)
        before = asyncio.run(wakeup_mode.set_mode(address, mode.value, name, actor=who, reason=why))
    now = before if mode is None else mode.value
    if as_json:
        output.print_json({"schema": name, "notify": now, "before": before, "dry_run": dry_run}, indent=None)
        return
    change = f" (it {'is' if dry_run else 'was'} {before})" if now != before else ""
    output.print_line(f"schema {name}: {'would be ' if dry_run else ''}notify {now}{change}")
