"""What can happen between a worker and its database."""

import asyncio
import contextlib
import random

from chaos.nemeses import Blow, Nemesis, victims
from chaos.wire import Cut, Wire
from chaos.world import World


class CutLines(Nemesis):
    name, promise = "cut_lines", "P1: connections that are reset in the middle of anything lose nothing"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        return Blow(details={"cut": world.worker_line.cut() + world.producer_line.cut()})


class LoseAnswers(Nemesis):
    name, promise = "lose_answers", "P1, P2: a commit or settle that was carried out, and whose answer never came"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        muted = world.worker_line.mute() + world.producer_line.mute()
        return Blow(rng.uniform(0.02, 0.5), details={"muted": muted})

    async def heal(self, world: World) -> None:
        world.worker_line.heal()
        world.producer_line.heal()


class RefuseLines(Nemesis):
    name, promise = "refuse_lines", "P7: a database that refuses connections is tried again, in a measured way"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        refused = world.worker_line.refuse() + world.producer_line.refuse()
        return Blow(rng.uniform(0.5, 4.0), details={"cut": refused})

    async def heal(self, world: World) -> None:
        world.worker_line.heal()
        world.producer_line.heal()


class FreezeLines(Nemesis):
    name, promise = "half_open", "B3, P4: connections on which nothing comes any more are found out within 15 s"

    def __init__(self, hold: tuple[float, float] = (4.0, 10.0), *, producers: float = 0.5) -> None:
        self._hold = hold
        self._producers = producers  # how likely they are hit, too

    async def strike(self, world: World, rng: random.Random) -> Blow:
        frozen = world.worker_line.freeze()
        if rng.random() < self._producers:
            frozen += world.producer_line.freeze()
        return Blow(rng.uniform(*self._hold), details={"frozen": frozen})

    async def heal(self, world: World) -> None:
        world.worker_line.heal()
        world.producer_line.heal()


class SwallowLines(Nemesis):
    name, promise = "swallow_lines", "B3: a network on which nothing passes, also no new connection"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        frozen = world.worker_line.freeze(swallow=True)
        return Blow(rng.uniform(16.0, 20.0), details={"frozen": frozen})

    async def heal(self, world: World) -> None:
        world.worker_line.heal()


class StopBehindDeadLines(Nemesis):
    name, promise = "stop_behind_dead_lines", "P5: a worker whose database does not answer ends within grace + 5 s"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        frozen = world.worker_line.freeze(swallow=True)
        struck = victims(world, rng, 1)
        for victim in struck:
            await world.fleet.stop(victim, "half_open")
        return Blow(1.0, details={"frozen": frozen})

    async def heal(self, world: World) -> None:
        world.worker_line.heal()


class CutMessage(Nemesis):
    name, promise = "cut_message", "P1, P2: a connection may break before, within or after any message"

    PURPOSES = ("claim", "claim", "settle", "settle", "handler", "handler", "leases", "listen", "sleeper")

    def __init__(self) -> None:
        self._wire: Wire | None = None
        self._name: str | None = None

    async def strike(self, world: World, rng: random.Random) -> Blow:
        cut = Cut(
            rng.choice(("to_server", "to_client")),
            rng.randint(1, 30),
            rng.choice(("before", "within", "after")),
            rng.choice(("closed", "closed", "half_open")),
        )
        self._wire, self._name = world.around.producers, None
        if rng.random() < 0.7:
            self._wire, self._name = world.around.workers, f"holdfast {rng.choice(self.PURPOSES)}"
        watch = self._wire.watch(self._name, cut)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4):
                await watch.made.wait()
        details: dict[str, object] = {"cut": str(cut), "of": self._name or "producers", "made": watch.made.is_set()}
        return Blow(rng.uniform(2.0, 8.0) if cut.how == "half_open" else 0.0, details)

    async def heal(self, world: World) -> None:
        if self._wire is not None:
            self._wire.watch()
            self._wire.heal()


class Blackhole(Nemesis):
    name, promise = "blackhole", "B3: a network that swallows packets is noticed within 15 s, and nothing happens twice"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        world.around.link("down")
        return Blow(rng.uniform(16.0, 20.0))

    async def heal(self, world: World) -> None:
        world.around.link("up")
