"""One sweep of everything that retention finds due, on behalf of an operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import asyncpg

from holdfast.ids import uuid7
from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import Batch, Sweep, acquire_sweep, finish_sweep


@dataclass(frozen=True, slots=True)
class Unswept:
    """A step and class that a sweep had to leave, because the database refused to change or delete a row of it."""

    step: str
    content_class: str
    sqlstate: str | None
    error: str


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The result of a sweep."""

    swept: dict[str, int]  # by step
    batches: int
    longest: float  # seconds of the longest batch
    seconds: float
    refused: list[Unswept] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.swept.values())


async def sweep(
    connection: asyncpg.Connection,
    queries: Queries,
    actor: str,
    reason: str | None,
    on_batch: Callable[[Batch], None],
) -> SweepReport:
    """Take everything that is due. Workers leave their sweeps to this one; each batch is audited."""
    sweeper, began = uuid7(), time.monotonic()
    passing = Sweep(queries, actor=actor, reason=reason)
    batches, longest = 0, 0.0
    refused: list[Unswept] = []
    while True:
        await acquire_sweep(connection, queries, sweeper, timedelta(0), force=True)
        batch = await passing.next(connection)
        if batch is None:
            break
        batches, longest = batches + 1, max(longest, batch.seconds)
        if (error := batch.refusal) is not None:
            text = f"{type(error).__name__}: {error.args[0]}"[:500]
            refused.append(Unswept(batch.step, batch.content_class, error.sqlstate, text))
        on_batch(batch)
    await finish_sweep(connection, queries, sweeper, passing)
    return SweepReport(dict(passing.counts), batches, longest, time.monotonic() - began, refused)
