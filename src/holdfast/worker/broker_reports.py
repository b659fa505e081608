"""Asks the broker now and then what it holds for this worker's handlers, and tells the database.

Operators see it there: in the status, in the metrics and by the doctor. One worker of the fleet asks for all that have
the same handlers.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import asdict

import asyncpg

from holdfast.brokers.engine import Backlog, BrokerUnavailable, Engine, Interest
from holdfast.postgres.brokers import BrokerStatements
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.worker.shared_connection import SharedConnection

_EVERY = 15.0
_PATIENCE = 10.0
_MOST_WEAKNESSES = 100
# The line of the broker itself.
_ITSELF = ""


class BrokerReports:
    """One loop for one broker. `interests` returns what is taken from it now."""

    def __init__(
        self,
        engine: Engine,
        statements: BrokerStatements,
        database: SharedConnection,
        channels: Iterable[str],
        interests: Callable[[], Iterable[Interest]],
    ) -> None:
        self._engine = engine
        self._statements = statements
        self._database = database
        self._channels = tuple(channels)
        self._interests = interests

    async def run(self) -> None:
        """Report until cancelled. What goes wrong is told by those who need the broker, or the database, for more."""
        while True:
            with contextlib.suppress(BrokerUnavailable):
                try:
                    await self.run_once(_EVERY)
                except (*PASSING_FAULTS, *CONNECTION_FAULTS):
                    self._database.drop()
                except asyncpg.PostgresError:
                    pass  # as of a table that is just being changed: the next report may succeed
            await asyncio.sleep(_EVERY / 3)

    async def run_once(self, every: float) -> None:
        """Report what nobody has reported for so many seconds."""
        for channel in self._channels:
            interests = [each for each in self._interests() if each.channel == channel]
            names = [each.handler_name for each in interests]
            async with self._database.lent() as connection:
                due = await self._statements.due_reports(
                    connection, self._engine.name, channel, [*names, _ITSELF], every
                )
            if due:
                await self._report(channel, [each for each in interests if each.handler_name in due], _ITSELF in due)

    async def _report(self, channel: str, interests: list[Interest], itself: bool) -> None:
        found = await self._engine.backlogs(interests, timeout=_PATIENCE) if interests else []
        held = {each.handler_name: _numbers(each) for each in found}
        weak = await self._engine.weaknesses([channel], timeout=_PATIENCE) if itself else []
        if itself:
            held[_ITSELF] = (None, None, None)
        async with self._database.lent() as connection:
            weaknesses = [asdict(each) for each in weak[:_MOST_WEAKNESSES]]
            await self._statements.report(connection, self._engine.name, channel, held, weaknesses)


def _numbers(backlog: Backlog) -> tuple[int | None, int | None, int | None]:
    return backlog.waiting, backlog.unacknowledged, backlog.redelivered
