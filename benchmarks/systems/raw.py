"""The control: the shortest asyncpg program with the same guarantees on the same tables.

Claim by one UPDATE ... RETURNING with a lease, settle by one fenced UPDATE, a row in event_handled, rows kept.
"""

import argparse
import asyncio
import json
import time
import uuid
from typing import Any

import asyncpg

from benchmarks.counters import difference, snapshot
from benchmarks.systems.process import database_of, main
from benchmarks.systems.tables import held_snapshot, prepare, quarters
from benchmarks.workload import EVENT_TYPE, PAYLOAD
from holdfast.envelope import uuid7
from holdfast.worker import process

BATCH = 500
CLAIM = """
WITH due AS MATERIALIZED (
    SELECT id FROM core.outbox
    WHERE settled_at IS NULL AND ordering_key IS NULL AND channel = 'outbox_default' AND generation = 0
      AND route = '*/order.placed' AND priority = 1 AND available_at <= now()
      AND (status = 'pending' OR lease_expires_at < now()) AND (available_at, id) >= ($4, $5)
    ORDER BY available_at, id LIMIT $1 FOR UPDATE SKIP LOCKED)
UPDATE core.outbox o
SET status = 'in_flight', attempts = attempts + 1, claimed_by = $2, lease_token = $3,
    lease_expires_at = now() + interval '30 s'
WHERE o.id = ANY (ARRAY(SELECT id FROM due))
RETURNING o.id, event_type, event_version, occurred_at, source, target, domain_id, payload, idempotency_key,
          trace_context, attempts, available_at
"""
SETTLE = """
WITH done AS (
    UPDATE core.outbox
    SET status = 'delivered', delivered_at = now(), settled_at = now(), handler_name = 'bench.handle',
        lease_token = NULL, lease_expires_at = NULL
    WHERE id = ANY ($1::uuid[]) AND lease_token = $2 RETURNING idempotency_key)
INSERT INTO core.event_handled (handler_name, idempotency_key) SELECT 'bench.handle', idempotency_key FROM done
"""
INSERT = """
INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, channel, generation, occurred_at)
VALUES ($1, 'order.placed', 'shop', $2, $3, 'outbox_default', 0, now())
"""
INSERT_MANY = """
INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, channel, generation, occurred_at)
SELECT id, 'order.placed', 'shop', payload, key, 'outbox_default', 0, now()
FROM unnest($1::uuid[], $2::jsonb[], $3::text[]) AS e (id, payload, key)
"""
BUSINESS = "INSERT INTO orders (note) VALUES ('x')"


async def drain(options: argparse.Namespace) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=options.count, size=options.size, kept=options.kept)
    holder = await held_snapshot(options.dsn) if options.hold else None
    start = (await observer.fetchval("SELECT 'epoch'::timestamptz"), uuid.UUID(int=0))
    marks: list[tuple[float, int]] = []
    done = 0

    async def loop(connection: asyncpg.Connection) -> None:
        nonlocal done
        claim, settle = await connection.prepare(CLAIM), await connection.prepare(SETTLE)
        worker, mark = uuid.uuid4(), start
        while True:
            token = uuid.uuid4()
            rows = await claim.fetch(BATCH, worker, token, *mark)
            if not rows:
                return
            mark = min((row["available_at"], row["id"]) for row in rows)
            for row in rows:
                json.loads(row["payload"])
            await settle.fetch([row["id"] for row in rows], token)
            done += len(rows)
            marks.append((time.perf_counter(), done))

    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    connections = [await asyncpg.connect(options.dsn) for _ in range(2)]
    await asyncio.gather(*map(loop, connections))
    result = difference(before, await snapshot(observer, database), options.count)
    result["last_to_first"] = round(quarters(marks), 3)
    for connection in [*connections, observer, *([holder] if holder else [])]:
        await connection.close()
    return result


ENTER = """
SELECT 1 FROM core.outbox WHERE id = $1 AND lease_token = $2 AND status = 'in_flight' FOR NO KEY UPDATE
"""
INBOX = (
    "INSERT INTO core.event_handled (handler_name, idempotency_key) VALUES ('bench.handle', $1) ON CONFLICT DO NOTHING"
)
LEAVE = """
UPDATE core.outbox
SET status = 'delivered', delivered_at = now(), settled_at = now(), handler_name = 'bench.handle',
    lease_token = NULL, lease_expires_at = NULL
WHERE id = $1 AND lease_token = $2 AND status = 'in_flight'
"""


async def transactional(options: argparse.Namespace) -> dict[str, Any]:
    """A transaction per event: lock, inbox row, the handler's row, settle; ten connections at a time."""
    observer = await prepare(options.dsn, due=options.count)
    await observer.execute("CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text)")
    claiming = await asyncpg.connect(options.dsn)
    connections = [await asyncpg.connect(options.dsn) for _ in range(10)]
    rows: asyncio.Queue[Any] = asyncio.Queue(2 * BATCH)

    async def claim() -> None:
        statement, worker = await claiming.prepare(CLAIM), uuid.uuid4()
        start = (await observer.fetchval("SELECT 'epoch'::timestamptz"), uuid.UUID(int=0))
        while True:
            token = uuid.uuid4()
            found = await statement.fetch(BATCH, worker, token, *start)
            for row in found:
                await rows.put((row, token))
            if not found:
                for _ in connections:
                    await rows.put(None)
                return

    async def run(connection: asyncpg.Connection) -> None:
        while (item := await rows.get()) is not None:
            row, token = item
            json.loads(row["payload"])
            async with connection.transaction():
                assert await connection.fetchval(ENTER, row["id"], token)
                await connection.execute(INBOX, row["idempotency_key"])
                await connection.execute(BUSINESS)
                await connection.execute(LEAVE, row["id"], token)

    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    await asyncio.gather(claim(), *map(run, connections))
    result = difference(before, await snapshot(observer, database), options.count)
    assert await observer.fetchval("SELECT count(*) FROM orders") == options.count
    for connection in [*connections, claiming, observer]:
        await connection.close()
    return result


FAIL = """
UPDATE core.outbox
SET status = 'failed', failed_at = now(), settled_at = now(), first_failed_at = now(),
    failure_reason = 'retry_terminal',
    last_error = $3, error_signature = 'x', handler_name = 'bench.handle', lease_token = NULL, lease_expires_at = NULL
WHERE id = ANY ($1::uuid[]) AND lease_token = $2
"""


async def failures(options: argparse.Namespace) -> dict[str, Any]:
    """Every event fails for good, with an error text of the usual length."""
    observer = await prepare(options.dsn, due=options.count)
    start = (await observer.fetchval("SELECT 'epoch'::timestamptz"), uuid.UUID(int=0))
    connections = [await asyncpg.connect(options.dsn) for _ in range(2)]

    async def loop(connection: asyncpg.Connection) -> None:
        claim, fail = await connection.prepare(CLAIM), await connection.prepare(FAIL)
        worker = uuid.uuid4()
        while True:
            token = uuid.uuid4()
            rows = await claim.fetch(BATCH, worker, token, *start)
            if not rows:
                return
            for row in rows:
                json.loads(row["payload"])
            await fail.fetch([row["id"] for row in rows], token, "RuntimeError: no such customer")

    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    await asyncio.gather(*map(loop, connections))
    result = difference(before, await snapshot(observer, database), options.count)
    for connection in [*connections, observer]:
        await connection.close()
    return result


async def fanout(options: argparse.Namespace) -> dict[str, Any]:
    """Three rows per event: the published one is settled as split, each sibling is inserted, claimed and settled."""
    observer = await prepare(options.dsn, due=options.count)
    connection = await asyncpg.connect(options.dsn)
    names = [f"bench.handle_{n}" for n in range(options.handlers)]
    split = await connection.prepare(SPLIT)
    claim = await connection.prepare(CLAIM.replace("route = '*/order.placed'", "route = ANY ($6)"))
    settle = await connection.prepare(SETTLE_SIBLINGS)
    worker, mark = uuid.uuid4(), (await observer.fetchval("SELECT 'epoch'::timestamptz"), uuid.UUID(int=0))
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    delivered = 0
    while True:
        await split.fetch(BATCH, names)
        token = uuid.uuid4()
        rows = await claim.fetch(BATCH * len(names), worker, token, *mark, names)
        if not rows:
            break
        for row in rows:
            json.loads(row["payload"])
        await settle.fetch([row["id"] for row in rows], token)
        delivered += len(rows)
    result = difference(before, await snapshot(observer, database), options.count * len(names))
    assert delivered == options.count * len(names)
    for each in (connection, observer):
        await each.close()
    return result


SPLIT = """
WITH origin AS MATERIALIZED (
    SELECT * FROM core.outbox
    WHERE settled_at IS NULL AND ordering_key IS NULL AND channel = 'outbox_default' AND generation = 0
      AND route = '*/order.placed' AND priority = 1 AND available_at <= now() AND status = 'pending'
    ORDER BY available_at, id LIMIT $1 FOR UPDATE SKIP LOCKED),
sibling AS (
    INSERT INTO core.outbox (id, origin_id, handler_name, event_type, event_version, occurred_at, source, target,
                             content_class, channel, generation, payload, idempotency_key)
    SELECT core.sibling_id(o.id, h), o.id, h, event_type, event_version, occurred_at, source, target,
           content_class, channel, generation, payload, idempotency_key
    FROM origin o CROSS JOIN unnest($2::text[]) AS h ON CONFLICT (id) DO NOTHING)
UPDATE core.outbox SET status = 'delivered', handler_name = '*', delivered_at = now(), settled_at = now()
WHERE id = ANY (ARRAY(SELECT id FROM origin))
"""
SETTLE_SIBLINGS = """
WITH done AS (
    UPDATE core.outbox
    SET status = 'delivered', delivered_at = now(), settled_at = now(), lease_token = NULL, lease_expires_at = NULL
    WHERE id = ANY ($1::uuid[]) AND lease_token = $2 RETURNING handler_name, idempotency_key)
INSERT INTO core.event_handled (handler_name, idempotency_key) SELECT handler_name, idempotency_key FROM done
"""


async def publish(options: argparse.Namespace) -> dict[str, Any]:
    """The same transaction with a plain INSERT, without the trigger."""
    observer = await prepare(options.dsn, due=0)
    await observer.execute("CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text)")
    await observer.execute("ALTER TABLE core.outbox DISABLE TRIGGER outbox_bell")
    body = json.dumps(PAYLOAD)
    stop = time.perf_counter() + options.seconds
    commits = 0

    async def producer(connection: asyncpg.Connection) -> None:
        nonlocal commits
        while time.perf_counter() < stop:
            async with connection.transaction():
                await connection.execute(BUSINESS)
                identity = uuid7()
                await connection.execute(INSERT, identity, body, str(identity))
            commits += 1

    return await timed_producers(options, observer, producer, lambda: commits)


async def timed_producers(options: argparse.Namespace, observer: Any, producer: Any, count: Any) -> dict[str, Any]:
    connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    await asyncio.gather(*map(producer, connections))
    result = difference(before, await snapshot(observer, database), count())
    for connection in [*connections, observer]:
        await connection.close()
    return result


async def publish_many(options: argparse.Namespace) -> dict[str, Any]:
    """The same rows by one INSERT ... SELECT FROM unnest (`--kind copy`: by COPY), trigger on."""
    observer = await prepare(options.dsn, due=0)
    database = database_of(options.dsn)
    before = await snapshot(observer, database)
    for start in range(0, options.count, 5_000):
        ids = [uuid7() for _ in range(min(5_000, options.count - start))]
        bodies = [json.dumps(PAYLOAD) for _ in ids]
        async with observer.transaction():
            if options.kind == "copy":
                records = [
                    (identity, EVENT_TYPE, "shop", body, str(identity), "outbox_default", 0)
                    for identity, body in zip(ids, bodies, strict=True)
                ]
                columns = ["id", "event_type", "source", "payload", "idempotency_key", "channel", "generation"]
                await observer.copy_records_to_table("outbox", schema_name="core", records=records, columns=columns)
            else:
                await observer.execute(INSERT_MANY, ids, bodies, [str(each) for each in ids])
    result = difference(before, await snapshot(observer, database), options.count)
    await observer.close()
    return result


if __name__ == "__main__":
    verbs = {
        "drain": drain,
        "publish": publish,
        "publish_many": publish_many,
        "transactional": transactional,
        "failures": failures,
        "fanout": fanout,
    }
    main(verbs, process.run)
