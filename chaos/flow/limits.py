"""Limits of the fleet for a minute, with kills: seven at once over five workers, and a hundred a second."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from chaos.flow import SLOT_SECONDS
from chaos.flow.calls import Call, Killer, calls, marks, publish
from chaos.world import Progress, World
from holdfast import NewEvent

AT_ONCE, RATE = 7, 100
WINDOW = 60.0
SETTLE_IN = 3.0  # workers have filled the slots and emptied the bucket by then
KILLS = (10.0, 28.0, 46.0)
# More than can be handled until the window ends.
WANTED = int(1.2 * AT_ONCE / SLOT_SECONDS * (WINDOW + SETTLE_IN))
DUE = int(1.2 * RATE * (WINDOW + SETTLE_IN))


async def measure(world: World, progress: Progress) -> dict[str, float]:
    killer = Killer(world)
    for event_type, count in (("slot.wanted", WANTED), ("call.due", DUE)):
        await publish(world, [NewEvent(event_type, {}, idempotency_key=key) for key in world.history.keys(count)])
    progress("a minute at the limits", 0)
    await asyncio.sleep(SETTLE_IN)
    began = time.monotonic()
    await killer.at(began, KILLS)
    await asyncio.sleep(began + WINDOW - time.monotonic())
    slots = calls(marks(world, "slot.use"), killer.deaths)
    made = [mark.at for mark in marks(world, "call.make") if mark.what == "began"]
    ended = began + WINDOW
    return {
        "at_once": most_at_once(slots, began, ended),
        "slots_used": used(slots, began, ended) / (AT_ONCE - used(kept(slots, killer, world), began, ended)),
        "slots_used_of_all": used(slots, began, ended) / AT_ONCE,
        "rate_per_s": sum(began <= at < ended for at in made) / WINDOW,
        "kills": len(killer.deaths),
    }


def kept(found: Sequence[Call], killer: Killer, world: World) -> list[Call]:
    """The slots that killed workers keep, each until its lease is over."""
    deaths = set(killer.deaths.values())
    return [
        replace(call, began=call.ended, ended=call.ended + world.setup.lease) for call in found if call.ended in deaths
    ]


def most_at_once(found: Sequence[Call], began: float, ended: float) -> int:
    """How many calls ran at the same time, at most."""
    changes = [(call.began, 1) for call in found] + [(call.ended, -1) for call in found]
    running = most = 0
    for at, change in sorted(changes):
        running += change
        if began <= at < ended:
            most = max(most, running)
    return most


def used(found: Sequence[Call], began: float, ended: float) -> float:
    """How many calls ran, on average."""
    return sum(max(0.0, min(call.ended, ended) - max(call.began, began)) for call in found) / (ended - began)
