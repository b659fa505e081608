"""Gives tasks and queues of another library their event types."""

from __future__ import annotations

from collections.abc import Mapping


class Renaming:
    """Maps names of another library to event types, and remembers which names it has met."""

    def __init__(self, renamed: Mapping[str, str]) -> None:
        self._renamed = renamed
        self._met: set[str] = set()

    def event_type(self, name: str) -> str:
        """Return the event type of a name: the one that the user gave, or the name itself."""
        if name not in self._renamed:
            return name
        self._met.add(name)
        return self._renamed[name]

    @property
    def met(self) -> frozenset[str]:
        """The names that got another event type."""
        return frozenset(self._met)
