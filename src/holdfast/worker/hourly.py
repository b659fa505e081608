"""What was told a while ago, and need not be told again."""

import time

_REPEAT_AFTER = 3600.0
_MOST_REPORTS = 1000


class HourlyLimit:
    """Which warnings are due: each once an hour, and no more than a thousand of them, whatever is published."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, ...], float] = {}  # the oldest first

    def due(self, *subject: str) -> bool:
        now = time.monotonic()
        while self._told and now - next(iter(self._told.values())) >= _REPEAT_AFTER:
            del self._told[next(iter(self._told))]
        if subject in self._told or len(self._told) >= _MOST_REPORTS:
            return False
        self._told[subject] = now
        return True
