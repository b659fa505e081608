"""What dry runs have shown, until it is confirmed."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from holdfast.errors import ConfigurationError

LASTS: Final = 600.0  # seconds
_MOST: Final = 1_000


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What somebody saw in a dry run. `ids`: the rows that it would have moved."""

    principal: str
    verb: str
    arguments: Mapping[str, Any]
    ids: tuple[UUID, ...] | None


class Confirmations:
    """The latest dry runs, by a code that only who made them was told. Each is good for one change."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, tuple[float, Confirmation]] = OrderedDict()

    def add(self, seen: Confirmation) -> str:
        """Remember a dry run, and return its code."""
        code = secrets.token_urlsafe(12)
        self._seen[code] = self._clock(), seen
        while len(self._seen) > _MOST:
            self._seen.popitem(last=False)
        return code

    def take(self, code: object, principal: str, verb: str, arguments: Mapping[str, Any]) -> Confirmation:
        """Return the dry run of a code, which must have been the same request by the same principal."""
        known = code if isinstance(code, str) else ""
        at, seen = self._seen.get(known, (0.0, None))
        if seen is None or self._clock() - at > LASTS:
            self._seen.pop(known, None)
            raise ConfigurationError(
                "confirm", "is missing, used, or older than ten minutes", "call the tool without dry_run: false first"
            )
        if (seen.principal, seen.verb, seen.arguments) != (principal, verb, arguments):
            raise ConfigurationError(
                "confirm", "belongs to another request", "repeat the dry run with the arguments that you mean"
            )
        # Only now: whoever guesses, or has overheard a code, must not use it up for who may have it.
        del self._seen[known]
        return seen
