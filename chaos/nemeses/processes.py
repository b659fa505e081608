"""Signals to worker processes."""

import asyncio
import random

from chaos.nemeses import NOBODY, Blow, Nemesis, hit, victims
from chaos.world import World
from holdfast import NewEvent


class KillWorkers(Nemesis):
    name, promise = "kill_workers", "A1, P1-P3: SIGKILL at any moment loses nothing"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        struck = victims(world, rng, rng.choice((1, 1, 2)))
        for victim in struck:
            world.fleet.kill(victim)
        return hit(struck)


class FreezeWorkers(Nemesis):
    name, promise = "freeze_workers", "P2: a worker that sleeps past its lease (SIGSTOP) is fenced when it wakes"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        struck = victims(world, rng, 1)
        for victim in struck:
            world.fleet.freeze(victim)
        return hit(struck, rng.uniform(1.2, 2.2) * world.setup.lease)

    async def heal(self, world: World) -> None:
        world.fleet.thaw()


class StopWorkers(Nemesis):
    name, promise = "stop_workers", "A9, P5: SIGTERM ends a worker in time, and it gives back what it has not begun"

    def __init__(self, most: int = 1) -> None:
        self._most = most

    async def strike(self, world: World, rng: random.Random) -> Blow:
        struck = victims(world, rng, self._most)
        for victim in struck:  # a rolling deployment: one after the other
            stop = await world.fleet.stop(victim, "busy")
            world.note("stopped", slot=victim.slot, seconds=round(stop.seconds, 2), code=stop.code)
            await world.fleet.ready()
        return Blow(details={"slots": [each.slot for each in struck]}, hit=NOBODY)


class HoldLogs(Nemesis):
    name, promise = "hold_logs", "T16: logs that nobody reads keep no worker from delivering, or from ending in time"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        for worker in world.fleet.running:
            worker.pipe.hold()
        payload = {"lines": 3_000}
        keys = world.history.keys(4 * world.setup.workers)
        await world.trouble([NewEvent("trouble.shout", payload, idempotency_key=key) for key in keys])
        await asyncio.sleep(rng.uniform(1.0, 2.0))
        struck = victims(world, rng, 1)
        for victim in struck:
            await world.fleet.stop(victim, "unread")
        return Blow(rng.uniform(0.5, 2.0), {"slots": [each.slot for each in struck]}, NOBODY)

    async def heal(self, world: World) -> None:
        world.fleet.read_logs()


class HurryWorkers(Nemesis):
    name, promise = "hurry_workers", "A10: a second SIGTERM ends a worker at once; its leases give the events back"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        struck = victims(world, rng, 1)
        for victim in struck:
            await world.fleet.stop(victim, "hurried", twice=True)
        return hit(struck)
