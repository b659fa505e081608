"""How fast a broker carries events, beside the shortest loops with the same promises.

    python -m benchmarks.brokers nats://127.0.0.1:4222 --events 20000

relay    claims rows, sends them, and settles them when they are confirmed; raw: three statements and the same client
handler  takes messages, runs a handler that does nothing, writes the inbox, acknowledges; raw: one insert, the client
outbox   the same handler from Postgres alone, for comparison
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import asyncpg

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, Worker, WorkerSettings
from holdfast.brokers.cloudevents import CarriedEvent, structured
from holdfast.brokers.engine import Confirmed, Engine, Interest, Outgoing
from holdfast.brokers.engines import engine_of
from holdfast.embedded import EmbeddedPostgres
from holdfast.postgres.schema.migrate import apply

PAYLOAD = {"order_id": 17, "customer": "ann@example.com", "lines": [{"sku": "A-1", "quantity": 2}] * 3}
PUBLISHER = Publisher("shop")
# Each measurement has one of its own, and so a stream of its own.
CHANNEL = "none"
EVENT = "order.placed"


async def publish(connection: asyncpg.Connection, events: int) -> None:
    for start in range(0, events, 1_000):
        count = min(1_000, events - start)
        async with connection.transaction():
            await PUBLISHER.publish_many(connection, [NewEvent(EVENT, PAYLOAD, channel=CHANNEL) for _ in range(count)])


async def until(condition: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(300):
        while not await condition():
            await asyncio.sleep(0.01)


async def measured(connection: asyncpg.Connection, worker: Worker, query: str, events: int, *values: object) -> float:
    """Return how many events a second a worker has done, from its start to the last."""
    started = time.monotonic()
    async with worker:
        await until(lambda: connection.fetchval(query, *values))
    return events / (time.monotonic() - started)


async def relay(dsn: str, connection: asyncpg.Connection, address: str, events: int) -> float:
    await publish(connection, events)
    settings = WorkerSettings(substrate=address, relayed=(EVENT,), channels=(CHANNEL,))
    open_rows = "SELECT count(*) = 0 FROM core.outbox WHERE settled_at IS NULL"
    return await measured(connection, Worker(dsn, HandlerRegistry(), settings, observers=()), open_rows, events)


async def raw_relay(connection: asyncpg.Connection, engine: Engine, events: int) -> float:
    await publish(connection, events)
    sink = engine.sink(lease=30)
    await sink.open()
    started = time.monotonic()
    while rows := await connection.fetch(
        """UPDATE core.outbox o SET status = 'in_flight', attempts = 1, lease_expires_at = now() + interval '30 s',
               claimed_by = '00000000-0000-0000-0000-000000000001', lease_token = gen_random_uuid()
           WHERE o.id = ANY (ARRAY(SELECT id FROM core.outbox WHERE settled_at IS NULL AND ordering_key IS NULL
                                   AND status = 'pending' ORDER BY available_at LIMIT 500 FOR UPDATE SKIP LOCKED))
           RETURNING id, event_type, source, payload::text, occurred_at, idempotency_key"""
    ):
        batch = []
        for row in rows:
            event = EventEnvelope.trusted(
                {
                    **{"event_id": row["id"], "event_type": row["event_type"], "event_version": 1, "payload": {}},
                    **{"occurred_at": row["occurred_at"], "source": row["source"], "target": None, "domain_id": None},
                    **{"idempotency_key": row["idempotency_key"], "trace_context": None},
                }
            )
            body = structured(CarriedEvent(event), row["payload"])
            batch.append(Outgoing(row["id"], str(row["id"]), CHANNEL, row["event_type"], None, None, body))
        answers = await sink.send(batch, timeout=10)
        assert all(isinstance(each, Confirmed) for each in answers)
        await connection.execute(
            """UPDATE core.outbox SET status = 'delivered', delivered_at = now(), settled_at = now(),
                   handler_name = 'bench.raw', lease_token = NULL, lease_expires_at = NULL
               WHERE id = ANY ($1)""",
            [row["id"] for row in rows],
        )
    took = time.monotonic() - started
    await sink.close()
    return events / took


def registry_of(transactional: bool) -> HandlerRegistry:
    registry = HandlerRegistry()
    if transactional:

        @registry.handler(EVENT, name="bench.transactional")
        async def book(event: EventEnvelope, tx: asyncpg.Connection) -> None: ...
    else:

        @registry.handler(EVENT, name="bench.plain")
        async def look(event: EventEnvelope) -> None: ...

    return registry


async def handler(
    dsn: str, connection: asyncpg.Connection, address: str | None, events: int, transactional: bool
) -> float:
    registry = registry_of(transactional)
    settings = WorkerSettings(substrate=address, channels=(CHANNEL,))
    if address is not None:
        async with Worker(dsn, registry, settings, observers=()):
            moved = "SELECT bool_and(via <> 'outbox') FROM core.subscriptions WHERE retired_at IS NULL"
            await until(lambda: connection.fetchval(moved))
        await publish(connection, events)
        async with Worker(dsn, HandlerRegistry(), settings, observers=()):
            await until(lambda: connection.fetchval("SELECT count(*) = 0 FROM core.outbox WHERE settled_at IS NULL"))
    else:
        await publish(connection, events)
    handled = "SELECT count(*) >= $1 FROM core.event_handled"
    return await measured(connection, Worker(dsn, registry, settings, observers=()), handled, events, events)


async def raw_consumer(connection: asyncpg.Connection, engine: Engine, events: int) -> float:
    since = datetime.now(UTC)
    source = engine.source(Interest("bench.raw", CHANNEL, "bench", (EVENT,), since), lease=30)
    await source.open()
    await raw_relay(connection, engine, events)
    started, left = time.monotonic(), events
    while left > 0:
        received = await source.take(500, wait=1)
        keys = [each.body[8:80].decode("latin-1") + str(id(each)) for each in received]
        await connection.execute(
            """INSERT INTO core.event_handled (handler_name, idempotency_key, source)
               SELECT 'bench.raw', k, 'shop' FROM unnest($1::text[]) AS t (k) ON CONFLICT DO NOTHING""",
            keys,
        )
        await source.acknowledge(received)
        left -= len(received)
    took = time.monotonic() - started
    await source.close()
    return events / took


async def main() -> None:
    parser = argparse.ArgumentParser(description="How fast a broker carries events.")
    parser.add_argument("address")
    parser.add_argument("--events", type=int, default=20_000)
    given = parser.parse_args()
    engine = engine_of(given.address)
    with EmbeddedPostgres() as server:
        print(f"{'what':34}{'events/s':>10}")

        async def each(name: str, work: Callable[[str, asyncpg.Connection], Awaitable[float]]) -> None:
            global CHANNEL
            CHANNEL = f"b{time.monotonic_ns()}"
            own = server.create_database(CHANNEL)
            await apply(own)
            connection = await asyncpg.connect(own)
            try:
                print(f"{name:34}{await work(own, connection):>10,.0f}", flush=True)
            finally:
                await connection.close()

        n = given.events
        await each("relay", lambda dsn, c: relay(dsn, c, given.address, n))
        await each("relay, raw", lambda _, c: raw_relay(c, engine, n))
        await each("handler", lambda dsn, c: handler(dsn, c, given.address, n, False))
        await each("handler with tx", lambda dsn, c: handler(dsn, c, given.address, n, True))
        await each("consumer, raw", lambda _, c: raw_consumer(c, engine, n))
        await each("handler, from the outbox", lambda dsn, c: handler(dsn, c, None, n, False))
        await each("handler with tx, from the outbox", lambda dsn, c: handler(dsn, c, None, n, True))


if __name__ == "__main__":
    asyncio.run(main())
