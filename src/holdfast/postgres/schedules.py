"""`core.schedules`: what was declared, what is due, firing it, and what operators see of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

import asyncpg

from holdfast.errors import ConfigurationError
from holdfast.payload import encode_payload
from holdfast.postgres.queries import Queries
from holdfast.postgres.statements import NamedStatements
from holdfast.schedules import Cron, Due, Missed, Schedule, Timing, timing

MOST_SCHEDULES = 1_000
OVERDUE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Watched:
    """A schedule as it was read. `fire` succeeds only while the row has this `version`."""

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


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """A schedule as operators see it."""

    name: str
    cron: str | None
    timezone: str | None
    every: timedelta | None
    missed: Missed
    event_type: str
    source: str
    target: str | None
    priority: int
    payload: str | None  # JSON, if it was asked for
    generation: int  # of the code that declared it
    declared_at: datetime
    served_at: datetime  # when a worker that declares it last said so
    served: bool  # a living worker declares it
    owed_after: datetime  # slots up to here are dealt with; in the future when the server's clock was set back
    next_slot: datetime | None
    last_slot: datetime | None
    last_fired_at: datetime | None
    fired: int
    paused_at: datetime | None
    paused_by: str | None
    looked_at: datetime
    overdue_for: float | None  # seconds

    @property
    def state(self) -> str:
        """`paused`, `overdue`, `unserved` when no living worker declares it, or `waiting` for its next slot."""
        if self.paused_at is not None:
            return "paused"
        if self.overdue_for is not None:
            return "overdue"
        return "waiting" if self.served else "unserved"

    @property
    def timing(self) -> Timing:
        return timing(self.cron, self.timezone, self.every)

    @property
    def when(self) -> str:
        """Return the timing as text."""
        return f"{self.cron} ({self.timezone})" if self.cron is not None else f"every {self.every}"


LISTING: dict[str, object] = {"overdue": OVERDUE, "most": MOST_SCHEDULES, "payload": False, "only": None}


async def listing(connection: asyncpg.Connection, schema: str = "core") -> list[ScheduleStatus]:
    """Every schedule that was declared and not removed."""
    queries = Queries(schema)
    statement = queries.asyncpg("list_schedules")
    async with connection.transaction(isolation="read_committed", readonly=True):
        await connection.fetch(queries.asyncpg("begin_read").sql)
        rows = await connection.fetch(statement.sql, *statement.bind(LISTING))
    return [ScheduleStatus(**row) for row in rows]


class Schedules:
    def __init__(self, statements: NamedStatements, generation: int) -> None:
        # It commits by itself: a process that is frozen before it could say so must not keep the schedule's row.
        self._fetch = statements.fetch
        self._generation = generation

    async def declare(self, connection: asyncpg.Connection, schedule: Schedule, *, force: bool = False) -> str:
        """`declared`, `unchanged`, or `older` when the declaration of a later generation stands.

        `owed`: its timing would change while a slot of the old one is still to be fired. Not by force.
        """
        cron = schedule.timing if isinstance(schedule.timing, Cron) else None
        values = {
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
            "force": force,
        }
        try:
            (answer,) = await self._fetch(connection, "schedule_declare", **values)
        except asyncpg.InsufficientPrivilegeError as error:
            if error.hint is None:  # not of ours: who may not even call it
                raise
            remedy = "as the owner of the schema, give the worker's role a line in core.sources"
            raise ConfigurationError(f"{schedule.name}.source", str(error), remedy) from None
        return str(answer[0])

    async def watch(self, connection: asyncpg.Connection, names: Iterable[str]) -> list[Watched]:
        """Those of some schedules that are there and not paused."""
        rows = await self._fetch(connection, "schedules_watch", names=list(names))
        return [Watched(**row) for row in rows]

    async def fire(
        self, connection: asyncpg.Connection, watched: Watched, due: Due, trace_context: str | None = None
    ) -> bool:
        """Publish the due slots and advance the schedule; false when another worker has done so or holds the row."""
        values = {
            "name": watched.name,
            "version": watched.version,
            "slots": due.fire,
            "until": due.until,
            "next": due.next,
            "generation": self._generation,
            "trace_context": trace_context,
        }
        (answer,) = await self._fetch(connection, "schedule_fire", **values)
        return bool(answer[0])
