"""Lists that end at a limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


class Excerpt(list[T]):
    """The first of a longer list; `left_out` is how many others there are, at least."""

    def __init__(self, shown: Iterable[T], total: int) -> None:
        super().__init__(shown)
        self.left_out = max(0, total - len(self))
