"""Plans of claims by key: a hot key with 20,000 followers and a held snapshot cost other keys nothing (LSN-9, LSN-15).

Work is counted in pages, which no noise of the machine can move.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.outbox import EVENT, HANDLER, Outbox, connect
from tests.postgres.keyed import claim_fair, claim_ordered
from tests.servers import SessionServer, run_coroutine

pytestmark = [pytest.mark.slow, pytest.mark.both_postgres]

FOLLOWERS, KEYS = 20_000, 1_000
# What statements have read and hit since the beginning of the transaction, of tables and indexes.
PAGES = """SELECT sum(pg_stat_get_xact_blocks_fetched(c.oid))::int FROM pg_class c
           WHERE c.relkind IN ('r', 'i') AND c.relnamespace = 'core'::regnamespace"""


@pytest.fixture(scope="module")
def full_dsn(postgres_server: SessionServer) -> Iterator[str]:
    name = postgres_server.create(schema=True)
    run_coroutine(lambda: _fill(postgres_server.dsn(name)))
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


async def _fill(dsn: str) -> None:
    connection = await connect(dsn)
    outbox = Outbox(connection)
    await outbox.subscribe(HANDLER, EVENT, "order.paid", "order.fair")
    await outbox.insert_many(FOLLOWERS, ordering_key="'hot'")
    await outbox.insert_many(KEYS, ordering_key="'k' || n")
    await outbox.insert_many(FOLLOWERS, "order.fair", fairness_key="'large'")
    await outbox.insert_many(1, "order.fair", fairness_key="'small'")
    await connection.close()


@pytest.fixture
async def outbox(full_dsn: str) -> AsyncIterator[Outbox]:
    """Within a transaction that is rolled back."""
    connection = await connect(full_dsn)
    transaction = connection.transaction()
    await transaction.start()
    yield Outbox(connection)
    await transaction.rollback()
    await connection.close()


async def _pages(outbox: Outbox) -> int:
    return int(await outbox.value(PAGES))


async def test_a_hot_key_costs_other_keys_nothing(outbox: Outbox) -> None:
    """A claim of 100 heads reads a few pages for each, with 20,000 rows behind the first of them (LSN-9)."""
    before = await _pages(outbox)
    claim = await claim_ordered(outbox, 100)
    read = await _pages(outbox) - before
    assert len(claim.rows) == 100 and "hot" in claim.keys
    assert read < 100 * 40, f"{read} pages"


async def test_a_held_snapshot_does_not_slow_down_a_key_that_is_gone_on_with(outbox: Outbox, full_dsn: str) -> None:
    """With 5,000 dead entries at its head, that no vacuum may remove, the next row costs a few pages (LSN-9)."""
    await outbox.connection.execute(
        """UPDATE core.outbox SET status = 'delivered', settled_at = now(), delivered_at = now()
           WHERE id IN (SELECT id FROM core.outbox WHERE ordering_key = 'hot' ORDER BY seq LIMIT 5000)"""
    )
    mark = await outbox.value("SELECT max(seq) FROM core.outbox WHERE ordering_key = 'hot' AND settled_at IS NOT NULL")
    before = await _pages(outbox)
    claim = await claim_ordered(outbox, 100, keys=[(HANDLER, "hot", mark)], discover=False)
    read = await _pages(outbox) - before
    assert claim.keys == ["hot"]
    assert read < 400, f"{read} pages"


async def test_a_large_fairness_key_does_not_slow_down_a_claim(outbox: Outbox) -> None:
    """20,000 events of one tenant: the single event of another is in the next claim (LSN-15)."""
    before = await _pages(outbox)
    claim = await claim_fair(outbox, 100)
    read = await _pages(outbox) - before
    assert claim.keys.count("small") == 1 and claim.keys.count("large") == 50
    assert read < 100 * 40, f"{read} pages"


async def test_a_claim_from_lanes_looks_for_keys_by_one_probe(outbox: Outbox) -> None:
    """What is asked beside every claim reads a few pages, however many rows have a key (LSN-9)."""
    before = await _pages(outbox)
    rows = await outbox.claim(keyed=True)
    read = await _pages(outbox) - before
    assert [row["route"] for row in rows] == ["fair"]
    assert read < 60, f"{read} pages"


async def test_counts_of_open_rows_end_at_their_limit(outbox: Outbox) -> None:
    """Status and lists find rows with a key by their index, up to a limit (OBS-2)."""
    for setting in ("enable_seqscan", "jit"):
        await outbox.connection.execute(f"SET LOCAL {setting} = off")
    before = await _pages(outbox)
    (row,) = await outbox.call("count_open", most=1_000)
    read = await _pages(outbox) - before
    assert row["examined"] == 1_000
    assert read < 5_000, f"{read} pages"


async def test_the_plans_use_the_indexes_of_keys(full_dsn: str) -> None:
    """No claim by key scans the table (LSN-9)."""
    connection = await connect(full_dsn)
    try:
        scans = "SELECT sum(seq_scan)::int FROM pg_stat_user_tables WHERE relname = 'outbox'"
        await connection.execute("SELECT pg_stat_force_next_flush()")
        before = await connection.fetchval(scans)
        outbox = Outbox(connection)
        await claim_ordered(outbox, 5)
        await claim_fair(outbox, 5)
        await connection.execute("SELECT pg_stat_force_next_flush()")
        assert await connection.fetchval(scans) == before
    finally:
        await connection.close()
