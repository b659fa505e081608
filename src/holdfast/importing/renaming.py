"""The event types that names of another library get."""

from __future__ import annotations

from collections.abc import Mapping


class Renaming:
    """The event types of names, and which of these names were met."""

    def __init__(self, renamed: Mapping[str, str]) -> None:
        self._renamed = renamed
        self._met: set[str] = set()

    def event_type(self, name: str) -> str:
        """Return the event type of a name: the name itself, if it has no other."""
        if name not in self._renamed:
            return name
        self._met.add(name)
        return self._renamed[name]

    @property
    def met(self) -> frozenset[str]:
        """The names that got another event type."""
        return frozenset(self._met)
