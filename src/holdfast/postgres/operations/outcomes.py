"""Results of replays, discards and restores, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The rows that were moved, and how many were not, by reason."""

    moved: list[UUID]
    left: dict[str, int]
    purge_at: datetime | None = None  # the earliest time at which a discarded row is disposed of

    def __add__(self, other: Outcomes) -> Outcomes:
        purges = [each.purge_at for each in (self, other) if each.purge_at is not None]
        left = dict(Counter(self.left) + Counter(other.left))
        return Outcomes([*self.moved, *other.moved], left, min(purges, default=None))

    @classmethod
    def of(cls, rows: Iterable[Any], id: str = "id") -> Self:
        rows = list(rows)
        purges = [row["purge_at"] for row in rows if row.get("purge_at") is not None]
        return cls(
            [row[id] for row in rows if row["outcome"] == "moved"],
            dict(Counter(row["outcome"] for row in rows if row["outcome"] != "moved")),
            min(purges, default=None),
        )
