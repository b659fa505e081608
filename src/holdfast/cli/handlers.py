"""holdfast handlers: their subscriptions, and the workers that serve them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.command_group import command_group
from holdfast.cli.options import Change, JsonOption, Target, Where, spread
from holdfast.operator import HandlerStatus, Operator

app = command_group("Handlers: their subscriptions, and the workers that serve them.")


@app.command("list")
@spread
def list_(where: Where, as_json: JsonOption = False) -> None:
    """List every handler with its subscriptions, its backlog, its failures, and its workers."""
    found = where.run(lambda operator: operator.handlers.all())
    if as_json:
        output.print_json([{"unserved": each.unserved} | output.as_data(each) for each in found])
        output.print_left_out(found, as_json=True)
        return
    output.print_table(
        ("handler", "domain context", "event types", "open", "failed", "served by"),
        [(e.handler_name, e.domain_context, e.event_types or "retired", e.open, _failed(e), _served(e)) for e in found],
    )
    output.print_left_out(found)


@app.command("retire")
@spread
def retire(
    where: Target,
    handler: Annotated[str, typer.Argument(help="The handler's name.")],
    change: Change,
    event_type: Annotated[
        str | None, typer.Option("--event-type", metavar="TYPE", help="Only this type, as it was registered.")
    ] = None,
) -> None:
    """End the subscriptions of a handler. Events that already wait for it stay, and can be cancelled or moved."""

    async def act(operator: Operator) -> tuple[int, HandlerStatus | None]:
        options: dict[str, Any] = {"reason": change.reason, "event_type": event_type}
        ended = await operator.handlers.retire(handler, dry_run=True, **options)
        change.confirm(f"End {output.counted(ended, 'subscription')} of {handler}?")
        if not change.dry_run:
            ended = await operator.handlers.retire(handler, **options)
        return ended, next((each for each in await operator.handlers.all() if each.handler_name == handler), None)

    ended, left = where.run(act)
    if change.as_json:
        output.print_json({"handler": handler, "event_type": event_type, "ended": ended, "dry_run": change.dry_run})
    else:
        output.print_line(f"{handler}: {output.counted(ended, 'subscription')} {change.would}ended")
        if left is not None and not change.dry_run and event_type is None:
            _show_left(left)
    if not ended:
        raise typer.Exit(1)


def _show_left(each: HandlerStatus) -> None:
    """What only this handler can handle, and the commands that drop it."""
    for count, what, drop in (
        (each.open, "event", "events cancel"),
        (each.failed, "dead letter", "failed discard"),
        (each.archived, "archived dead letter", "archive discard"),
    ):
        if count:
            wait = "waits" if count == 1 else "wait"
            still = f"{output.counted(count, what)} still {wait} for it; if nobody wants them"
            output.print_line(f"{still}: holdfast {drop} --handler {each.handler_name}", "yellow")


def _failed(each: HandlerStatus) -> str:
    return f"{each.failed}, archived {each.archived}" if each.archived else str(each.failed)


def _served(each: HandlerStatus) -> str:
    return "NO WORKER, and events wait" if each.unserved else output.shown(each.workers)
