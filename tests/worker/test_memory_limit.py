"""A worker whose memory is limited handles payloads that are larger than the limit together (OPS-6, T32)."""

from __future__ import annotations

import resource
from pathlib import Path

import asyncpg
import pytest

from tests.worker.support import drained, effects, make_tables, process

pytestmark = pytest.mark.trust

COUNT = 600
HEADROOM = 192 * 1024 * 1024


def _address_space(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_payloads_beyond_the_limit(dsn: str, conn: asyncpg.Connection) -> None:
    """600 payloads of 500 kB, 300 MB as text, with 192 MB to spare; no attempt is lost to the limit (T32)."""
    await make_tables(conn)
    async with process(dsn, "ledger", concurrency=10) as worker:
        limit = _address_space(worker.pid) + HEADROOM
        resource.prlimit(worker.pid, resource.RLIMIT_AS, (limit, limit))
        await conn.execute(
            """INSERT INTO core.outbox (event_type, source, payload)
               SELECT 'order.placed', 'shop', jsonb_build_object('n', n, 'text', repeat('x', 500000))
               FROM generate_series(1, $1::int) AS n""",
            COUNT,
        )
        await drained(conn, within=90)
        assert worker.process.returncode is None
    assert await effects(conn) == list(range(1, COUNT + 1))
    assert await conn.fetchval("SELECT max(attempts) FROM core.outbox") == 1
