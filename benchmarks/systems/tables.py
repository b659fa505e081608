"""Holdfast's own tables, filled for a run. The raw control works on the same ones, so both do the same writes."""

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import asyncpg

from benchmarks.workload import EVENT_TYPE, payload_of
from holdfast.postgres import migrate

FILL = """
INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, trace_context)
SELECT i, $1, 'shop', $2::jsonb, i::text,
       CASE WHEN $4::float8 IS NOT NULL THEN
           format('00-%s-%s-0%s', md5(i::text), left(md5('span' || i), 16), (random() < $4)::int)
       END
FROM (SELECT core.uuid7() AS i FROM generate_series(1, $3)) ids
"""
# Found by the index of the lanes: without its second condition everything that is kept would be read.
FILLED = "SELECT EXISTS (SELECT FROM core.outbox WHERE settled_at IS NULL AND ordering_key IS NULL)"
# One statement for both tables: the second one need not be read back from the first.
KEEP = """
WITH kept AS (
    INSERT INTO core.outbox (id, event_type, source, channel, generation, payload, idempotency_key, handler_name,
                             status, attempts, settled_at, delivered_at)
    SELECT i, $1, 'shop', 'outbox_default', 0, $2::jsonb, i::text, 'bench.handle', 'delivered', 1, now(), now()
    FROM (SELECT core.uuid7() AS i FROM generate_series(1, $3)) ids
    RETURNING handler_name, idempotency_key)
INSERT INTO core.event_handled (handler_name, idempotency_key, source)
SELECT handler_name, idempotency_key, 'shop' FROM kept
"""
# The bell has no part in the preparations.
PREPARING = "SET session_replication_role = replica; SET synchronous_commit = off; SET work_mem = '64MB'"
PREPARED = "RESET session_replication_role; RESET synchronous_commit; RESET work_mem"
# Nobody updates what is kept, so its pages may be full; and a vacuum in the middle would read everything again. Keys
# grow with time, so that indexes made afterwards save nothing.
DENSE = """
ALTER TABLE core.outbox SET (fillfactor = 100, autovacuum_enabled = off);
ALTER TABLE core.event_handled SET (autovacuum_enabled = off)
"""
AS_INSTALLED = """
ALTER TABLE core.outbox SET (fillfactor = 50);
ALTER TABLE core.outbox RESET (autovacuum_enabled);
ALTER TABLE core.event_handled RESET (autovacuum_enabled)
"""
FILLERS = 2
KEEP_CHUNK = 50_000
FILL_CHUNK = 5_000
# What a kept event takes on disk, measured: the row, two indexes, the inbox row and its index.
BYTES_PER_KEPT = 800


async def prepare(
    dsn: str, *, due: int, size: int = 200, kept: int = 0, sampled: float | None = None
) -> asyncpg.Connection:
    """A database with `kept` delivered and `due` pending events; returns a connection for observing.

    With `sampled` the events carry trace contexts, of which such a share is sampled.

    The runner hands out copies of a database that has the schema and the delivered events already.
    """
    connection = await asyncpg.connect(dsn)
    if await connection.fetchval("SELECT to_regclass('core.outbox') IS NULL"):
        await install(dsn, kept)
    body = json.dumps(payload_of(size))
    await connection.execute(PREPARING)
    for start in range(0, due, FILL_CHUNK):
        count = min(FILL_CHUNK, due - start)
        await connection.execute(with_ids(connection, FILL), EVENT_TYPE, body, count, sampled)
    await connection.execute(PREPARED)
    await connection.execute("VACUUM ANALYZE core.outbox, core.event_handled")
    await connection.execute("CHECKPOINT")
    return connection


async def prepare_once(dsn: str, *, due: int) -> asyncpg.Connection:
    """The same for arms that only read, and that share a database: the first one fills it in."""
    connection = await asyncpg.connect(dsn)
    if await connection.fetchval(FILLED):
        return connection
    await connection.close()
    return await prepare(dsn, due=due)


async def install(dsn: str, kept: int = 0, progress: Callable[[str], None] = lambda text: None) -> None:
    """The schema, and delivered events that stay."""
    await migrate.apply(dsn, roles="never")
    connection = await asyncpg.connect(dsn)
    await connection.execute(DENSE)
    await keep(dsn, kept, progress)
    await connection.execute(AS_INSTALLED)
    progress("vacuum")
    await connection.execute("VACUUM ANALYZE core.outbox, core.event_handled")
    await connection.close()


async def keep(dsn: str, kept: int, progress: Callable[[str], None]) -> None:
    """Insert delivered events, on several connections."""
    body = json.dumps(payload_of(200))
    chunks = iter([min(KEEP_CHUNK, kept - start) for start in range(0, kept, KEEP_CHUNK)])
    done = 0

    async def filler() -> None:
        nonlocal done
        connection = await asyncpg.connect(dsn)
        await connection.execute(PREPARING)
        statement = with_ids(connection, KEEP)
        for count in chunks:
            await connection.execute(statement, EVENT_TYPE, body, count)
            done += count
            progress(f"filling in {done:,} of {kept:,} kept events")
        await connection.close()

    await asyncio.gather(*(filler() for _ in range(FILLERS)))


def with_ids(connection: asyncpg.Connection, statement: str) -> str:
    """Postgres 18 makes ids of this kind itself, which takes a third off the time of a row."""
    has_its_own = connection.get_server_version().major >= 18
    return statement.replace("core.uuid7()", "uuidv7()") if has_its_own else statement


async def held_snapshot(dsn: str) -> Any:
    """Another session that keeps its snapshot for as long as it is open."""
    holder = await asyncpg.connect(dsn)
    await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM core.outbox LIMIT 1")
    return holder


SLICES = 8


def pace(marks: list[tuple[float, int]]) -> dict[str, Any]:
    """The rate in each part of a drain, and that of the last quarter over that of the first."""

    def rate(start: int, end: int) -> float:
        (began, before), (ended, after) = marks[start], marks[end]
        return round((after - before) / (ended - began), 1)

    last = len(marks) - 1
    if last < 1:
        return {}
    edges = [last * edge // SLICES for edge in range(SLICES + 1)]
    rates = [rate(start, end) for start, end in pairwise(edges) if end > start]
    quarter = max(1, last // 4)
    return {"pace": rates, "last_to_first": round(rate(last - quarter, last) / rate(0, quarter), 3)}
