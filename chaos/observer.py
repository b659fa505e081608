"""Watches the outbox from a connection of its own, and what its samples say about a run."""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import asyncpg

from chaos.workers import Death

INTERVAL = 0.05
IN_FLIGHT = """
    SELECT claimed_by::text AS worker, id::text FROM core.outbox
    WHERE settled_at IS NULL AND ordering_key IS NULL AND status = 'in_flight'
    UNION ALL
    SELECT claimed_by::text, id::text FROM core.outbox
    WHERE settled_at IS NULL AND ordering_key IS NOT NULL AND status = 'in_flight'
"""
CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'chaos_worker'"
# Between a sample and a fault more can be claimed.
_BEFORE, _AFTER = 1.0, 0.3
# No samples for so long: the database was away, or would not answer.
_GAP = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Who held which rows, and how many connections all workers had."""

    at: float
    held: dict[str, set[str]] = field(default_factory=dict)
    connections: int = 0

    def count(self, worker: str | None = None) -> int:
        return sum(len(rows) for holder, rows in self.held.items() if worker in (None, holder))


class Observer:
    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        connection: asyncpg.Connection | None = None
        try:
            while True:
                try:
                    connection = connection or await asyncpg.connect(self.dsn, timeout=2, command_timeout=2)
                    held: dict[str, set[str]] = {}
                    for worker, row in await connection.fetch(IN_FLIGHT):
                        held.setdefault(worker, set()).add(row)
                    connections = await connection.fetchval(CONNECTIONS)
                    self.samples.append(Sample(time.monotonic(), held, connections))
                except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
                    if connection is not None:
                        connection.terminate()
                    connection = None
                await asyncio.sleep(INTERVAL)
        finally:
            if connection is not None:
                with contextlib.suppress(Exception):
                    connection.terminate()


def in_flight(samples: Iterable[Sample], at: float, worker: str | None = None, until: float = 0.0) -> int:
    """How many rows a worker, or all of them, held when something happened to it, or while it went on.

    A busy machine may leave no sample near that: then the last one before it counts.
    """
    before, last = 0, max(at, until) + _AFTER
    near = []
    for each in samples:
        if at - _BEFORE <= each.at <= last:
            near.append(each.count(worker))
        elif each.at < at:
            before = each.count(worker)
    return max(near, default=before)


def recoveries(samples: Sequence[Sample], deaths: Iterable[Death]) -> list[float]:
    """How many seconds after its death each row that a worker held was somebody else's, or settled.

    Time in which the database did not answer does not count.
    """
    found: list[float] = []
    for death in deaths:
        later = [each for each in samples if each.at >= death.at]
        waiting = set(later[0].held.get(death.worker, ())) if later else set()
        since, last = death.at, death.at
        for sample in later:
            if sample.at - last > _GAP:
                since = last = sample.at
            last = sample.at
            gone = waiting - sample.held.get(death.worker, set())
            found += [sample.at - since] * len(gone)
            waiting -= gone
            if not waiting:
                break
    return found
