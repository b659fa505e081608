"""Holdfast's own tables, filled for a run. The raw control works on the same ones, so both do the same writes."""

import json
from typing import Any

import asyncpg

from benchmarks.workload import EVENT_TYPE, payload_of
from holdfast.postgres import migrate

FILL = """
INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key)
SELECT i, $1, 'shop', $2::jsonb, i::text FROM (SELECT core.uuid7() AS i FROM generate_series(1, $3)) ids
"""
KEEP = """
INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, handler_name,
                         status, attempts, settled_at, delivered_at)
SELECT i, $1, 'shop', $2::jsonb, i::text, 'bench.handle', 'delivered', 1, now(), now()
FROM (SELECT core.uuid7() AS i FROM generate_series(1, $3)) ids
"""
KEEP_INBOX = """
INSERT INTO core.event_handled (handler_name, idempotency_key)
SELECT handler_name, idempotency_key FROM core.outbox WHERE settled_at IS NOT NULL
"""


async def prepare(dsn: str, *, due: int, size: int = 200, kept: int = 0) -> asyncpg.Connection:
    """A migrated database with `kept` delivered and `due` pending events; returns a connection for observing."""
    await migrate.apply(dsn, roles="never")
    connection = await asyncpg.connect(dsn)
    body = json.dumps(payload_of(size))
    await connection.execute("SET session_replication_role = replica")  # the bell has no part in the preparations
    for start in range(0, kept, 50_000):
        await connection.execute(KEEP, EVENT_TYPE, body, min(50_000, kept - start))
    if kept:
        await connection.execute(KEEP_INBOX)
    for start in range(0, due, 5_000):
        await connection.execute(FILL, EVENT_TYPE, body, min(5_000, due - start))
    await connection.execute("SET session_replication_role = origin")
    await connection.execute("VACUUM ANALYZE core.outbox, core.event_handled")
    await connection.execute("CHECKPOINT")
    return connection


async def held_snapshot(dsn: str) -> Any:
    """Another session that keeps its snapshot for as long as it is open."""
    holder = await asyncpg.connect(dsn)
    await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM core.outbox LIMIT 1")
    return holder


def quarters(marks: list[tuple[float, int]]) -> float:
    """Rate of the last quarter over rate of the first."""
    step = max(2, len(marks) // 4)

    def rate(part: list[tuple[float, int]]) -> float:
        return (part[-1][1] - part[0][1]) / (part[-1][0] - part[0][0])

    return rate(marks[-step:]) / rate(marks[:step])
