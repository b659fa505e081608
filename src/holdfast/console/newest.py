"""What is new in a list since it was loaded. Its rows stay where they are until somebody asks for the new ones.

A feed has the places of the newest rows, in the order of the list, for everybody who looks at the same filter; each
browser counts those that come before its own first row.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from holdfast.console.filters import Fields
from holdfast.console.live import LONGEST_NAME
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator

MOST: Final = 50
Reads = Callable[[Operator, Fields], Awaitable[Sequence[str]]]


class NewestFeed:
    """The places of the newest rows of a list; behind the colon stands its filter, as in the address."""

    def __init__(self, path: str, check: Callable[[Fields], Mapping[str, str]], read: Reads) -> None:
        self._path = path
        self._check = check
        self._read = read

    def normal(self, argument: str) -> str | None:
        """Return the filter with its fields in order."""
        try:
            return urlencode(sorted(self._check(dict(parse_qsl(argument, max_num_fields=20))).items()))
        except (ConfigurationError, ValueError):
            return None

    async def read(self, operator: Operator, argument: str, before: Any) -> tuple[str, Sequence[str]]:
        """Read the newest rows."""
        return argument, await self._read(operator, dict(parse_qsl(argument)))

    def fragments(self, value: tuple[str, Sequence[str]]) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return the live part."""
        argument, places = value
        shown = {"path": self._path, "query": dict(parse_qsl(argument)), "places": places, "most": MOST}
        return {"newest": ("newest.html", shown)}


def feed_of(kind: str, given: Mapping[str, str]) -> str | None:
    """Return the name of the feed of a filter; none of one that is too long to be watched."""
    name = f"{kind}:{urlencode(sorted(given.items()))}" if given else kind
    return name if len(name) <= LONGEST_NAME else None
