"""A breaker: a partner is down for two minutes with 10,000 events due, and workers are killed meanwhile."""

import asyncio
import time

from chaos.flow import AWAY
from chaos.flow.calls import Killer, drained, marks, publish
from chaos.world import Progress, World
from holdfast import NewEvent

BEFORE, DUE = 500, 10_000
QUIET = 2.5  # seconds without events; what was running when a partner goes away calls it, however much that is
OUTAGE = 120.0
KILLS = (10.0, 40.0, 75.0, 105.0)
WITHIN = 120.0
EVENT_TYPE, HANDLER = "shipment.due", "shipment.book"


async def measure(world: World, progress: Progress) -> dict[str, float]:
    killer = Killer(world)
    await publish(world, _events(world, BEFORE))
    await drained(world, EVENT_TYPE, WITHIN)
    await asyncio.sleep(QUIET)
    (world.deliveries / AWAY).touch()
    went = time.monotonic()
    await publish(world, _events(world, DUE))
    progress("the partner is away", 0)
    await killer.at(went, KILLS)
    await asyncio.sleep(went + OUTAGE - time.monotonic())
    (world.deliveries / AWAY).unlink()
    back = time.monotonic()
    progress("the partner is back", 0)
    await asyncio.sleep(1)
    killer.kill()
    await drained(world, EVENT_TYPE, WITHIN)
    lines = marks(world, HANDLER)
    return {
        "outage_s": back - went,
        "calls": sum(mark.what == "began" and went <= mark.at < back for mark in lines),
        "handled_after_s": max(mark.at for mark in lines if mark.what == "done") - back,
        "dead_letters": await world.ask("SELECT count(*) FROM core.outbox WHERE failed_at IS NOT NULL"),
        "kills": len(killer.deaths),
    }


def _events(world: World, count: int) -> list[NewEvent]:
    return [NewEvent(EVENT_TYPE, {}, idempotency_key=key) for key in world.history.keys(count)]
