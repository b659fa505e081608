"""holdfast audit: who did what, when and why."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.cli.options import JsonOption, LimitOption, Where, spread
from holdfast.cli.selection import moment
from holdfast.errors import ConfigurationError
from holdfast.operator import AuditLine


@spread
def audit(
    where: Where,
    limit: LimitOption = 50,
    actor: Annotated[str | None, typer.Option("--actor", metavar="NAME", help="Only actions of this actor.")] = None,
    action: Annotated[
        str | None,
        typer.Option(
            "--action", metavar="NAME", help="Only this action, like replay, or plan for all actions on replay plans."
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Since: 2h, 7d, or 2026-01-31T08:00 (UTC).")
    ] = None,
    event: Annotated[
        str | None, typer.Option("--event", metavar="ID", help="Only what was done to this event; no other filter.")
    ] = None,
    steps: Annotated[bool, typer.Option("--steps", help="Include every single step of replay plans.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the actions of operators, the latest first. Times are UTC."""
    if event is not None:
        if any((actor, action, since, steps)):
            raise ConfigurationError("--event", "is given together with a filter", "give one of them")
        found = where.run(lambda operator: operator.audit.of_event(event, limit=limit))
    else:
        found = where.run(
            lambda operator: operator.audit.page(
                limit=limit, actor=actor, action=action, since=moment("--since", since), steps=steps
            )
        )
    if as_json:
        output.print_json(found)
        output.print_left_out(found, limit, as_json=True)
        return
    output.print_table(
        ("at", "actor", "login", "action", "events", "counts", "arguments", "reason"),
        [
            (line.at, line.actor, line.login, line.action, _events(line), line.counts, line.arguments, line.reason)
            for line in found
        ],
    )
    output.print_left_out(found, limit)


def _events(line: AuditLine) -> str:
    """The id of the first event, and how many others there were."""
    if line.first_id is None:
        return "-"
    others = (line.rows or 1) - 1
    return f"{line.first_id} and {others:,} more" if others else line.first_id
