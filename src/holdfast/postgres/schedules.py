"""`core.schedules`: what was declared, what is due, and firing it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import asyncpg

from holdfast.payload import encode_payload
from holdfast.postgres.queries import Queries
from holdfast.schedules import Cron, Due, Missed, Schedule, Timing, timing


@dataclass(frozen=True, slots=True)
class Watched:
    """A schedule at the moment of a look. Whoever fires it names the version."""

    name: str
    cron: str | None
    timezone: str | None
    every: timedelta | None
    missed: Missed
    version: int
    owed_after: datetime
    looked_at: datetime
    due_in: float | None  # None: its next slot is still to be worked out

    @property
    def timing(self) -> Timing:
        """As it was declared, which may be by a later version of the code."""
        return timing(self.cron, self.timezone, self.every)


class Schedules:
    def __init__(self, queries: Queries, generation: int) -> None:
        self._queries = queries
        self._generation = generation

    async def declare(self, connection: asyncpg.Connection, schedule: Schedule) -> str:
        """`declared`, `unchanged`, or `older` when the declaration of a later generation stands."""
        cron = schedule.timing if isinstance(schedule.timing, Cron) else None
        (answer,) = await self._fetch(
            connection,
            "declare_schedule",
            {
                "name": schedule.name,
                "cron": cron and cron.expression,
                "timezone": cron and cron.timezone,
                "every": None if isinstance(schedule.timing, Cron) else schedule.timing.interval,
                "missed": schedule.missed,
                "event_type": schedule.event_type,
                "source": schedule.source,
                "target": schedule.target,
                "priority": schedule.priority,
                "payload": encode_payload(dict(schedule.payload)),
                "generation": self._generation,
            },
        )
        return str(answer[0])

    async def look(self, connection: asyncpg.Connection, names: Iterable[str]) -> list[Watched]:
        """Those of some schedules that are there and not paused."""
        rows = await self._fetch(connection, "look_at_schedules", {"names": list(names)})
        return [Watched(**row) for row in rows]

    async def fire(self, connection: asyncpg.Connection, watched: Watched, due: Due) -> bool:
        """Publish what is due and move on; false when somebody else has, or is just doing it."""
        values = {
            "name": watched.name,
            "version": watched.version,
            "slots": due.fire,
            "until": due.until,
            "next": due.next,
            "generation": self._generation,
        }
        (answer,) = await self._fetch(connection, "fire_schedule", values)
        return bool(answer[0])

    async def _fetch(
        self, connection: asyncpg.Connection, name: str, values: Mapping[str, object]
    ) -> list[asyncpg.Record]:
        statement = self._queries.asyncpg(name)
        # Behind a transaction pooler a statement is prepared and run by the same session only inside a transaction.
        async with connection.transaction(isolation="read_committed"):
            records: list[asyncpg.Record] = await connection.fetch(statement.sql, *statement.bind(values))
        return records
