"""An outbox that is partitioned, for tests: with rows of now in a partition of their own, beside the first."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from holdfast.ids import uuid7
from holdfast.postgres.schema import partitions
from holdfast.postgres.schema.partitions import Every


async def partition(dsn: str, every: Every = "day", *, ago: timedelta = timedelta(hours=1)) -> None:
    """Partition an empty outbox: what is written from `ago` on is in partitions of its own."""
    await partitions.enable(dsn, every=every, bound=datetime.now(UTC) - ago)


def id_at(when: datetime) -> UUID:
    """An id that was made then."""
    milliseconds = int(when.timestamp() * 1000)
    return UUID(int=(milliseconds << 80) | (uuid7().int & ((1 << 80) - 1)))
