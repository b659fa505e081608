"""Turning the outbox into a table that is partitioned by time, and back, while producers and workers use it.

Each step is a transaction that waits for a lock for a second at most, and is tried again. What is still to be done is
read from the database first: a run that was killed leaves a table that works, and the next run goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import asyncpg

from holdfast.postgres.queries import Queries
from holdfast.postgres.schema.ddl import MigrationRefused, change, connect, one_at_a_time, reading
from holdfast.postgres.schema.ownership import OWNER, Facts, inspect

Every = Literal["day", "week"]

# Where the first partition ends: later than a conversion can take, and than clocks of producers are usually wrong.
_AHEAD = timedelta(days=3)
# A conversion that was left alone this close to its bound begins anew with a later one.
_TOO_CLOSE = timedelta(days=1)
_TRIES = 60
_GATHER = 2_000


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How far the outbox is from plain to partitioned or back."""

    now: datetime  # by the database's clock
    every: Every
    partitioned: bool
    bound: datetime | None  # of a conversion that is under way
    unproven: bool  # whether it has not been shown yet that the table ends before the bound
    gathering: bool  # on the way back: former partitions may still hold rows


@dataclass(frozen=True, slots=True)
class PartitionStep:
    """Something a conversion does or waits for; `text` is for people."""

    action: Literal["wait", "retry", "prepare", "validate", "swap", "extend", "unswap", "gather", "settle"]
    text: str
    rows: int = 0


OnStep = Callable[[PartitionStep], None]


async def partitioning(connection: Any, queries: Queries) -> Partitioning:
    """Read the state."""
    row = await connection.fetchrow(queries.asyncpg("read_partitioning").sql)
    return Partitioning(**row)


async def enable(
    dsn: str,
    schema: str = "core",
    *,
    every: Every = "week",
    actor: str = "holdfast",
    reason: str | None = None,
    dry_run: bool = False,
    on_step: OnStep | None = None,
    bound: datetime | None = None,
) -> None:
    """Partition the outbox, or finish doing so. A dry run only looks for what is in the way.

    `bound` is where the first partition ends: by default a midnight in three to four days.
    """
    async with _conversion(dsn, schema, on_step) as conversion:
        found = await conversion.require_plain_or(every)
        if not found.partitioned:
            bound = await conversion.bound(found, every, bound)
        if not dry_run:
            await conversion.enable(found, every, bound, (actor, reason))


async def disable(
    dsn: str, schema: str = "core", *, actor: str = "holdfast", reason: str | None = None, on_step: OnStep | None = None
) -> None:
    """Make the outbox plain again, or finish doing so."""
    async with _conversion(dsn, schema, on_step) as conversion:
        await conversion.disable(actor, reason)


@asynccontextmanager
async def _conversion(dsn: str, schema: str, on_step: OnStep | None) -> AsyncIterator[_Conversion]:
    queries, notify = Queries(schema), on_step or (lambda _step: None)
    connection = await connect(dsn)
    try:
        waiting = PartitionStep("wait", "another schema change is running, waiting for it to end")
        async with one_at_a_time(connection, queries, lambda: notify(waiting)):
            facts = await inspect(connection, queries)
            _require_rights(facts, schema)
            yield _Conversion(connection, queries, notify, facts.schema_owner == OWNER)
    finally:
        await connection.close()


class _Conversion:
    """One run of a conversion, holding the lock on schema changes."""

    def __init__(self, connection: Any, queries: Queries, notify: OnStep, roles: bool) -> None:
        self._connection = connection
        self._queries = queries
        self._notify = notify
        self._roles = roles

    async def require_plain_or(self, every: Every) -> Partitioning:
        """The state, unless it keeps the outbox from being partitioned by this period."""
        found = await self._state()
        if found.gathering:
            raise MigrationRefused(
                "the outbox is on its way from partitioned to plain", "finish that first: holdfast partitions disable"
            )
        if found.partitioned and found.every != every:
            raise MigrationRefused(
                f"the outbox is partitioned by {found.every}, and not by {every}",
                f"use --every {found.every}, or go back first: holdfast partitions disable",
            )
        return found

    async def bound(self, found: Partitioning, every: Every, wanted: datetime | None) -> datetime | None:
        """Where the first partition will end; None where a run before this one has decided it."""
        if wanted is None and found.bound is not None and found.bound > found.now + _TOO_CLOSE and found.every == every:
            return None
        bound = wanted or _midnight(found.now + _AHEAD)
        statement = self._queries.asyncpg("partitions_obstacles")
        async with self._reading():
            obstacles = await self._connection.fetch(statement.sql, *statement.bind({"bound": bound}))
        if obstacles:
            raise MigrationRefused(
                "; ".join(row["problem"] for row in obstacles[:5]), "; ".join(row["remedy"] for row in obstacles[:5])
            )
        return bound

    async def enable(
        self, found: Partitioning, every: Every, bound: datetime | None, who: tuple[str, str | None]
    ) -> None:
        """Do what is left to do."""
        if bound is not None:
            text = f"events from {bound:%Y-%m-%d} on will be in partitions of their own"
            self._notify(PartitionStep("prepare", text))
            await self._change("preparing the outbox", "partitions_prepare", every=every, bound=bound)
        if not found.partitioned:
            self._notify(PartitionStep("validate", "reading the table, beside producers and workers"))
            await self._change("reading the outbox", "partitions_validate")
            self._notify(PartitionStep("swap", "the table becomes the first partition"))
            audit = ("partitions.enable", *who, every)
            await self._change("partitioning the outbox", "partitions_swap", audit)
        while made := await self._change("making a partition", "partitions_extend"):
            self._notify(PartitionStep("extend", f"made {made[0]['name']}", made[0]["moved"]))

    async def disable(self, actor: str, reason: str | None) -> None:
        """Do what is left to do on the way back."""
        found = await self._state()
        if found.bound is not None:
            await self._change("giving up the conversion", "partitions_abandon")
        if found.partitioned:
            self._notify(PartitionStep("unswap", "the largest partition becomes the table"))
            audit = ("partitions.disable", actor, reason, found.every)
            await self._change("making the outbox one table", "partitions_unswap", audit)
            found = await self._state()
        if not found.gathering:
            return
        moved = 0
        while True:
            (row,) = await self._change("moving rows", "partitions_gather", limit=_GATHER)
            if row["todo"] == "none":
                break
            moved += row["moved"]
            self._notify(PartitionStep("gather", f"moved {moved:,} rows", row["moved"]))
            if not row["moved"]:
                await asyncio.sleep(0.5)  # what is left is in flight
        self._notify(PartitionStep("settle", "the last partition is empty"))
        await self._change("ending the conversion", "partitions_settle")

    async def _state(self) -> Partitioning:
        async with self._reading():
            return await partitioning(self._connection, self._queries)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        async with reading(self._connection, self._queries):
            await self._become_owner()
            yield

    async def _change(
        self, what: str, name: str, audit: tuple[str, str, str | None, str] | None = None, **values: object
    ) -> list[asyncpg.Record]:
        rows: list[asyncpg.Record] = []

        async def work() -> None:
            nonlocal rows
            await self._become_owner()
            statement = self._queries.asyncpg(name)
            rows = await self._connection.fetch(statement.sql, *statement.bind(values))
            if audit is not None:
                line = dict(zip(("action", "actor", "reason", "every"), audit, strict=True))
                written = self._queries.asyncpg("audit_partitions")
                await self._connection.execute(written.sql, *written.bind(line))

        def on_retry(attempt: int) -> None:
            self._notify(PartitionStep("retry", f"{what}: no lock within a second, trying again ({attempt})"))

        await change(self._connection, self._queries, what, work, tries=_TRIES, on_retry=on_retry)
        return rows

    async def _become_owner(self) -> None:
        if self._roles:
            await self._connection.execute(self._queries.asyncpg("become_owner").sql)


def _midnight(at: datetime) -> datetime:
    day = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day + timedelta(days=1)


def _require_rights(facts: Facts, schema: str) -> None:
    if not facts.has_ledger:
        raise MigrationRefused(
            f"there is no Holdfast in the schema {schema} of the database {facts.database}",
            "install it: holdfast migrate apply, or name its schema: --schema",
        )
    if facts.schema_owner == OWNER and not facts.may_become_owner and not facts.superuser:
        raise MigrationRefused(
            f"{facts.login} may not become {OWNER}", f"as an administrator: GRANT {OWNER} TO {facts.login}"
        )
