"""P6, one bad row costs one row: how much gets through with one poisoned event in a thousand, beside none.

What fails, hangs or raises is measured at full speed: a backlog with and without poison, in turn. What kills or blocks
a worker costs that worker's time by its nature: it is measured at a steady rate, as what is delivered by the end.
"""

import asyncio

from chaos.world import Progress, World
from holdfast import NewEvent

AT_FULL_SPEED = ("raise", "hang", "unwind", "text")
AT_A_STEADY_RATE = ("exit", "block")
BACKLOG = 20_000
REPEATS = 4
RATE = 100
WINDOW = 30.0
DRAINED = "SELECT count(*) = 0 FROM core.outbox WHERE settled_at IS NULL"
SPEED = """
    SELECT count(*) / greatest(extract(epoch FROM max(settled_at) - min(settled_at)), 0.001)::float8
    FROM core.outbox WHERE event_type = 'probe.sent' AND idempotency_key = ANY($1)
"""
DELIVERED = "SELECT count(*) FROM core.outbox WHERE status = 'delivered' AND idempotency_key = ANY($1)"


async def measure(world: World, progress: Progress) -> dict[str, float]:
    """The share of the throughput that is left, for each kind of poison."""
    found: dict[str, float] = {}
    for kind in AT_FULL_SPEED:
        # The best of several: whatever else the machine does can only slow one down.
        best: dict[str | None, float] = {kind: 0.0, None: 0.0}
        for repeat in range(REPEATS):
            progress(f"{kind}, {repeat + 1} of {REPEATS}", 0)
            for each in (None, kind) if repeat % 2 else (kind, None):
                best[each] = max(best[each], await _backlog(world, each))
        found[f"throughput_{kind}"] = best[kind] / best[None]
    progress("steady rate", 0)
    clean = await _steady(world, None)
    for kind in AT_A_STEADY_RATE:
        progress(f"{kind} at a steady rate", 0)
        found[f"throughput_{kind}"] = await _steady(world, kind) / clean
    return found


def _events(world: World, count: int, kind: str | None) -> tuple[list[str], list[NewEvent]]:
    """`count` good events, with a poisoned one in the middle of each thousand, if there is any."""
    keys = world.history.keys(count)
    events = [NewEvent("probe.sent", {}, idempotency_key=key) for key in keys]
    if kind is not None:
        for middle in range(min(500, count // 2), count, 1000):
            (key,) = world.history.keys(1)
            events.insert(middle, NewEvent(f"trouble.{kind}", {"leases": 0.5}, idempotency_key=key))
    return keys, events


async def _backlog(world: World, kind: str | None) -> float:
    """Good events per second, from the first to the last that was settled."""
    keys, events = _events(world, BACKLOG, kind)
    await world.trouble(events)
    await _drained(world)
    return float(await world.ask(SPEED, keys))


async def _steady(world: World, kind: str | None) -> float:
    """How many of the good events that were published in a window were delivered by its end."""
    loop = asyncio.get_running_loop()
    began, published = loop.time(), 0
    keys: list[str] = []
    while (elapsed := loop.time() - began) < WINDOW:
        due = int(RATE * elapsed) - published
        if due:
            poisoned = kind if published // 1000 != (published + due) // 1000 or not published else None
            some, events = _events(world, due, poisoned)
            keys += some
            published += due
            await world.trouble(events)
        await asyncio.sleep(0.1)
    delivered = float(await world.ask(DELIVERED, keys))
    await _drained(world)
    return delivered / len(keys)


async def _drained(world: World) -> None:
    async with asyncio.timeout(90):
        while not await world.ask(DRAINED):
            await asyncio.sleep(0.1)
