"""Retention's sweeps by a worker: in turns with the others, a few seconds at a time, paused for half of them."""

import asyncio
import time
from datetime import timedelta
from uuid import UUID

import asyncpg

from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import Batch, BatchSize, Sweep, acquire_sweep, finish_sweep
from holdfast.telemetry import Notice, Observer
from holdfast.worker.hourly import HourlyLimit

# Between two passes, in the whole fleet.
_REST = timedelta(minutes=10)
# After so long the worker reports itself alive, and continues the next time.
_SPELL = 5.0
_PAUSE = 0.01
# How often a worker that has nothing to sweep asks whether it is its turn.
_ASK_EVERY = 60.0


class Sweeper:
    """Sweeps one pass at a time, in as many calls of `run_once` as it takes."""

    at_the_end = False

    def __init__(self, queries: Queries, worker: UUID, observe: Observer) -> None:
        self._queries = queries
        self._worker = worker
        self._observe = observe
        self._batch_size = BatchSize()
        self._reports = HourlyLimit()
        self._sweep: Sweep | None = None
        self._ask_at = time.monotonic() + _ASK_EVERY

    async def run_once(self, connection: asyncpg.Connection) -> None:
        """Sweep for a while, if it is this worker's turn."""
        began = time.monotonic()
        if self._sweep is None and began < self._ask_at:
            return
        page = await acquire_sweep(connection, self._queries, self._worker, _REST)
        if page is None:
            self._sweep, self._ask_at = None, began + _ASK_EVERY
            return
        self._sweep = sweep = self._sweep or Sweep(self._queries, self._batch_size, inbox_page=page)
        while time.monotonic() < began + _SPELL:
            batch = await sweep.next(connection)
            if batch is None:
                self._sweep, self._ask_at = None, began + _ASK_EVERY
                await finish_sweep(connection, self._queries, self._worker, sweep)
                self._report(sweep)
                return
            if batch.refusal is not None:
                self._report_refusal(batch, batch.refusal)
            # As long as the batch took: retention is not urgent and must not slow down deliveries.
            await asyncio.sleep(batch.seconds + _PAUSE)

    def failure(self, error: str) -> Notice:
        """Say that nothing could be swept."""
        remedy = "holdfast retention sweep shows it; compare the schema with holdfast migrate status"
        return Notice("error", "sweep_failed", {"error": error, "remedy": remedy})

    def _report_refusal(self, batch: Batch, refusal: asyncpg.PostgresError) -> None:
        if not self._reports.due("sweep_failed", batch.step, batch.content_class, str(refusal.sqlstate)):
            return
        # Without the detail of the error, which may quote the row.
        details: dict[str, object] = {
            "error": f"{type(refusal).__name__}: {refusal.args[0]}"[:500],
            "sqlstate": refusal.sqlstate,
            "step": batch.step,
            "content_class": batch.content_class,
            "remedy": "the rest of retention goes on without it; take away what refuses, such as a foreign key to "
            "the schema's tables or a trigger on them: holdfast retention sweep tries it again, holdfast doctor "
            "compares the schema",
        }
        self._observe(Notice("error", "sweep_failed", details))

    def _report(self, sweep: Sweep) -> None:
        swept: dict[str, object] = {step: count for step, count in sweep.counts.items() if count}
        if swept:
            self._observe(Notice("info", "retention_swept", swept))
