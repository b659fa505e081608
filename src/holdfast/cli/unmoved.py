"""What a command did not move, and what it does not list, as text for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from holdfast.characters import shell_word
from holdfast.cli import output
from holdfast.cli.next_commands import as_typed

_WORDS: Final = {
    "archived": "in the archive",
    "busy": "another transaction is changing them; run it again",
    "cancelled": "cancelled",
    "delivered": "delivered already",
    "discarded": "discarded; holdfast failed restore puts them back among the dead letters",
    "edited": "a corrected event has taken their place",
    "exists": "the outbox has an event with the same id; holdfast events show tells which",
    "expired": "expired",
    "failed": "failed, and not discarded",
    "in_flight": "in flight: a handler is running",
    "missing": "gone",
    "pending": "pending: they wait for a worker",
    "stripped": "retention has taken their payload",
    "too_old": "older than what the inbox remembers; --force replays them, and they may run twice",
}
# Of rows that were named by their numbers.
_ARCHIVED: Final = {
    "archived": "in the archive, and not discarded",
    "discarded": "discarded; holdfast archive restore puts them back",
    "missing": "replayed or never there: no archived row has this number",
}


def print_unmoved(left: Mapping[str, int], *, archive: bool = False) -> None:
    """A line for each state of rows that were not moved; `archive`: by a verb of the archive."""
    words = {**_WORDS, **_ARCHIVED} if archive else _WORDS
    for state, count in left.items():
        output.print_hint(f"{output.events(count)} left: {words.get(state, state)}")


def print_archived(count: int, handler: str | None, *, as_json: bool = False) -> None:
    """Say how many dead letters are in the archive, beside a list of those in the outbox; with JSON on stderr."""
    if not count:
        return
    of = "" if handler is None else f" --handler {shell_word(handler)}"
    text = f"{output.counted(count, 'dead letter')} in the archive: holdfast archive list{of}"
    if as_json:
        print(output.clean(as_typed(text)), file=sys.stderr)
    else:
        output.print_hint(text)
