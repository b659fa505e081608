"""The partitions of the outbox, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from holdfast.postgres.operations.connection import Statements

MOST = 100_000  # where counts end


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition. `first` is the table as it was before, `default` holds what no other does."""

    name: str
    kind: Literal["first", "period", "default", "left"]
    lower_at: datetime | None  # of the ids in it; None: from the beginning
    upper_at: datetime | None
    rows: int | None  # as the server's statistics estimate it; None: not known yet
    bytes: int


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """Whether the outbox is partitioned, on the way there (`converting`) or back (`returning`), and its partitions."""

    state: Literal["plain", "converting", "partitioned", "returning"]
    every: Literal["day", "week"] | None  # None: plain
    bound: datetime | None  # while it is converted: where the first partition will end
    partitions: list[Partition]
    in_default: int  # rows that should be in a partition of their own, counted up to a limit

    @property
    def ends(self) -> datetime | None:
        """The end of the last partition that was made ahead."""
        return max((each.upper_at for each in self.partitions if each.upper_at), default=None)


async def report(statements: Statements) -> PartitionReport:
    """Read it from the catalogs."""
    row = await statements.row("read_partitioning")
    found = [Partition(**each) for each in await statements.fetch("list_partitions")]
    if row["partitioned"]:
        starts = [each.upper_at for each in found if each.kind == "first" and each.upper_at]
        since = min(starts or [each.lower_at for each in found if each.lower_at] or [row["now"]])
        in_default = int(await statements.value("count_default_rows", since=since, most=MOST))
        return PartitionReport("partitioned", row["every"], None, found, in_default)
    if row["gathering"]:
        return PartitionReport("returning", row["every"], None, found, 0)
    if row["bound"] is not None:
        return PartitionReport("converting", row["every"], row["bound"], found, 0)
    return PartitionReport("plain", None, None, [], 0)
