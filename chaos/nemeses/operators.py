"""What operators do while all else goes wrong: pause, limit or open handlers, partition the outbox; and back."""

import contextlib
import random

from chaos.nemeses import AWAY, NOBODY, Blow, Nemesis
from chaos.world import World
from holdfast.operator import Operator

_LIMITED, _WITH_BREAKER = "mail.confirm", "parcel.track"


class TurnHandlers(Nemesis):
    name, promise = "turn_handlers", "LSN-10: a handler that is paused, limited or opened goes on when that is over"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        what = rng.choice(("pause", "limit", "open"))
        async with Operator(world.admin_address, actor="chaos") as operator:
            if what == "pause":
                await operator.handlers.pause(_LIMITED)
            elif what == "limit":
                await operator.handlers.limit(_LIMITED, fleet_concurrency=1, rate="20/s")
            else:
                await operator.handlers.open(_WITH_BREAKER)
        return Blow(rng.uniform(0.5, 2.0), {"turned": what}, hit=NOBODY)

    async def heal(self, world: World) -> None:
        async with Operator(world.admin_address, actor="chaos") as operator:
            await operator.handlers.resume(_LIMITED)
            await operator.handlers.limit(_LIMITED, clear=["fleet_concurrency", "rate"])


class TurnPartitions(Nemesis):
    name, promise = "turn_partitions", "OBX-6: the outbox is partitioned, and made one table again, and nobody notices"

    async def strike(self, world: World, rng: random.Random) -> Blow:
        # What else goes wrong may end it at any statement: then the next one finishes, or goes back.
        with contextlib.suppress(*AWAY):
            async with Operator(world.admin_address, actor="chaos") as operator:
                found = await operator.partitions.status()
                if found.state in ("partitioned", "returning"):
                    await operator.partitions.disable()
                else:
                    await operator.partitions.enable("day")
        return Blow(rng.uniform(0.5, 2.0), hit=NOBODY)
