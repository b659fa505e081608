"""Plans of the hot statements beside a full outbox: 10,000 due rows, 200,000 kept, and crowds in other lanes.

The plans are those that ran, as auto_explain saw them inside the functions. Work is counted in pages, which no noise
of the machine can move.
"""

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from tests.servers import SessionServer, run_coroutine

pytestmark = [pytest.mark.slow, pytest.mark.both_postgres]

DUE, KEPT, CROWD, DEAD = 10_000, 200_000, 20_000, 200
NO_MARK = (datetime(1, 1, 2, tzinfo=UTC), uuid.UUID(int=0))
TOKEN = uuid.uuid4()

ROWS = """
INSERT INTO core.outbox (id, event_type, source, target, payload, idempotency_key, channel, generation, available_at,
                         status, settled_at, delivered_at, handler_name)
SELECT i, $1, 'shop', $2, '{"order_id": 1, "lines": [{"sku": "abc", "qty": 2}]}', i::text, 'outbox_default', $3,
       now() + $4::interval, $5::text, CASE $5::text WHEN 'delivered' THEN now() END,
       CASE $5::text WHEN 'delivered' THEN now() END, CASE $5::text WHEN 'delivered' THEN 'billing.charge' END
FROM (SELECT core.uuid7() AS i FROM generate_series(1, $6)) ids
"""


WATCH = """
LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on;
SET auto_explain.log_analyze = on; SET auto_explain.log_buffers = on; SET auto_explain.log_timing = off;
SET auto_explain.log_format = 'json'; SET client_min_messages = 'log'
"""
FAILED = """
INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, channel, status, handler_name, attempts,
                         last_error, failure_reason, settled_at, failed_at)
SELECT i, 'order.placed', 'shop', '{}', i::text, 'outbox_default', 'failed', 'billing.charge', 5, 'boom',
       'retry_terminal', now(), now() - n * interval '1 minute'
FROM (SELECT core.uuid7() AS i, n FROM generate_series(1, $1::int) n) ids
"""
RELEASE = """
UPDATE core.outbox SET status = 'pending', lease_token = NULL, lease_expires_at = NULL WHERE status = 'in_flight'
"""


@dataclass
class Explained:
    """One statement that ran: its text, and the nodes of its plan."""

    text: str
    nodes: list[dict[str, Any]]

    def pages(self) -> int:
        return int(self.nodes[0]["Shared Hit Blocks"] + self.nodes[0]["Shared Read Blocks"])

    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes if "Index Name" in node}

    def scanned_whole(self) -> set[str]:
        return {node["Relation Name"] for node in self.nodes if node["Node Type"] in ("Seq Scan", "Bitmap Heap Scan")}

    def rows_thrown_away(self) -> int:
        """Rows of tables that were read for nothing."""
        return sum(node.get("Rows Removed by Filter", 0) for node in self.nodes if "Relation Name" in node)


def flatten(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node, *(each for child in node.get("Plans", []) for each in flatten(child))]


class Watched:
    """A connection that explains every statement inside the functions it calls."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection
        self.explained: list[Explained] = []
        connection.add_log_listener(self._logged)

    def _logged(self, _connection: object, message: Any) -> None:
        _, found, plan = message.message.partition("plan:\n")
        if found:
            parsed = json.loads(plan)
            self.explained.append(Explained(parsed["Query Text"], flatten(parsed["Plan"])))

    async def fetch(self, sql: str, *args: object) -> list[asyncpg.Record]:
        self.explained.clear()
        rows: list[asyncpg.Record] = await self.connection.fetch(sql, *args)
        return rows

    def statement(self, fragment: str) -> Explained:
        (found,) = [each for each in self.explained if fragment in each.text and "SELECT * FROM core." not in each.text]
        return found

    async def claim(self, route: str, limit: int = 300, handler: str = "billing.charge") -> list[asyncpg.Record]:
        version = await self.connection.fetchval("SELECT version FROM core.subscriptions_version")
        return await self.fetch(
            "SELECT * FROM core.outbox_claim($1, $1, $2, $3, 'outbox_default', 0, $4, $5, $6, $7, $8, $9)",
            TOKEN,
            timedelta(seconds=30),
            version,
            [route],
            [1],
            [handler],
            [limit],
            [NO_MARK[0]],
            [NO_MARK[1]],
        )

    async def split(
        self, route: str, limit: int = 100, mark: tuple[datetime, uuid.UUID] = NO_MARK
    ) -> list[asyncpg.Record]:
        version = await self.connection.fetchval("SELECT version FROM core.subscriptions_version")
        return await self.fetch(
            "SELECT * FROM core.outbox_split($1, 'outbox_default', 0, $2, $3, $4, $5, $6)",
            version,
            [route],
            [1],
            [limit],
            [mark[0]],
            [mark[1]],
        )


@pytest.fixture(scope="module")
def full_dsn(postgres_server: SessionServer) -> Iterator[str]:
    """Filled without statistics and without a vacuum: the plans must not depend on either."""
    name = postgres_server.create(schema=True)
    run_coroutine(lambda: fill(postgres_server.dsn(name)))
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


async def fill(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("SET session_replication_role = replica")  # the bell has no part in this
        await connection.execute("ALTER TABLE core.outbox SET (autovacuum_enabled = off)")
        zero, earlier = timedelta(0), timedelta(hours=-1)
        await connection.execute(ROWS, "order.placed", None, 0, earlier, "delivered", KEPT)
        await connection.execute(ROWS, "nobody.cares", None, 0, earlier, "pending", CROWD)
        await connection.execute(ROWS, "order.placed", None, 0, timedelta(days=1), "pending", CROWD)
        await connection.execute(ROWS, "order.placed", "warehouse", 0, earlier, "pending", CROWD)
        await connection.execute(ROWS, "order.placed", None, 7, earlier, "pending", CROWD)
        await connection.execute(ROWS, "order.placed", None, 0, zero, "pending", DUE)
        await connection.execute(FAILED, DEAD)
        for handler in ("warehouse.pick", "warehouse.pack"):
            await connection.execute("SELECT core.subscribe('warehouse', $1, '{order.placed}')", handler)
        await connection.execute(
            """INSERT INTO core.event_handled (handler_name, idempotency_key, source)
               SELECT 'billing.charge', core.uuid7()::text, 'shop' FROM generate_series(1, $1)""",
            DUE,
        )
    finally:
        await connection.close()


@pytest.fixture
async def watched(full_dsn: str) -> AsyncIterator[Watched]:
    connection = await asyncpg.connect(full_dsn)
    await connection.execute(WATCH)
    yield Watched(connection)
    await connection.close()


async def test_claim_reads_only_its_lane(watched: Watched) -> None:
    """Rows for others, unrouted, delayed and of other generations are never scanned (LSN-1)."""
    assert len(await watched.claim("*/order.placed")) == 300
    claim = watched.statement("FOR UPDATE SKIP LOCKED")
    assert claim.scanned_whole() == set()
    assert {"outbox_lane", "outbox_pkey"} <= claim.indexes()
    assert claim.rows_thrown_away() == 0
    # Per row: its lane entry, lock, primary key, new version and inbox probe. The crowd of 80,000 adds nothing.
    assert claim.pages() < 300 * 30


async def test_empty_lane_costs_a_probe(watched: Watched) -> None:
    """An empty lane beside crowded ones is one descent of the index (LSN-1)."""
    assert await watched.claim("billing.charge") == []
    assert watched.statement("FOR UPDATE SKIP LOCKED").pages() < 20


async def test_settle_looks_up_by_primary_key(watched: Watched) -> None:
    """Settling touches the rows it names, in an inbox and an outbox of any size (LSN-3)."""
    rows = await watched.claim("*/order.placed")
    ids, tokens = [row["id"] for row in rows], [TOKEN] * len(rows)
    lost = await watched.fetch(f"SELECT {FENCED['deliver']}", ids, tokens)
    assert lost == []
    settle = watched.statement("status = 'delivered'")
    assert settle.scanned_whole() == set()
    assert settle.indexes() == {"outbox_pkey"}
    assert settle.pages() < 300 * 40


MANY = {
    text: f"array_fill('{text}'::{kind}, ARRAY[100])"
    for text, kind in (("billing.charge", "text"), ("rejected", "text"), ("boom", "text"), ("1h", "interval"))
}
FENCED = {
    "deliver": "core.outbox_deliver($1, $2, '{*/order.placed}', '{billing.charge}', true, 'delivered')",
    "retry": f"core.outbox_retry($1, $2, {MANY['billing.charge']}, {MANY['1h']}, {MANY['boom']})",
    "fail": f"core.outbox_fail($1, $2, {MANY['billing.charge']}, {MANY['rejected']}, {MANY['boom']}, {MANY['boom']})",
    "release": f"core.outbox_release($1, $2, {MANY['1h']}, {MANY['billing.charge']})",
    "extend": "core.outbox_extend($1, $2, '30 s')",
}


async def settle(watched: Watched, verb: str) -> None:
    """Claim a hundred rows and settle them; every statement inside must have looked them up by primary key."""
    rows = await watched.claim("*/order.placed", limit=100)
    claim = watched.statement("FOR UPDATE SKIP LOCKED")
    assert claim.scanned_whole() == set() and claim.pages() < 100 * 30
    ids, tokens = [row["id"] for row in rows], [TOKEN] * len(rows)
    assert await watched.fetch(f"SELECT {FENCED[verb]}", ids, tokens) == []
    inner = [
        each
        for each in watched.explained
        if "core.outbox o" in each.text and not each.text.lstrip().startswith("SELECT core.")
    ]
    assert inner
    for statement in inner:
        assert statement.scanned_whole() == set(), statement.text
        assert statement.indexes() - {"cancel_requests_pkey"} == {"outbox_pkey"}
        assert statement.pages() < 100 * 40
        assert statement.rows_thrown_away() == 0


@pytest.mark.parametrize("verb", FENCED)
async def test_every_fenced_statement(watched: Watched, verb: str) -> None:
    """All of them look up by primary key (LSN-3)."""
    await settle(watched, verb)


@pytest.mark.parametrize("verb", FENCED)
async def test_plans_made_while_the_outbox_was_empty(postgres_server: SessionServer, dsn: str, verb: str) -> None:
    """A worker that started on an empty table keeps its plans, and they must do for a full one (LSN-3)."""
    connection, other = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    await connection.execute(WATCH)
    watched = Watched(connection)
    for _ in range(8):  # the server settles for a plan after five
        await watched.claim("*/order.placed")
        await watched.fetch(f"SELECT {FENCED[verb]}", [uuid.uuid4()] * 100, [uuid.uuid4()] * 100)
    await other.execute("SET session_replication_role = replica")
    await other.execute("ALTER TABLE core.outbox SET (autovacuum_enabled = off)")
    await other.execute(ROWS, "order.placed", None, 0, timedelta(0), "pending", 60_000)
    await settle(watched, verb)
    await connection.execute(RELEASE)
    await connection.close()
    await other.close()


@pytest.mark.parametrize("verb", FENCED)
async def test_statistics_do_not_change_the_plans(full_dsn: str, watched: Watched, verb: str) -> None:
    """After ANALYZE has seen that almost nothing is in flight, a scan for those few must not look cheap (LSN-3)."""
    await watched.connection.execute("ANALYZE core.outbox")
    await settle(watched, verb)


async def test_due_in_and_lanes_probe(watched: Watched) -> None:
    """What an idle worker asks costs a few pages, whatever the backlog (PUB-2, LSN-7)."""
    await watched.fetch("SELECT core.outbox_due_in('outbox_default', 0, '{*/order.placed,billing.charge}', '{1,1}')")
    due = watched.statement("min(next.available_at)")
    assert due.scanned_whole() == set() and due.pages() < 30
    rows = await watched.fetch("SELECT core.outbox_routes('outbox_default', 0)")
    assert {row[0] for row in rows} >= {"*/order.placed", "*/nobody.cares", "warehouse/order.placed"}
    routes = watched.statement("WITH RECURSIVE found")
    assert routes.scanned_whole() == set() and routes.pages() < 100


async def test_dead_letters_beside_many_delivered(watched: Watched) -> None:
    """The dead-letter queue is read through its index (DLQ-1)."""
    rows = await watched.fetch("SELECT id, handler_name, last_error FROM core.failed ORDER BY failed_at DESC LIMIT 50")
    assert len(rows) == 50
    assert {(row["handler_name"], row["last_error"]) for row in rows} == {("billing.charge", "boom")}
    (query,) = watched.explained
    assert query.indexes() == {"outbox_dlq"}
    assert query.pages() < 500


async def split(watched: Watched) -> None:
    """Split a hundred events that two handlers want; the crowds beside them must not be read."""
    rows = await watched.split("warehouse/order.placed")
    assert [(row["route"], row["n"]) for row in rows] == [("warehouse/order.placed", 100)]
    statement = watched.statement("WITH origin AS MATERIALIZED")
    assert "outbox" not in statement.scanned_whole()
    assert {"outbox_lane", "outbox_pkey"} <= statement.indexes()
    assert statement.rows_thrown_away() == 0
    # Per event: its lane entry, lock and new version, and two siblings with their entries in two indexes.
    assert statement.pages() < 100 * 60
    now = await watched.connection.fetchval("SELECT now()")
    assert await watched.split("warehouse/order.placed", mark=(now, uuid.UUID(int=0))) == []
    assert watched.statement("WITH origin AS MATERIALIZED").pages() < 20, "all of the lane lies below the mark"


async def test_split_reads_only_its_lane(watched: Watched) -> None:
    """By the lane's index and the primary key, from the mark on (LSN-7)."""
    await split(watched)
    await watched.connection.execute("ANALYZE core.outbox")
    await split(watched)


async def test_split_planned_while_the_outbox_was_empty(dsn: str) -> None:
    """The plans of a worker that started on an empty table must do for a full one (LSN-7)."""
    connection, other = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    await connection.execute(WATCH)
    watched = Watched(connection)
    for handler in ("warehouse.pick", "warehouse.pack"):
        await other.execute("SELECT core.subscribe('warehouse', $1, '{order.placed}')", handler)
    for _ in range(8):
        assert await watched.split("warehouse/order.placed") == []
    await other.execute("SET session_replication_role = replica")
    await other.execute("ALTER TABLE core.outbox SET (autovacuum_enabled = off)")
    await other.execute(ROWS, "order.placed", "warehouse", 0, timedelta(0), "pending", 60_000)
    await split(watched)
    await connection.close()
    await other.close()
