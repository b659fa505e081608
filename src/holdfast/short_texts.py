"""A cache for functions of short texts: errors come in storms with the same text, which need the work only once."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Final, TypeVar

T = TypeVar("T")

_LONGEST: Final = 500
_MOST: Final = 100


def remembering_short(function: Callable[[str], T]) -> Callable[[str], T]:
    """Cache a pure function of a text for the latest short texts; long texts would take too much memory."""
    remembered = lru_cache(maxsize=_MOST)(function)

    @wraps(function)
    def made_of(text: str) -> T:
        return remembered(text) if len(text) <= _LONGEST else function(text)

    return made_of
