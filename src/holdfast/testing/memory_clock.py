"""The clock of an outbox in memory: it goes on, or stands still, and can be moved forward."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class MemoryClock:
    """The time of one outbox. Nothing moves it back but `freeze`."""

    def __init__(self) -> None:
        self._shift = timedelta(0)
        self._frozen: datetime | None = None

    @property
    def now(self) -> datetime:
        return self._frozen or datetime.now(UTC) + self._shift

    def freeze(self, at: datetime) -> None:
        """Stop it at a moment; it still moves with `move_to`."""
        self._frozen = at

    def move_to(self, to: datetime) -> datetime:
        """Move it forward to a moment, unless that is past, and return the time that it shows then."""
        if self._frozen is not None:
            self._frozen = max(self._frozen, to)
        else:
            self._shift = max(self._shift, to - datetime.now(UTC))
        return self.now
