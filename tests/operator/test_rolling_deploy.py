"""A deployment with a generation under load, by the verbs of docs/deploying.md (GEN-1, GEN-2)."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Publisher
from holdfast.operator import Operator, Refused
from tests.worker.support import running, until

EVENT = "order.placed"


async def test_a_rolling_deploy_under_load(dsn: str, conn: asyncpg.Connection) -> None:
    """Two workers of the old code are replaced by two of the new one under load: no event meets the
    other generation's code, none takes a second attempt, and nothing is stranded when the old one is retired
    (GEN-1, GEN-2).
    """
    handled: dict[str, list[int]] = {"old": [], "new": []}  # by code, the generation in each payload
    stop = asyncio.Event()
    published = 0

    def code(version: str) -> HandlerRegistry:
        registry = HandlerRegistry()

        @registry.handler(EVENT, name="billing.charge_card")
        async def handle(event: EventEnvelope) -> None:
            handled[version].append(event.payload["generation"])

        return registry

    async def produce(current: list[int]) -> None:
        nonlocal published
        connection = await asyncpg.connect(dsn)
        try:
            while not stop.is_set():
                generation = current[0]
                publisher = Publisher("shop", generation=generation)
                async with connection.transaction():
                    await publisher.publish(connection, EVENT, {"generation": generation})
                published += 1
                await asyncio.sleep(0.002)
        finally:
            await connection.close()

    async with Operator(dsn, actor="ann@example.org") as operator:
        before = await operator.generations.begin("v1")
        services = [[before], [before]]  # each process of the service, with its number
        async with running(dsn, code("old"), generation=before), running(dsn, code("old"), generation=before):
            producers = [asyncio.create_task(produce(service)) for service in services]
            await until(lambda: len(handled["old"]) > 50, what="the old code works")
            after = await operator.generations.begin("v2")
            with pytest.raises(Refused):
                await operator.generations.retire(before)
            async with running(dsn, code("new"), generation=after), running(dsn, code("new"), generation=after):
                for service in services:  # one process of the service after the other
                    service[0] = after
                    seen = len(handled["new"])
                    await until(lambda seen=seen: len(handled["new"]) > seen + 30, what="the new code works")
                async with conn.transaction():
                    late = Publisher("shop", generation=before)
                    await late.publish(conn, EVENT, {"generation": after}, delay=timedelta(hours=1))
                stop.set()
                await asyncio.gather(*producers)
                total = published
                await until(lambda: sum(map(len, handled.values())) == total, what="every event is handled")
                assert set(handled["old"]) == {before}
                assert set(handled["new"]) == {after}
                assert await conn.fetchval("SELECT max(attempts) FROM core.outbox") == 1
    async with Operator(dsn, actor="ann@example.org") as operator:
        # What is not due yet when the old workers have stopped goes to the new generation.
        moved = await operator.generations.move(before, after, reason="its workers are gone")
        assert (moved.moved, moved.left) == (1, 0)
        await until(lambda: retired(operator, before), what="the old generation can be retired")
        found = {each.generation: each for each in await operator.generations.all()}
        assert found[before].retired_at is not None
        assert (found[before].open, found[after].open) == (0, 1)


async def retired(operator: Operator, generation: int) -> bool:
    """Whether it could be retired: a worker that has stopped counts as living for a moment."""
    try:
        await operator.generations.retire(generation)
    except Refused:
        return False
    return True
