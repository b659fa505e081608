"""Writes the roll-up: adds what the tally has counted, and folds the lines that claims and settles have appended."""

from collections.abc import Mapping
from operator import sub
from typing import Final

import asyncpg

from holdfast.handler_tally import OUTCOMES, HandlerTally, Histogram
from holdfast.postgres.operations.rates import RollupLag
from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import fetch
from holdfast.telemetry import Notice, Observer
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.tally import Tally

# Lines of the journal that one statement folds, in some 50 ms.
_FOLD: Final = 10_000
# Statements in a row: then the worker reports itself alive, and continues the next time.
_FOLDS: Final = 20
_NOTHING: Final = HandlerTally(
    dict.fromkeys(OUTCOMES, 0), archived=0, handler_time=Histogram(), outbox_time=Histogram()
)


class RollupWriter:
    """One worker's part of the roll-up. Counts of outcomes are not written here: each settle has appended its own."""

    at_the_end = True

    def __init__(self, queries: Queries, generation: int, tally: Tally, observe: Observer) -> None:
        self._queries = queries
        self._generation = generation
        self._tally = tally
        self._observe = observe
        self._reports = HourlyLimit()
        self._written: Mapping[str, HandlerTally] = {}

    async def run_once(self, connection: asyncpg.Connection) -> None:
        """Write what is new since the last time, and fold what every worker has appended."""
        counted = self._tally.snapshot()
        new = {name: (each, self._written.get(name, _NOTHING)) for name, each in counted.items()}
        new = {name: pair for name, pair in new.items() if pair[0] != pair[1]}
        if new:
            pairs = new.values()
            await fetch(
                connection,
                self._queries,
                "rollup_write",
                generation=self._generation,
                handlers=list(new),
                lost=[now.counts["lost_lease"] - before.counts["lost_lease"] for now, before in pairs],
                handler_buckets=[n for now, before in pairs for n in _less(now.handler_time, before.handler_time)],
                handler_seconds=[max(0.0, now.handler_time.sum - before.handler_time.sum) for now, before in pairs],
                outbox_buckets=[n for now, before in pairs for n in _less(now.outbox_time, before.outbox_time)],
                outbox_seconds=[max(0.0, now.outbox_time.sum - before.outbox_time.sum) for now, before in pairs],
            )
            self._written = counted
        for _ in range(_FOLDS):
            if (await fetch(connection, self._queries, "rollup_fold", most=_FOLD))[0][0] < _FOLD:
                break
        self._report_lag(RollupLag(**(await fetch(connection, self._queries, "rollup_lag"))[0]))

    def _report_lag(self, lag: RollupLag) -> None:
        if lag.is_behind and self._reports.due("rollup_behind"):
            details: dict[str, object] = {
                "lines": lag.lines,
                "oldest_s": round(lag.seconds, 1),
                "remedy": "rates are incomplete meanwhile; holdfast doctor shows what to look for",
            }
            self._observe(Notice("warning", "rollup_behind", details))

    def failure(self, error: str) -> Notice:
        """Say that it cannot be written."""
        remedy = "rates are incomplete meanwhile; compare the schema with holdfast migrate status"
        return Notice("error", "rollup_failed", {"error": error, "remedy": remedy})


def _less(now: Histogram, before: Histogram) -> list[int]:
    return list(map(sub, now.counts, before.counts))
