"""The roll-up beside sessions that hold what they can, and callers that pass what they like (OBS-2, SEC-1, T11)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import asyncpg
import pytest

from holdfast.operator import Operator
from holdfast.postgres.doctor import examine
from holdfast.postgres.operations.metrics import snapshot
from holdfast.postgres.queries import Queries
from holdfast.worker.rollup import RollupWriter
from tests.operator.support import ACTOR
from tests.worker.support import publish

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

APPEND = """INSERT INTO core.rollup_journal (counted_at, handler_name, generation, outcome, n)
            SELECT now() - $2::interval, 'shop.one', 0, 'delivered', 1 FROM generate_series(1, $1::int)"""
WRITE = "SELECT core.rollup_write($1, $2, $3, $4, $5, $6, $7)"
DELIVERED = "SELECT coalesce(sum(delivered), 0)::int FROM core.rollup"


@pytest.fixture
async def worker(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A session of a worker's login."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("SET ROLE holdfast_worker")
    yield connection
    connection.terminate()


def report(generation: int = 0, *handlers: str) -> list[Any]:
    n = len(handlers)
    return [generation, list(handlers), [1] * n, [1, 2] * n, [0.5] * n, [3, 4] * n, [0.5] * n]


async def append(conn: asyncpg.Connection, n: int, seconds: int = 0) -> None:
    await conn.execute(APPEND.replace("$2::interval", f"interval '{seconds} seconds'"), n)


async def test_no_login_can_keep_the_journal_from_being_folded(dsn: str, conn: asyncpg.Connection) -> None:
    """With an advisory lock, which every login of the database can hold (SEC-1)."""
    neighbour = await asyncpg.connect(dsn)
    await neighbour.execute("SELECT pg_advisory_lock(hashtextextended('core.rollup_fold', 0))")
    await append(conn, 10)
    assert await conn.fetchval("SELECT core.rollup_fold(1000)") == 10
    await neighbour.close()


@pytest.mark.new_database
async def test_a_fold_that_does_not_end_stops_no_other(conn: asyncpg.Connection, worker: asyncpg.Connection) -> None:
    """The others leave out its lines, wait for none of its locks, and all is counted once (OBS-2)."""
    async with asyncio.timeout(10):
        await append(conn, 50)
        held = worker.transaction()
        await held.start()
        assert await worker.fetchval("SELECT core.rollup_fold(20)") == 20
        assert await conn.fetchval("SELECT core.rollup_fold(1000)") == 0  # it is the other's turn
        await conn.execute(
            "UPDATE core.rollup_journal SET counted_at = now() - interval '1 minute' WHERE ctid > '(0,30)'"
        )
        assert await conn.fetchval("SELECT core.rollup_fold(1000)") == 30
        # Also for hours.
        await conn.execute("UPDATE core.rollup SET period_start = period_start - interval '2 days'")
        await conn.fetch("SELECT * FROM core.sweep_rollup(1000)")
        assert await conn.fetchval(DELIVERED + " WHERE hourly") == 30
        await held.commit()
    assert await conn.fetchval(DELIVERED) == 50 and await conn.fetchval("SELECT count(*) FROM core.rollup_journal") == 0


async def test_a_report_that_is_not_committed_blocks_nobody(
    conn: asyncpg.Connection, worker: asyncpg.Connection
) -> None:
    """The same handler and minute in another session, reported and folded (OBS-2)."""
    held = worker.transaction()
    await held.start()
    await worker.execute(WRITE, *report(0, "shop.one"))
    async with asyncio.timeout(5):
        await conn.execute(WRITE, *report(0, "shop.one"))
        await append(conn, 1)
        assert await conn.fetchval("SELECT core.rollup_fold(1000)") == 1
    await held.commit()
    await conn.fetchval("SELECT core.rollup_fold(1000)")
    rows = await conn.fetch(
        "SELECT sum(lost_lease)::int, sum(delivered)::int, max(handler_buckets[2]) FROM core.rollup"
    )
    assert [tuple(row) for row in rows] == [(2, 1, 4)]


async def test_a_report_names_what_is_known(conn: asyncpg.Connection, worker: asyncpg.Connection) -> None:
    """Each handler once, and a generation that is a deployment's or a worker's (SEC-1)."""
    refused = asyncpg.InvalidParameterValueError
    for some in (report(0, "shop.one", "shop.one"), report(7, "shop.one"), report(-1, "shop.one")):
        with pytest.raises(refused):
            await worker.execute(WRITE, *some)
    beat = "SELECT core.worker_beat($1, 'w', 'h', 1, '1', 7, '{}', '{}')"
    await worker.execute(beat, uuid4())
    await worker.execute(WRITE, *report(7, "shop.one"))
    assert await conn.fetchval("SELECT count(*) FROM core.rollup_reports") == 1


@pytest.mark.new_database
async def test_a_name_that_no_index_takes_stops_no_fold(conn: asyncpg.Connection, worker: asyncpg.Connection) -> None:
    """A claim refuses it, and a line that has one all the same is counted under its beginning (OBS-2)."""
    await publish(conn, "order.placed", {})
    version = await conn.fetchval("SELECT version FROM core.subscriptions_version")
    claim = """SELECT id FROM core.outbox_claim(gen_random_uuid(), gen_random_uuid(), '30 s', $1, 'holdfast', 0,
                   '{*/order.placed}', '{1}', $2, '{10}', '{0001-01-02}', '{00000000-0000-0000-0000-000000000000}')"""
    long = secrets.token_hex(6000)
    with pytest.raises(asyncpg.InvalidParameterValueError, match="p_handlers"):
        await worker.fetch(claim, version, [long])
    await append(conn, 2)
    await conn.execute("UPDATE core.rollup_journal SET handler_name = $1 WHERE ctid = '(0,1)'", long)
    assert await conn.fetchval("SELECT core.rollup_fold(1000)") == 2
    assert await conn.fetchval(DELIVERED) == 2


async def test_periods_begin_alike_in_every_time_zone(conn: asyncpg.Connection) -> None:
    """Minutes and hours, of sessions half an hour apart (OBX-5)."""
    insert = """INSERT INTO core.rollup (period_start, handler_name, generation, delivered)
                SELECT date_trunc('hour', now() - interval '3 days', 'UTC') + n * interval '1 minute', 'shop.one', 0, 1
                FROM generate_series(0, 59) n"""
    await conn.execute(insert)
    for zone in ("Asia/Kolkata", "UTC"):
        await conn.execute(f"SET TimeZone = '{zone}'")
        await append(conn, 1)
        await conn.fetchval("SELECT core.rollup_fold(1000)")
        await conn.fetch("SELECT * FROM core.sweep_rollup(20)")
    await conn.fetch("SELECT * FROM core.sweep_rollup(100)")
    hours = await conn.fetch("SELECT extract(minute FROM period_start)::int, delivered FROM core.rollup WHERE hourly")
    assert [tuple(row) for row in hours] == [(0, 60)]


async def test_a_large_journal_is_reported_and_read_in_part(dsn: str, conn: asyncpg.Connection) -> None:
    """Status and metrics read a bounded part, and the balance all of it (OBS-2, OBS-3)."""
    await append(conn, 120_000, 400)
    assert await conn.fetchval("SELECT count(*) FROM core.rollup_counts") == 50_000
    lag = (await snapshot(conn)).rollup_lag
    assert lag.lines == 100_000 and 400 <= lag.seconds < 460 and lag.is_behind
    found = {each.code for each in (await examine(conn)).findings}
    assert "rollup-behind" in found
    async with Operator(dsn, actor=ACTOR) as operator:
        assert (await operator.balance()).delivered == 120_000


async def test_a_worker_reports_that_folding_is_behind(conn: asyncpg.Connection, worker: asyncpg.Connection) -> None:
    """Once an hour, while a session keeps lines from being folded (OBS-3)."""
    facts: list[Any] = []
    tally = cast(Any, SimpleNamespace(snapshot=dict))
    writer = RollupWriter(Queries("core"), 0, tally, facts.append)
    await writer.run_once(conn)
    assert facts == []
    await append(conn, 10, 400)
    held = worker.transaction()
    await held.start()
    await worker.fetchval("SELECT core.rollup_fold(10)")
    for _ in range(2):
        await writer.run_once(conn)
    (notice,) = facts
    assert notice.name == "rollup_behind" and notice.details["lines"] == 10 and notice.details["oldest_s"] >= 400
    await held.rollback()
    await writer.run_once(conn)
    assert await conn.fetchval(DELIVERED) == 10
