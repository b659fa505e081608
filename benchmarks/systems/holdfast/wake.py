"""From commit to handler."""

import argparse
import time
from typing import Any

import asyncpg

from benchmarks.systems.harness import BUSINESS, ORDERS, delivered
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE
from holdfast import EventEnvelope, HandlerRegistry, Publisher, Worker


async def latency(options: argparse.Namespace) -> dict[str, Any]:
    """And how many notifications the producers sent for it."""
    observer = await prepare(options.dsn, due=0)
    await observer.execute(ORDERS)
    connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
    registry, publisher = HandlerRegistry(), Publisher("shop")
    handled: dict[int, float] = {}
    rung = 0

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(event: EventEnvelope) -> None:
        handled[event.payload["n"]] = time.perf_counter()

    async def commit(connection: asyncpg.Connection, number: int) -> float:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(BUSINESS)
        await publisher.publish(connection, EVENT_TYPE, {"n": number})
        # The commit is visible somewhere between this reading and its answer; the earlier one is the honest one.
        at = time.perf_counter()
        await transaction.commit()
        return at

    def ring(*_: object) -> None:
        nonlocal rung
        rung += 1

    await observer.add_listener("outbox_default", ring)
    worker = Worker(options.dsn, registry, observers=())
    result = await delivered(options, observer, connections, commit, lambda: worker, handled)
    return result | {"notifications": round(rung / result["events"], 4)}
