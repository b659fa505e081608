"""holdfast notify: when commits wake the workers."""

from __future__ import annotations

import asyncio
import json
from enum import StrEnum
from typing import Annotated

import typer

from holdfast.cli import environment
from holdfast.cli.environment import DsnOption, SchemaOption
from holdfast.postgres import bell


class Mode(StrEnum):
    """When a commit that published something sends a NOTIFY."""

    WHEN_IDLE = "when_idle"
    ALWAYS = "always"
    NEVER = "never"


def notify(
    mode: Annotated[
        Mode | None,
        typer.Argument(
            help="when_idle: while a worker sleeps (the default). always: with every commit, which makes producers "
            "wait for each other. never: workers only poll. Left out: say how it is set.",
        ),
    ] = None,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Set when publishing wakes the workers, for everybody who uses the schema."""
    name, address = environment.schema(schema), environment.dsn(dsn)
    if mode is None:
        now = before = asyncio.run(bell.mode(address, name))
    else:
        now, before = mode.value, asyncio.run(bell.set_mode(address, mode.value, name))
    if as_json:
        typer.echo(json.dumps({"schema": name, "notify": now, "before": before}))
    else:
        typer.echo(f"schema {name}: notify {now}" + (f" (it was {before})" if now != before else ""))
