"""Calls of handlers as their processes noted them, and what the scenarios share: publishing, waiting, killing."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.nemeses import victims
from chaos.nemeses.processes import KillWorkers
from chaos.world import Strike, World
from holdfast import NewEvent

AT_ONCE = 2_000  # events in a transaction


@dataclass(frozen=True, slots=True)
class Mark:
    """One line: what happened to which event, when, in which process."""

    what: str  # began, done, retried or rejected
    handler: str
    key: str
    at: float
    process: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a handler, to its end or to the death of its process."""

    handler: str
    key: str
    began: float
    ended: float


class Killer:
    """Kills workers, and knows when it did: a process does nothing after that."""

    def __init__(self, world: World) -> None:
        self.deaths: dict[int, float] = {}  # by process
        self._world, self._rng = world, world.rng("killer")

    def kill(self) -> None:
        for victim in victims(self._world, self._rng, 1):
            self._world.fleet.kill(victim)
            now = self.deaths[victim.pid] = time.monotonic()
            self._world.strikes.append(Strike(KillWorkers.name, now, now, [victim.id]))
            self._world.note("strike", nemesis=KillWorkers.name, slots=[victim.slot])

    async def at(self, began: float, moments: Sequence[float]) -> None:
        """Kill one worker at each of these seconds after the beginning."""
        for moment in moments:
            await asyncio.sleep(max(0.0, began + moment - time.monotonic()))
            self.kill()

    async def every(self, seconds: float) -> None:
        """Kill one worker after the other, until this is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            self.kill()


async def publish(world: World, events: Sequence[NewEvent]) -> None:
    """Publish events in the order given, some thousands in each transaction."""
    for first in range(0, len(events), AT_ONCE):
        await world.trouble(events[first : first + AT_ONCE])


def marks(world: World, handler: str) -> list[Mark]:
    """What one handler did, in all processes, in the order of time."""
    found = []
    for path in world.deliveries.glob("*.calls"):
        for line in path.read_text().splitlines():
            what, name, key, at = line.split()
            if name == handler:
                found.append(Mark(what, name, key, float(at), int(path.stem)))
    return sorted(found, key=lambda mark: mark.at)


def calls(lines: Sequence[Mark], deaths: dict[int, float]) -> list[Call]:
    """Beginnings with their ends. One without an end was ended by the death of its process, or goes on."""
    began: dict[tuple[str, int], float] = {}
    found = []
    for mark in lines:
        if mark.what == "began":
            began[mark.key, mark.process] = mark.at
        else:
            found.append(Call(mark.handler, mark.key, began.pop((mark.key, mark.process)), mark.at))
    for (key, process), at in began.items():
        found.append(Call(lines[0].handler, key, at, deaths.get(process, float("inf"))))
    return found


async def drained(world: World, event_type: str, within: float) -> float:
    """Wait until no event of a type is open; returns the seconds, or fails."""
    began = time.monotonic()
    left = "SELECT count(*) FROM core.outbox WHERE settled_at IS NULL AND event_type = $1"
    while count := await world.ask(left, event_type):
        if time.monotonic() - began > within:
            world.complaints.append(f"{count} events of {event_type} are open after {within:g} s")
            break
        await asyncio.sleep(0.1)
    return time.monotonic() - began
