"""What a list says when it is empty because the handler that it was asked for does not exist."""

from __future__ import annotations

import sys
from collections.abc import Sized
from difflib import get_close_matches

from holdfast.cli import output
from holdfast.cli.next_commands import as_typed
from holdfast.operator import Operator


async def point_out(operator: Operator, handler: str | None, found: Sized) -> None:
    """Say on stderr that no handler has this name: an empty list would be taken for good news."""
    if handler is None or found or await operator.handlers.known(handler):
        return
    near = get_close_matches(handler, [each.handler_name for each in await operator.handlers.all()], 1)
    meant = f"did you mean {near[0]}?" if near else "all names: holdfast handlers list"
    print(output.clean(as_typed(f"no handler {handler} was ever registered; {meant}")), file=sys.stderr)
