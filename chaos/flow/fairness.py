"""Fairness: one tenant has 200,000 events, and others have one each, while workers go at full speed."""

import asyncio
import time

from chaos.flow.calls import drained, marks, publish
from chaos.world import Progress, World
from holdfast import NewEvent
from holdfast.operator import Operator

MANY = 200_000
SINGLES, PAUSE = 10, 0.3
WITHIN = 300.0
EVENT_TYPE, HANDLER = "report.due", "report.render"


async def measure(world: World, progress: Progress) -> dict[str, float]:
    async with Operator(world.admin_address, actor="chaos") as operator:
        await operator.handlers.pause(HANDLER)
        progress(f"publishing {MANY:,}", 0)
        await publish(world, [_event(key, "large") for key in world.history.keys(MANY)])
        await operator.handlers.resume(HANDLER)
    progress("at full speed", 0)
    while sum(mark.what == "done" for mark in marks(world, HANDLER)) < MANY // 100:
        await asyncio.sleep(0.1)
    singles: dict[str, float] = {}
    for key in world.history.keys(SINGLES):
        await world.trouble([_event(key, f"small-{key}")])
        singles[key] = time.monotonic()
        await asyncio.sleep(PAUSE)
    left = await world.ask("SELECT count(*) FROM core.outbox WHERE settled_at IS NULL")
    await drained(world, EVENT_TYPE, WITHIN)
    lines = [mark for mark in marks(world, HANDLER) if mark.what == "began"]
    began = {mark.key: mark.at for mark in reversed(lines)}
    waits = [began[key] - at for key, at in singles.items() if key in began]
    return {
        "single_max_s": max(waits),
        "singles": len(waits),
        "left_behind": left,
        "per_second": len(lines) / (lines[-1].at - lines[0].at),
    }


def _event(key: str, tenant: str) -> NewEvent:
    return NewEvent(EVENT_TYPE, {}, idempotency_key=key, fairness_key=tenant)
