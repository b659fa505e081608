"""Order: thousands of keys, eight workers, kills, retries, dead letters that are replayed."""

import asyncio
import time

from chaos.flow import AMENDED
from chaos.flow.calls import Killer, marks, publish
from chaos.flow.model import violations
from chaos.world import Progress, World
from holdfast import NewEvent
from holdfast.operator import Operator

KEYS = 10_000
EVENTS = 4  # of each key
KILL_EVERY = 4.0
BLOCKED_FOR = 5.0  # how long dead letters hold their keys before somebody replays them
WITHIN = 400.0
TYPES = {"account.changed": "account.apply", "ticket.moved": "ticket.move"}
OPEN = "SELECT count(*) FROM core.outbox WHERE settled_at IS NULL"
# A transaction of a slow machine may be aborted: what is not there cannot be anybody's head.
COMMITTED = "SELECT DISTINCT idempotency_key FROM core.outbox WHERE event_type = $1"
FAILED = "SELECT id FROM core.outbox WHERE status = 'failed' LIMIT 500"


async def measure(world: World, progress: Progress) -> dict[str, float]:
    killer, began = Killer(world), time.monotonic()
    killing = asyncio.create_task(killer.every(KILL_EVERY))
    keys: dict[str, dict[str, list[str]]] = {event_type: {} for event_type in TYPES}
    for turn in range(EVENTS):
        progress(f"publishing, {turn + 1} of {EVENTS}", 0)
        events = []
        for number, key in enumerate(world.history.keys(KEYS)):
            event_type = list(TYPES)[number % len(TYPES)]
            keys[event_type].setdefault(f"key-{number}", []).append(key)
            events.append(NewEvent(event_type, {}, idempotency_key=key, ordering_key=f"key-{number}"))
        await publish(world, events)
    for event_type, of in keys.items():
        async with world.admin() as connection:
            committed = {row["idempotency_key"] for row in await connection.fetch(COMMITTED, event_type)}
        keys[event_type] = {name: [key for key in made if key in committed] for name, made in of.items()}
    await asyncio.sleep(BLOCKED_FOR)
    (world.deliveries / AMENDED).touch()
    replayed = await _replay(world, progress, began)
    killing.cancel()
    seconds = time.monotonic() - began
    found: dict[str, float] = {"keys": 0, "violations": 0}
    for event_type, handler in TYPES.items():
        problems, done = violations(marks(world, handler), keys[event_type], killer.deaths)
        world.complaints += [f"{handler}: {problem}" for problem in problems[:10]]
        found["violations"] += len(problems)
        found["keys"] += done
    counted = {"kills": len(killer.deaths), "retries": 0, "replays": replayed, "seconds": seconds}
    counted["retries"] = sum(mark.what == "retried" for handler in TYPES.values() for mark in marks(world, handler))
    return found | counted


async def _replay(world: World, progress: Progress, began: float) -> int:
    """Replay whatever has failed, until nothing is open."""
    replayed = 0
    async with Operator(world.admin_address, actor="chaos") as operator:
        while True:
            async with world.admin() as connection:
                failed = [row["id"] for row in await connection.fetch(FAILED)]
            if failed:
                replayed += len((await operator.failed.replay(failed)).moved)
            elif not (left := await world.ask(OPEN)):
                return replayed
            else:
                progress(f"{left} open, {replayed} replayed", 0)
                await asyncio.sleep(0.5)
            if time.monotonic() - began > WITHIN:
                world.complaints.append(f"events are open after {WITHIN:g} s")
                return replayed
