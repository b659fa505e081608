"""A change of one place in the body of a function, and the lines that it replaces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """Replaces the characters from `start` to `end` of a file by `text`, in a function."""

    kind: str
    function: str
    start: int
    end: int
    text: str

    def lines(self, source: str) -> tuple[int, list[str], list[str]]:
        """Return the number of the first line that changes, and the lines before and after."""
        begin = source.rfind("\n", 0, self.start) + 1
        end = source.find("\n", self.end)
        end = len(source) if end < 0 else end
        after = source[begin : self.start] + self.text + source[self.end : end]
        return source.count("\n", 0, begin) + 1, source[begin:end].split("\n"), after.split("\n")
