"""holdfast audit: who did what, when and why."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.cli.options import JsonOption, LimitOption, Where, moment, spread
from holdfast.operator import audit as trail


@spread
def audit(
    where: Where,
    limit: LimitOption = 50,
    actor: Annotated[str | None, typer.Option("--actor", metavar="NAME", help="Only what this one did.")] = None,
    action: Annotated[
        str | None, typer.Option("--action", metavar="NAME", help="Only this, like replay, or plan for all of plans.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Since: 2h, 7d, or 2026-01-31T08:00 (UTC).")
    ] = None,
    steps: Annotated[bool, typer.Option("--steps", help="With every single step of plans.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List what operators did, the latest first. Times are UTC."""
    found = where.run(
        lambda operator: trail.trail(
            operator, limit=limit, actor=actor, action=action, since=moment("--since", since), steps=steps
        )
    )
    if as_json:
        output.print_json(found)
        return
    output.print_table(
        ("at", "actor", "login", "action", "counts", "arguments", "reason"),
        [(line.at, line.actor, line.login, line.action, line.counts, line.arguments, line.reason) for line in found],
    )
