"""Counts failures that are alike: a storm of them is a few entries of the log, and not one for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from holdfast.observing import FactsLost
from holdfast.telemetry import Failed, Retried

Failure = Retried | Failed

# Within such a time, in seconds, so many failures of a kind are entries of their own.
WINDOW: Final = 1.0
ALONE: Final = 20

_Kind = tuple[object, ...]


class AlikeFailures:
    """Writes the first failures of each kind in a second, and one entry that stands for the rest of that second.

    Failures of a kind have the same handler, outcome and error signature. `write` gets a failure, and how many it
    stands for: it is the last of them. What is counted is written with the first failure after that second, or by
    `finish`. Where `write` raises, the other kinds are written nevertheless, and FactsLost says how many failures were
    not.
    """

    def __init__(self, write: Callable[[Failure, int], object]) -> None:
        self._write = write
        self._lock = threading.Lock()  # several workers of a program may share the log
        self._since = time.monotonic()
        self._seen: dict[_Kind, int] = {}
        self._last: dict[_Kind, Failure] = {}  # of the kinds that have more than may stand alone

    def add(self, fact: Failure) -> None:
        """Write a failure, or count it."""
        entries = self._counted() if time.monotonic() - self._since >= WINDOW else []
        kind = _kind(fact)
        with self._lock:
            seen = self._seen[kind] = self._seen.get(kind, 0) + 1
            if seen > ALONE:
                self._last[kind] = fact
            else:
                entries.append((fact, 1))
        if entries:
            self._write_each(entries)

    def finish(self) -> None:
        """Write what is counted, and begin anew."""
        self._write_each(self._counted())

    def _counted(self) -> list[tuple[Failure, int]]:
        """Return what is counted, and begin anew."""
        with self._lock:
            last, self._last = self._last, {}
            seen, self._seen = self._seen, {}
            self._since = time.monotonic()
        return [(fact, seen[kind] - ALONE) for kind, fact in last.items()]

    def _write_each(self, entries: Iterable[tuple[Failure, int]]) -> None:
        lost: int = 0
        cause: BaseException | None = None
        for fact, count in entries:
            try:
                self._write(fact, count)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                lost, cause = lost + count, error
        if cause is not None:
            raise FactsLost(lost) from cause


def _kind(fact: Failure) -> _Kind:
    reason = fact.failure_reason if isinstance(fact, Failed) else None
    return type(fact), fact.handler_name, fact.result, reason, fact.error_signature or fact.last_error
