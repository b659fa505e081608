"""Batches: ten poisoned events among 10,000 fail alone."""

from chaos.flow.calls import drained, publish
from chaos.world import Progress, World
from holdfast import NewEvent

COUNT, POISONED = 10_000, 10
WITHIN = 120.0
OUTCOMES = """
    SELECT count(*) FILTER (WHERE failed_at IS NOT NULL AND payload ? 'poisoned') AS poisoned_failed,
           count(*) FILTER (WHERE failed_at IS NOT NULL AND NOT payload ? 'poisoned') AS others_failed,
           count(*) FILTER (WHERE status = 'delivered') AS handled,
           max(attempts) AS attempts
    FROM core.outbox WHERE event_type LIKE 'entry.%'
"""


async def measure(world: World, progress: Progress) -> dict[str, float]:
    progress("ten poisoned events", 0)
    events = [NewEvent("entry.posted", {}, idempotency_key=key) for key in world.history.keys(COUNT)]
    for number in range(COUNT // POISONED // 2, COUNT, COUNT // POISONED):
        key = events[number].idempotency_key
        events[number] = NewEvent("entry.forged", {"poisoned": True}, idempotency_key=key)
    await publish(world, events)
    for event_type in ("entry.posted", "entry.forged"):
        await drained(world, event_type, WITHIN)
    async with world.admin() as connection:
        return dict(await connection.fetchrow(OUTCOMES))
