"""What a list says when it is empty because the handler that it was asked for does not exist."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sized
from difflib import get_close_matches

from holdfast.cli import output
from holdfast.cli.next_commands import as_typed
from holdfast.operator import Operator


async def point_out(operator: Operator, handler: str | None, found: Sized) -> None:
    """Say on stderr that no handler has this name: an empty list would be taken for good news."""
    point_out_hint(await hinted(operator, handler, found))


async def hinted(operator: Operator, handler: str | None, found: Sized) -> str | None:
    """Return what to say of a handler that no worker has ever had in this database."""
    if handler is None or found or await operator.handlers.known(handler):
        return None
    near = get_close_matches(handler, [each.handler_name for each in await operator.handlers.all()], 1)
    meant = f"did you mean {near[0]}?" if near else "all names: holdfast handlers list"
    return f"no handler {handler} was ever registered; {meant}"


def point_out_hint(hint: str | None) -> None:
    """Say it on stderr, if there is something to say."""
    if hint is not None:
        print(output.clean(as_typed(hint)), file=sys.stderr)


def point_out_in_each(hints: Mapping[str, str | None]) -> None:
    """Say the same of several databases, by name, if the handler is in none of them: they may have different ones."""
    for name, hint in hints.items() if all(hints.values()) else ():
        print(output.clean(f"{name}: {as_typed(str(hint), name)}"), file=sys.stderr)
