"""Who is about to decide about a group: its dialog was opened a moment ago. It is kept in this process alone."""

from __future__ import annotations

import time
from typing import Final

_LASTS: Final = 120.0
_MOST: Final = 1_000


class Deciding:
    """Remembers for two minutes who opened the dialog of what."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, float]] = {}

    def begin(self, subject: str, name: str) -> None:
        """Somebody opens a dialog."""
        now = time.monotonic()
        self._open = {key: value for key, value in self._open.items() if now - value[1] < _LASTS}
        if len(self._open) < _MOST:
            self._open[subject] = (name, now)

    def end(self, subject: str) -> None:
        """It was decided."""
        self._open.pop(subject, None)

    def by(self, subject: str, asking: str) -> str | None:
        """Return who else is deciding."""
        name, since = self._open.get(subject, ("", 0.0))
        return name if name and name != asking and time.monotonic() - since < _LASTS else None
