"""holdfast events: the open ones, one with its history, and cancelling one."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli import output, timeline
from holdfast.cli.options import Change, JsonOption, LimitOption, PayloadOption, Target, Where, spread

app = typer.Typer(help="Events: list the open ones, show or cancel one.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of an event, or of one of its deliveries.")]


@app.command("list")
@spread
def list_(
    where: Where,
    limit: LimitOption = 50,
    event_type: Annotated[str | None, typer.Option("--event-type", metavar="TYPE", help="Of this event type.")] = None,
    handler: Annotated[str | None, typer.Option("--handler", metavar="NAME", help="Owed to this handler.")] = None,
    source: Annotated[str | None, typer.Option("--source", metavar="NAME", help="Published by this source.")] = None,
    generation: Annotated[int | None, typer.Option("--generation", help="Of this generation.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List some of the events that are pending or in flight."""
    found = where.run(
        lambda operator: operator.events.page(
            limit=limit, event_type=event_type, handler=handler, source=source, generation=generation
        )
    )
    if as_json:
        output.print_json(found)
        return
    output.print_table(
        ("id", "status", "event type", "lane", "due", "attempts", "channel", "generation", "last error"),
        [
            (
                *(e.id, e.status, e.event_type, e.route, e.available_at, e.attempts, e.channel, e.generation),
                output.first_line(e.last_error, 60),
            )
            for e in found
        ],
    )


@app.command("show")
@spread
def show(where: Where, id: IdArgument, payload: PayloadOption = False, as_json: JsonOption = False) -> None:
    """Show an event: its deliveries, their errors and cycles, its handlers, and the actions of operators."""
    timeline.show(where.run(lambda operator: operator.events.detail(id, payload=payload)), as_json)


@app.command("cancel")
@spread
def cancel(where: Target, id: IdArgument, change: Change) -> None:
    """Cancel an event that is pending or in flight."""
    change.confirm(f"Cancel 1 event, {id}?")
    done = where.run(lambda operator: operator.events.cancel(id, reason=change.reason, dry_run=change.dry_run))
    if change.as_json:
        output.print_json(done)
    else:
        several = f" for {done.count} handlers" if done.count > 1 else ""
        output.print_line(f"{id} {change.would}cancelled{several}" if done.moved else f"{id} is settled already")
    if not done.moved:
        raise typer.Exit(1)
