"""What the producers saw: one JSON line before a transaction begins, and one when its end is known.

attempted     about to be published
acknowledged  the commit was answered
aborted       the transaction ended before a commit was sent: it must not come out
unknown       the commit was sent, and no answer came
"""

import json
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Seen = Literal["acknowledged", "aborted", "unknown"]
# What became of an unknown commit is told by the business row that the transaction wrote beside its events.
Outcome = Literal["acknowledged", "aborted", "recovered", "vanished"]


@dataclass(frozen=True, slots=True)
class Published:
    """One event of one transaction. A key may be published by several of them."""

    key: str
    event_type: str
    outcome: Outcome
    at: float  # when the outcome was known, on the machine's monotonic clock


class History:
    """Written by all producers, from all threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()
        self._transactions = self._keys = 0
        self.attempted = self.acknowledged = 0

    def keys(self, count: int) -> list[str]:
        with self._lock:
            self._keys += count
            return [str(n) for n in range(self._keys - count + 1, self._keys + 1)]

    def attempt(self, events: Sequence[tuple[str, str]]) -> int:
        """Note (key, event type) of all events of a transaction; returns the transaction's number."""
        with self._lock:
            self._transactions += 1
            self.attempted += len(events)
            self._write({"tx": self._transactions, "saw": "attempted", "events": events})
            return self._transactions

    def saw(self, transaction: int, seen: Seen, events: int, error: BaseException | None = None) -> None:
        with self._lock:
            self.acknowledged += events if seen == "acknowledged" else 0
            why = {"error": f"{type(error).__name__}: {error}"[:200]} if error else {}
            self._write({"tx": transaction, "saw": seen, **why})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps({"at": round(time.monotonic(), 4), **line}) + "\n")


def read(path: Path, committed: Collection[int]) -> Iterator[Published]:
    """The history, with unknown commits decided by the transactions that are in the database."""
    attempts: dict[int, list[tuple[str, str]]] = {}
    ends: dict[int, tuple[Seen, float]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["saw"] == "attempted":
            attempts[entry["tx"]] = [(key, event_type) for key, event_type in entry["events"]]
        else:
            ends[entry["tx"]] = entry["saw"], entry["at"]
    for transaction, events in attempts.items():
        seen, at = ends.get(transaction, ("unknown", 0.0))
        outcome = _outcome(seen, transaction in committed)
        for key, event_type in events:
            yield Published(key, event_type, outcome, at)


def _outcome(seen: Seen, committed: bool) -> Outcome:
    if seen == "unknown":
        return "recovered" if committed else "vanished"
    return seen
