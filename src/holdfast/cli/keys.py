"""holdfast keys: ordering keys that a dead letter blocks."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

from holdfast.characters import shell_word
from holdfast.cli import misspelt, output
from holdfast.cli.command_group import command_group
from holdfast.cli.options import Change, HandlerArgument, JsonOption, Target, Where, spread
from holdfast.operator import BlockedKey, Operator

app = command_group("Ordering keys that a dead letter blocks.")


@app.command()
@spread
def blocked(
    where: Where,
    handler: Annotated[str | None, typer.Option("--handler", help="Only of this handler.")] = None,
    limit: Annotated[int, typer.Option("--limit", help="At most so many, the longest blocked first.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List the keys that are blocked: by which dead letter, since when, and how many events wait behind it."""

    async def read(operator: Operator) -> list[BlockedKey]:
        found = await operator.keys.blocked(handler, limit=limit)
        await misspelt.point_out(operator, handler, found)
        return found

    found = where.run(read)
    if as_json:
        output.print_json(found)
        output.print_left_out(found, limit, as_json=True)
        return
    output.print_table(
        ("key", "handler", "head", "event type", "since", "followers", "reason"),
        [
            (e.ordering_key, e.handler_name, e.head_id, e.event_type, e.blocked_at, _followers(e), e.failure_reason)
            for e in found
        ],
    )
    output.print_left_out(found, limit)
    if found:
        first = f"{shell_word(found[0].handler_name)} {shell_word(found[0].ordering_key)}"
        output.print_hint(
            f"Replay the head, discard it, or let the key go on; for the first of them: holdfast keys release {first}",
            "",
        )


@app.command()
@spread
def release(
    where: Target,
    handler: HandlerArgument,
    key: Annotated[str, typer.Argument(help="The ordering key.")],
    change: Change,
) -> None:
    """Let the events of a key go on without the dead letter at its head. A later replay puts it at the end."""

    async def act(operator: Operator) -> UUID | None:
        head = await operator.keys.release(handler, key, reason=change.reason, dry_run=True)
        if head is None:
            await operator.handlers.show(handler)  # a name that is misspelt is no key that is free
            return None
        change.confirm(f"Let the events of {key} go on without {head} at {handler}?")
        return head if change.dry_run else await operator.keys.release(handler, key, reason=change.reason)

    head = where.run(act)
    if change.as_json:
        output.print_json({"handler": handler, "ordering_key": key, "head_id": head, "dry_run": change.dry_run})
    elif head is None:
        output.print_line(f"{key}: not blocked at {handler}")
    else:
        output.print_line(f"{key}: {change.would}released at {handler}; {head} stays a dead letter")
    if head is None:
        raise typer.Exit(1)


def _followers(each: BlockedKey) -> str:
    return f"{each.followers // 1000}k+" if each.more_followers else str(each.followers)
