"""holdfast events: the open ones, any others, one with its history, causes and effects, and cancelling one or many."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

import typer

from holdfast.cli import misspelt, output, timeline
from holdfast.cli.command_group import command_group
from holdfast.cli.options import Change, JsonOption, LimitOption, PayloadOption, Target, Where, spread
from holdfast.cli.selection import moment
from holdfast.cli.unmoved import print_unmoved
from holdfast.errors import ConfigurationError
from holdfast.operator import Children, EventPage, Moved, OpenEvent, OpenFilters, Operator, Relative
from holdfast.operator.arguments import MOST_AT_ONCE

app = command_group("Events: list them, find one, show one, cancel one or many.")

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


@dataclass(frozen=True, slots=True)
class SearchFilter:
    """Options that search among all events, and not only the open ones."""

    state: Annotated[
        str | None,
        typer.Option("--state", metavar="STATE", help="pending, in_flight, delivered, failed, discarded, or all."),
    ] = None
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Made since: 2h, 7d, or 2026-01-31T08:00 (UTC).")
    ] = None
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Made before this time.")] = None
    domain_id: Annotated[str | None, typer.Option("--domain-id", metavar="ID", help="Of this domain.")] = None
    before: Annotated[
        str | None, typer.Option("--before", metavar="CURSOR", help="Go on where the page before ended.")
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the search; `all` is no state in particular."""
        return {
            "state": None if self.state == "all" else self.state,
            "since": moment("--since", self.since),
            "until": moment("--until", self.until),
            "domain_id": self.domain_id,
            "before": self.before,
        }


@app.command("list")
@spread
def list_(
    where: Where, which: OpenFilter, among: SearchFilter, limit: LimitOption = 50, as_json: JsonOption = False
) -> None:
    """List some of the events that are pending or in flight; with a state or a time, of all events."""
    if among != SearchFilter():
        _search(where, which, among, limit, as_json)
        return

    async def read(operator: Operator) -> list[OpenEvent]:
        found = await operator.events.page(limit=limit, **which.given)
        await misspelt.point_out(operator, which.handler, found)
        return found

    found = where.run(read)
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


def _search(where: Where, which: OpenFilter, among: SearchFilter, limit: int, as_json: bool) -> None:
    filters: dict[str, Any] = dict(which.given)
    for open_only in ("channel", "route"):
        if filters.pop(open_only) is not None:
            raise ConfigurationError(
                f"--{open_only}",
                "selects open events only",
                "leave out --state, --since, --until, --domain-id, --before",
            )

    async def read(operator: Operator) -> EventPage:
        found = await operator.events.search(limit=limit, **filters, **among.given)
        await misspelt.point_out(operator, which.handler, found.events)
        return found

    _show_page(where.run(read), as_json)


def _show_page(found: EventPage, as_json: bool) -> None:
    if as_json:
        output.print_json(found)
        return
    output.print_table(
        ("id", "state", "event type", "handler", "made", "settled", "attempts", "generation", "last error"),
        [
            (
                e.id,
                e.state,
                e.event_type,
                e.handler_name,
                e.created_at,
                e.settled_at,
                e.attempts,
                e.generation,
                output.first_line(e.last_error, 60),
            )
            for e in found.events
        ],
    )
    _show_next(found, "--before")


def _show_next(found: EventPage | Children, option: str) -> None:
    if found.searched_until is not None:
        direction = "back to" if option == "--before" else "up to"
        output.print_line(f"searched {direction} {output.shown(found.searched_until)} UTC", "dim")
    if found.next is not None:
        output.print_line(f"there may be more: {option} {found.next}", "dim")


@app.command("find")
@spread
def find(
    where: Where,
    key: Annotated[str, typer.Argument(metavar="KEY", help="An id, an idempotency key, or a producer's key.")],
    limit: LimitOption = 50,
    as_json: JsonOption = False,
) -> None:
    """Find the event with an id, an idempotency key, or the key that its producer gave it."""
    found = where.run(lambda operator: operator.events.find(key, limit=limit))
    _show_page(found, as_json)
    if not found.events:
        raise typer.Exit(1)


@app.command("children")
@spread
def children(
    where: Where,
    id: IdArgument,
    after: Annotated[
        str | None, typer.Option("--after", metavar="CURSOR", help="Go on where the page before ended.")
    ] = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
) -> None:
    """List the events that an event has caused."""
    found = where.run(lambda operator: operator.events.children(id, after=after, limit=limit))
    if as_json:
        output.print_json(found)
        return
    _show_relatives(found.children)
    _show_next(found, "--after")


@app.command("causes")
@spread
def causes(where: Where, id: IdArgument, as_json: JsonOption = False) -> None:
    """List an event, what caused it, what caused that, and so on."""
    found = where.run(lambda operator: operator.events.ancestors(id))
    if as_json:
        output.print_json(found)
        return
    _show_relatives(found)
    if found[-1].cause is not None:
        output.print_line(f"its cause is not known here: {found[-1].cause}", "dim")


def _show_relatives(found: list[Relative]) -> None:
    output.print_table(
        ("id", "event type", "source", "status", "occurred", "distance"),
        [(e.event_id, e.event_type, e.source, e.status, e.occurred_at, e.distance) for e in found],
    )


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
