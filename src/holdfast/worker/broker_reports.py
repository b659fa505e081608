"""Asks the broker every few seconds what it holds for this worker's handlers, and writes that into the database.

Operators read it there, with the status, the metrics and the doctor. Of the workers with the same handlers one asks for
all.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

from holdfast.brokers.engine import Backlog, BrokerUnavailable, Engine, Interest, Weakness, sum_of
from holdfast.errors import ConfigurationError
from holdfast.failure import describe
from holdfast.measurements import BrokerAnswer
from holdfast.observing import ObserverGroup
from holdfast.postgres.brokers import BrokerStatements
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.telemetry import Notice
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.shared_connection import SharedConnection

_EVERY = 15.0
_PATIENCE = 10.0
# Seconds. An older answer is outdated: another worker has asked since.
_LATELY = 60.0
_MOST_WEAKNESSES = 100
# Stands for the broker itself among the names of handlers.
_ITSELF = ""


class BrokerReports:
    """One loop for one broker. `taking` returns what is taken now: each interest, and whether the broker answers it."""

    def __init__(
        self,
        engine: Engine,
        statements: BrokerStatements,
        database: SharedConnection,
        channels: Iterable[str],
        taking: Callable[[], Mapping[Interest, bool]],
        observe: ObserverGroup,
    ) -> None:
        self._engine = engine
        self._statements = statements
        self._database = database
        self._channels = tuple(channels)
        self._taking = taking
        self._observe = observe
        self._hourly = HourlyLimit()
        self._answers: dict[tuple[str, str], tuple[float, Backlog]] = {}  # by handler and channel

    async def run(self) -> None:
        """Report until cancelled. Outages are not logged here: the relay, the takers and the settler do that."""
        while True:
            try:
                await self.run_once(_EVERY)
            except BrokerUnavailable:
                pass
            except (*PASSING_FAULTS, *CONNECTION_FAULTS):
                self._database.drop()
            except Exception as fault:
                self._tell(fault)  # the next report may succeed
            await asyncio.sleep(_EVERY / 3)

    def _tell(self, fault: Exception) -> None:
        if self._hourly.due("broker_report_failed"):
            details: dict[str, object] = {
                "broker": self._engine.name,
                "error": describe(fault).text,
                "action": "asking again; until then operators see an old report",
            }
            self._observe(Notice("warning", "broker_report_failed", details))

    def answers(self) -> tuple[BrokerAnswer, ...]:
        """Return the broker's last answers about this worker's handlers, for its metrics. Any thread may call it.

        An old answer has its age and no numbers: there is an outage, or another worker has asked since.
        """
        taken = {(each.handler_name, each.channel) for each in self._taking()}
        told = [(name, *each) for (name, channel), each in tuple(self._answers.items()) if (name, channel) in taken]
        found = []
        for name in sorted({name for name, _, _ in told}):
            parts = [(at, each) for of, at, each in told if of == name]
            oldest = min(at for at, _ in parts)
            lately = time.time() - oldest < _LATELY
            numbers = _numbers(sum_of(name, [each for _, each in parts])) if lately else (None, None, None)
            found.append(BrokerAnswer(self._engine.name, name, *numbers, oldest))
        return tuple(found)

    async def run_once(self, every: float) -> None:
        """Report on the handlers, and the broker, of which the last report is at least `every` seconds old."""
        for channel in self._channels:
            taking = {each: answered for each, answered in self._taking().items() if each.channel == channel}
            names = [each.handler_name for each in taking]
            async with self._database.lent() as connection:
                due = await self._statements.due_reports(
                    connection, self._engine.name, channel, [*names, _ITSELF], every
                )
            if due:
                await self._report(channel, taking, due)

    async def _report(self, channel: str, taking: Mapping[Interest, bool], due: Sequence[str]) -> None:
        # Not for handlers whose takers get no answer: their reports grow old, and the doctor names them. A queue
        # without a leader would still tell its number of messages.
        interests = [each for each, answered in taking.items() if answered and each.handler_name in due]
        found = await self._engine.backlogs(interests, timeout=_PATIENCE) if interests else []
        held = {each.handler_name: _numbers(each) for each in found}
        self._answers |= {(each.handler_name, channel): (time.time(), each) for each in found}
        weak: Sequence[Weakness] = []
        if _ITSELF in due:
            async with self._database.lent() as connection:
                remembered = await self._statements.remembered(connection)
            weak = await self._engine.weaknesses([channel], tuple(taking), remembered=remembered, timeout=_PATIENCE)
            held[_ITSELF] = (None, None, None)
        if not held:
            return
        async with self._database.lent() as connection:
            weaknesses = [asdict(each) for each in weak[:_MOST_WEAKNESSES]]
            await self._statements.report(connection, self._engine.name, channel, held, weaknesses)
        await self._look_behind(channel, interests)

    async def _look_behind(self, channel: str, interests: Sequence[Interest]) -> None:
        """Record the names under which handlers are served, and ask what is left under the names they had before."""
        broker, naming = self._engine.name, self._engine.naming
        if not interests or not naming:
            return
        names = [each.handler_name for each in interests]
        async with self._database.lent() as connection:
            former = await self._statements.former_names(connection, broker, channel, names, naming)
        for interest in interests:
            for each in former.get(interest.handler_name, ()):
                left = await self._left(each, interest)
                async with self._database.lent() as connection:
                    await self._statements.stranded(connection, broker, channel, interest.handler_name, each, left)
                if left != 0 and self._hourly.due("broker_names_changed", interest.handler_name, channel, each):
                    self._observe(self._stranded(interest, each, left))

    async def _left(self, naming: str, interest: Interest) -> int | None:
        try:
            return await self._engine.named(naming).left(interest, timeout=_PATIENCE)
        except ConfigurationError:
            return None  # the handler's event types have changed too, and the old templates have no names for them

    def _stranded(self, interest: Interest, naming: str, left: int | None) -> Notice:
        broker = self._engine.name
        details: dict[str, object] = {
            "broker": broker,
            "handler": interest.handler_name,
            "channel": interest.channel,
            "names": naming,
            "messages": "not known" if left is None else left,
            "action": f"taking by the names {self._engine.naming} only",
            "remedy": "start the workers with the old names until these messages are taken, or "
            f"holdfast relay check {broker} --repair: docs/brokers.md#names",
        }
        return Notice("warning", "broker_names_changed", details)


def _numbers(backlog: Backlog) -> tuple[int | None, int | None, int | None]:
    return backlog.waiting, backlog.unacknowledged, backlog.redelivered
