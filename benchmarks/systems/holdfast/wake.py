"""From commit to handler."""

import argparse
import time
from typing import Any

import asyncpg

from benchmarks.systems.harness import BUSINESS, ORDERS, delivered
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE
from holdfast import EventEnvelope, HandlerRegistry, Publisher, Worker

KEYS = 500  # of events that are in order


async def latency(options: argparse.Namespace) -> dict[str, Any]:
    """And how many notifications the producers sent for it.

    With the kind `keyed` the events have ordering keys, and `hot` is the same beside `--count` events of one more key.
    """
    observer = await prepare(options.dsn, due=options.count if options.kind == "hot" else 0)
    await observer.execute("UPDATE core.outbox SET ordering_key = 'hot'")
    await observer.execute(ORDERS)
    connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
    registry, publisher = HandlerRegistry(), Publisher("shop")
    handled: dict[int, float] = {}
    hot: list[float] = []
    rung = 0

    @registry.handler(EVENT_TYPE, name="bench.handle")
    async def handle(event: EventEnvelope) -> None:
        if "n" in event.payload:
            handled[event.payload["n"]] = time.perf_counter()
        else:
            hot.append(time.perf_counter())

    async def commit(connection: asyncpg.Connection, number: int) -> float:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(BUSINESS)
        key = f"k{number % KEYS}" if options.kind else None
        await publisher.publish(connection, EVENT_TYPE, {"n": number}, ordering_key=key)
        # The commit is visible somewhere between this reading and its answer; the earlier one is the honest one.
        at = time.perf_counter()
        await transaction.commit()
        return at

    def ring(*_: object) -> None:
        nonlocal rung
        rung += 1

    await observer.add_listener("outbox_default", ring)
    worker = Worker(options.dsn, registry)
    result = await delivered(options, observer, connections, commit, lambda: worker, handled)
    return result | {
        "notifications": round(rung / result["events"], 4),
        **({"hot_per_second": pace(hot)} if options.kind == "hot" else {}),
    }


def pace(times: list[float]) -> float:
    """How many there were in a second, from the first to the last; none is an error of the benchmark."""
    return round(len(times) / (times[-1] - times[0]), 1)
