"""Retention in the database: the policies, and the batches in which what was kept long enough goes.

The statements, with their reasons, stand in sql/functions/retention.sql and sweep.sql.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg

from holdfast.postgres.connection import is_direct, own_transaction
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.postgres.queries import Queries
from holdfast.retention import Disposal, RetentionPolicies, RetentionPolicy

# In the order in which a row meets them, so that one pass can do all there is to do.
STEPS = (
    "delivered",
    "tombstones",
    "failed",
    "discarded",
    "archived",
    "archive_tombstones",
    "inbox",
    "keys",
    "heads",
    "records",
    "rollup",
)
MOST_IN_BATCH = 5_000
_FIRST_BATCH = 500
_LEAST = 50
_TARGET = 0.06  # seconds that a batch should take; 0.2 are promised, also on a busy machine
_GROWTH = 2.0
# The inbox is read as it lies: so many pages at once, and by workers all of it in a day.
_PAGES = 1_000
_PASSES_A_DAY = 144
_START = datetime(1, 1, 1, tzinfo=UTC)


async def policies(connection: asyncpg.Connection, queries: Queries) -> RetentionPolicies:
    """What is in force, read anew."""
    return policies_of(await fetch(connection, queries, "retention_policies_read"))


def policies_of(rows: Iterable[asyncpg.Record]) -> RetentionPolicies:
    """Return the policies that rows of `retention_policies_read` are."""
    return {
        (row["entity"], row["content_class"]): RetentionPolicy(
            row["active_ttl_days"], row["tombstoned_grace_days"], Disposal(row["disposal"])
        )
        for row in rows
    }


@dataclass(frozen=True, slots=True)
class Batch:
    """What one statement took. `refusal`: nothing, and the rest of this step and class is left for the next pass."""

    step: str
    content_class: str
    swept: int
    seconds: float
    refusal: asyncpg.PostgresError | None = None


class BatchSize:
    """How many rows the next batch may have: as many as should take well under 200 ms."""

    def __init__(self) -> None:
        self.rows = _FIRST_BATCH

    def took(self, seconds: float) -> None:
        """Size the next batch by how long a full one took."""
        factor = min(_TARGET / max(seconds, 0.001), _GROWTH)
        self.rows = max(_LEAST, min(MOST_IN_BATCH, int(self.rows * factor)))

    def failed(self) -> None:
        self.rows = max(_LEAST, self.rows // 4)


class Sweep:
    """One pass over everything that is due. After a fault that passes, `next` goes on where it was; what the database
    refuses for good, such as a row that a foreign key of the application points to, costs its step and class this pass.

    With `inbox_page` it takes only a part of the inbox, from there on; afterwards it says where the next part begins.
    """

    def __init__(
        self,
        queries: Queries,
        batch_size: BatchSize | None = None,
        *,
        inbox_page: int | None = None,
        actor: str | None = None,
        reason: str | None = None,
    ) -> None:
        self._queries = queries
        self._batch_size = batch_size or BatchSize()
        self._who = {"actor": actor, "reason": reason}  # None: a worker, whose sweeps are not audited
        self._steps = deque(STEPS)
        self._after = ""  # the last class of the step's last page
        self._open: deque[tuple[str, str]] = deque()  # steps with their classes that were begun, or are next
        self._from: tuple[Any, ...] | None = None  # in the first of them; None: from its beginning
        self._part = inbox_page is not None
        self.inbox_page = inbox_page or 0
        self.counts: Counter[str] = Counter()

    async def next(self, connection: asyncpg.Connection) -> Batch | None:
        """Take one batch; None when the pass is over."""
        while not self._open:
            if not self._steps:
                return None
            step = self._steps[0]
            rows = await fetch(connection, self._queries, "retention_classes", step=step, after=self._after)
            self._open.extend((step, row[0]) for row in rows)
            self._after = rows[-1][0] if rows else ""
            if not self._after:
                self._steps.popleft()
        step, content_class = self._open[0]
        size, began = self._batch_size.rows, time.monotonic()
        try:
            match step:
                case "keys":
                    swept, more = await self._keys(connection, size)
                case "heads":
                    swept, more = await self._heads(connection, size)
                case "inbox":
                    swept, more = await self._inbox(connection, size)
                case "records" | "rollup":
                    swept, more = await self._whole(connection, step, size)
                case _:
                    swept, more = await self._rows(connection, step, content_class, size)
        except PASSING_FAULTS:
            self._batch_size.failed()
            raise
        except CONNECTION_FAULTS:
            raise
        except asyncpg.PostgresError as error:
            if connection.is_in_transaction():
                raise  # the caller's own, in which nothing can follow
            return self._passed_over(error, time.monotonic() - began)
        seconds = time.monotonic() - began
        if more:
            self._batch_size.took(seconds)
        else:
            self._open.popleft()
            self._from = None
        self.counts[step] += swept
        return Batch(step, content_class, swept, seconds)

    def _passed_over(self, error: asyncpg.PostgresError, seconds: float) -> Batch:
        step, content_class = self._open.popleft()
        self._from = None
        if step == "inbox":
            self.inbox_page += _PAGES  # or every pass would end at the same page
        return Batch(step, content_class, 0, seconds, error)

    async def _rows(self, connection: asyncpg.Connection, step: str, content_class: str, size: int) -> tuple[int, bool]:
        (start,) = self._from or (_START,)
        (row,) = await fetch(
            connection,
            self._queries,
            "retention_sweep",
            step=step,
            content_class=content_class,
            start=start,
            limit=size,
            **self._who,
        )
        self._from = (row["upto"],)
        return row["swept"], row["more"]

    async def _inbox(self, connection: asyncpg.Connection, size: int) -> tuple[int, bool]:
        page = self.inbox_page
        (row,) = await fetch(connection, self._queries, "sweep_inbox", page=page, pages=_PAGES, limit=size, **self._who)
        # How far this pass goes: a part of the table, or to its end.
        share = max(_PAGES, row["pages"] // _PASSES_A_DAY) if self._part else row["pages"]
        (until,) = self._from or (page + share,)
        self._from = (until,)
        self.inbox_page = row["next_page"] or 0
        return row["swept"], row["next_page"] is not None and row["next_page"] < until

    async def _keys(self, connection: asyncpg.Connection, size: int) -> tuple[int, bool]:
        source, key = self._from or ("", "")
        (row,) = await fetch(connection, self._queries, "sweep_keys", source=source, key=key, limit=size, **self._who)
        self._from = (row["next_source"], row["next_key"])
        return row["swept"], row["next_key"] is not None

    async def _heads(self, connection: asyncpg.Connection, size: int) -> tuple[int, bool]:
        handler, key = self._from or ("", "")
        (row,) = await fetch(
            connection, self._queries, "sweep_heads", handler=handler, key=key, limit=size, **self._who
        )
        self._from = (row["next_handler"], row["next_key"])
        return row["swept"], row["next_key"] is not None

    async def _whole(self, connection: asyncpg.Connection, step: str, size: int) -> tuple[int, bool]:
        (row,) = await fetch(connection, self._queries, f"sweep_{step}", limit=size, **self._who)
        return row["swept"], row["more"]


async def acquire_sweep(
    connection: asyncpg.Connection, queries: Queries, sweeper: UUID, rest: timedelta, *, force: bool = False
) -> int | None:
    """Return the inbox page to continue with, or None when another process sweeps or `rest` has not passed."""
    rows = await fetch(connection, queries, "sweep_acquire", sweeper=sweeper, rest=rest, force=force)
    page: int | None = rows[0][0]
    return page


async def finish_sweep(connection: asyncpg.Connection, queries: Queries, sweeper: UUID, sweep: Sweep) -> None:
    """The pass is over."""
    counts = json.dumps({step: swept for step, swept in sweep.counts.items() if swept})
    await fetch(connection, queries, "sweep_finish", sweeper=sweeper, counts=counts, inbox_page=sweep.inbox_page)


async def fetch(
    connection: asyncpg.Connection, queries: Queries, name: str, /, **values: object
) -> list[asyncpg.Record]:
    """One statement: in the caller's transaction, or in one of its own where a pooler may stand in between."""
    statement = queries.asyncpg(name)
    if connection.is_in_transaction() or is_direct(connection):
        records: list[asyncpg.Record] = await connection.fetch(statement.sql, *statement.bind(values))
        return records
    async with own_transaction(connection):
        records = await connection.fetch(statement.sql, *statement.bind(values))
    return records
