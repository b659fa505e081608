"""A limit for warnings that would repeat: each once an hour."""

import time

_REPEAT_AFTER = 3600.0
_MOST_REPORTS = 1000


class HourlyLimit:
    """Decides which warnings are due: each subject once an hour, and at most a thousand subjects an hour."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, ...], float] = {}  # subject -> when, the oldest first

    def due(self, *subject: str) -> bool:
        """Whether to warn about the subject now; the caller is expected to do so."""
        now = time.monotonic()
        while self._reported and now - next(iter(self._reported.values())) >= _REPEAT_AFTER:
            del self._reported[next(iter(self._reported))]
        if subject in self._reported or len(self._reported) >= _MOST_REPORTS:
            return False
        self._reported[subject] = now
        return True
