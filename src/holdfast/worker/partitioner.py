"""Partitions of the outbox: made ahead, and dropped when retention is over, by whichever worker comes first."""

import time

import asyncpg

from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import fetch
from holdfast.telemetry import Notice, Observer
from holdfast.worker.hourly import HourlyLimit

_ASK_EVERY = 60.0
# In a row: then the worker reports itself alive, and goes on the next time.
_MOST = 10


class Partitioner:
    """Asks the database once a minute. Where the outbox is not partitioned, that is all."""

    at_the_end = False

    def __init__(self, queries: Queries, observe: Observer, *, drop: bool) -> None:
        self._queries = queries
        self._observe = observe
        self._drop = drop
        self._reports = HourlyLimit()
        self._ask_at = 0.0

    async def run_once(self, connection: asyncpg.Connection) -> None:
        """Make and drop what is due."""
        now = time.monotonic()
        if now < self._ask_at:
            return
        self._ask_at = now + _ASK_EVERY
        try:
            for _ in range(_MOST):
                made = await fetch(connection, self._queries, "partitions_extend")
                if not made:
                    break
                self._observe(Notice("info", "partition_made", dict(made[0])))
            for _ in range(_MOST * self._drop):
                dropped = await fetch(connection, self._queries, "partitions_drop")
                if not dropped:
                    break
                self._observe(Notice("info", "partition_dropped", dict(dropped[0])))
        except asyncpg.LockNotAvailableError:
            self._report_lock()

    def _report_lock(self) -> None:
        """Long transactions hold the outbox. Nothing is urgent here: it is tried again every minute."""
        if self._reports.due("partitions_locked"):
            remedy = "tried again every minute; holdfast doctor shows long transactions, if it goes on"
            self._observe(Notice("warning", "partitions_locked", {"remedy": remedy}))

    def failure(self, error: str) -> Notice:
        """Say that partitions cannot be looked after."""
        remedy = "holdfast partitions status; compare the schema with holdfast migrate status"
        return Notice("error", "partitions_failed", {"error": error, "remedy": remedy})
