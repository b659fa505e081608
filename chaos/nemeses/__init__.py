"""The faults. Each strikes, holds as long as its blow says, and heals; every choice it makes comes from `rng`."""

import random
from dataclasses import dataclass, field

from chaos.workers import WorkerProcess
from chaos.world import World
from holdfast.errors import HoldfastError
from holdfast.operator import DATABASE_ERRORS

# What a strike meets when another lane was quicker: there is no server to lock a table of.
AWAY = (*DATABASE_ERRORS, TimeoutError, HoldfastError)


@dataclass(frozen=True, slots=True)
class Blow:
    """What was done: for the log, and to know for how long, and whom it hit (None: everybody)."""

    hold: float = 0.0
    details: dict[str, object] = field(default_factory=dict)
    hit: list[str] | None = None


NOBODY: list[str] = []


class Nemesis:
    name: str
    promise: str

    async def strike(self, world: World, rng: random.Random) -> Blow:
        raise NotImplementedError

    async def heal(self, world: World) -> None:
        """Take the fault away. Also called when there is nothing to take away."""


def victims(world: World, rng: random.Random, count: int) -> list[WorkerProcess]:
    running = [worker for worker in world.fleet.running if worker.id and not worker.frozen]
    return rng.sample(running, min(count, len(running)))


def hit(workers: list[WorkerProcess], hold: float = 0.0, **details: object) -> Blow:
    return Blow(hold, {"slots": [each.slot for each in workers], **details}, [each.id for each in workers])
