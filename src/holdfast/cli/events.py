"""holdfast events: the open ones, one with its history, and cancelling one or many."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, cast

import typer

from holdfast.cli import output, timeline
from holdfast.cli.command_group import command_group
from holdfast.cli.options import Change, JsonOption, LimitOption, PayloadOption, Target, Where, spread
from holdfast.cli.unmoved import print_unmoved
from holdfast.errors import ConfigurationError
from holdfast.operator import Moved, OpenFilters, Operator
from holdfast.operator.arguments import MOST_AT_ONCE

app = command_group("Events: list the open ones, show one, cancel one or many.")

_ID = typer.Argument(metavar="ID", help="Id of an event, or of one of its deliveries.", show_default=False)
IdArgument = Annotated[str, _ID]
OptionalIdArgument = Annotated[str | None, _ID]


@dataclass(frozen=True, slots=True)
class OpenFilter:
    """Options that select open events."""

    event_type: Annotated[str | None, typer.Option("--event-type", metavar="TYPE", help="Of this event type.")] = None
    handler: Annotated[
        str | None,
        typer.Option("--handler", metavar="NAME", help="Owed to this handler; cancel: and to no other."),
    ] = None
    source: Annotated[str | None, typer.Option("--source", metavar="NAME", help="Published by this source.")] = None
    generation: Annotated[int | None, typer.Option("--generation", help="Of this generation.")] = None
    channel: Annotated[str | None, typer.Option("--channel", metavar="NAME", help="On this channel.")] = None
    route: Annotated[
        str | None,
        typer.Option("--route", metavar="ROUTE", help="On this route: a handler, or TARGET/TYPE, as in status."),
    ] = None

    @property
    def given(self) -> OpenFilters:
        return cast(OpenFilters, asdict(self))


@app.command("list")
@spread
def list_(where: Where, which: OpenFilter, limit: LimitOption = 50, as_json: JsonOption = False) -> None:
    """List some of the events that are pending or in flight."""
    found = where.run(lambda operator: operator.events.page(limit=limit, **which.given))
    if as_json:
        output.print_json(found)
        output.print_left_out(found, limit, as_json=True)
        return
    output.print_table(
        ("id", "status", "event type", "route", "due", "attempts", "channel", "generation", "last error"),
        [
            (
                e.id,
                e.status,
                e.event_type,
                e.route,
                e.available_at,
                e.attempts,
                e.channel,
                e.generation,
                output.first_line(e.last_error, 60),
            )
            for e in found
        ],
    )
    output.print_left_out(found, limit)


@app.command("show")
@spread
def show(where: Where, id: IdArgument, payload: PayloadOption = False, as_json: JsonOption = False) -> None:
    """Show an event: its deliveries, their errors and cycles, its handlers, and the actions of operators."""
    timeline.show(where.run(lambda operator: operator.events.detail(id, payload=payload)), as_json)


@app.command("cancel")
@spread
def cancel(where: Target, which: OpenFilter, change: Change, id: OptionalIdArgument = None) -> None:
    """Cancel an event that is pending or in flight, or all that a filter selects."""
    if id is None:
        _cancel_selected(where, which, change)
        return
    if which != OpenFilter():
        raise ConfigurationError("id", "is given together with a filter", "give one of them")
    change.confirm(f"Cancel 1 event, {id}?")
    done = where.run(lambda operator: operator.events.cancel(id, reason=change.reason, dry_run=change.dry_run))
    if change.as_json:
        output.print_json(done)
    else:
        several = f" for {done.count} handlers" if done.count > 1 else ""
        output.print_line(f"{id} {change.would}cancelled{several}" if done.moved else f"{id} is settled already")
        print_unmoved(done.left)
    if not done.moved:
        raise typer.Exit(1)


def _cancel_selected(where: Target, which: OpenFilter, change: Change) -> None:
    async def act(operator: Operator) -> Moved:
        rows = await operator.events.select(**which.given)
        first = "the first " if len(rows) == MOST_AT_ONCE else ""
        change.confirm(f"Cancel {first}{output.events(len(rows))}?")
        return await operator.events.cancel_many(rows, reason=change.reason, dry_run=change.dry_run)

    done = where.run(act)
    if change.as_json:
        output.print_json(done)
    else:
        again = "; run it again for the rest" if done.count == MOST_AT_ONCE else ""
        output.print_line(f"{output.events(done.count)} {change.would}cancelled{again}")
        if done.left:
            output.print_line(f"{output.events(sum(done.left.values()))} left: settled already", "yellow")
    if not done.moved:
        raise typer.Exit(1)
