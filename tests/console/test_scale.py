"""Pages of a large installation: a million delivered events, and ten thousand dead letters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from urllib.parse import quote

import asyncpg
import pytest

from holdfast.access.principal import Role
from holdfast.console import ConsoleSettings, create_console
from holdfast.console.pages import PAGES
from tests.console import shop
from tests.console.conftest import Browser, as_role, fill_all
from tests.console.examples import address_of
from tests.servers import SessionServer, run_coroutine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DELIVERED = 1_000_000
DEAD_LETTERS = 10_000
SLOWEST = 2.0  # seconds, on a machine that may be busy: the time that a read has
LARGEST = 150_000  # bytes
SHOWN = [page for page in PAGES if page.get is not None]

# An id as core.uuid7() makes it, for the moment of the row; n makes it unique.
ADD_DELIVERED = """
INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, channel, generation, status, attempts,
       handler_name, domain_id, occurred_at, created_at, available_at, settled_at, delivered_at)
SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7000a' || lpad(to_hex(n), 15, '0'))::uuid,
       'order.placed', 'shop', '{"n": 1}', 'many-' || n, 'outbox_default', 0, 'delivered', 1, 'ledger.record_sale',
       md5((n % 50000)::text)::uuid, at, at, at, at, at
FROM generate_series(1, $1::int) n, LATERAL (SELECT now() - n * interval '500 milliseconds') AS t (at)
"""
ADD_FAILED = """
INSERT INTO core.outbox (event_type, source, payload, idempotency_key, channel, generation, status, handler_name,
       attempts, last_error, traceback, error_signature, failure_reason, first_failed_at, failed_at, settled_at)
SELECT event_type, source, payload, 'failed-' || n || id, channel, generation, status, handler_name, attempts,
       last_error, traceback, error_signature, failure_reason, first_failed_at,
       failed_at - n * interval '3 seconds', settled_at
FROM (SELECT * FROM core.outbox WHERE status = 'failed' AND failure_history = '[]' LIMIT 40) o,
     generate_series(1, $1::int / 40) n
"""
COUNTS = "SELECT status, count(*) FROM core.outbox GROUP BY status"
CAUSE = """
SELECT handler_name || '/' || error_signature FROM core.outbox WHERE status = 'failed' AND handler_name = $1 LIMIT 1
"""
SCANS = "SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE schemaname = 'core' AND relname = 'outbox'"
OTHERS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
# A key of late, and one of days ago: the list says how far it was searched, and goes on from there.
LEADS_TO = {"/go?q=many-5000": "many-5000", "/go?q=many-900000": "Look further back"}
NEEDS_MORE = "/failures/hand-over"  # the name of a group


async def fill(dsn: str) -> None:
    await fill_all(dsn)
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute("SET session_replication_role = replica")  # triggers ring bells and count
        await conn.execute(ADD_DELIVERED, DELIVERED)
        await conn.execute(ADD_FAILED, DEAD_LETTERS)
        await conn.execute("RESET session_replication_role")
        await conn.execute("ANALYZE core.outbox")
        found = dict(await conn.fetch(COUNTS))
        assert found["delivered"] >= DELIVERED and found["failed"] >= DEAD_LETTERS
    finally:
        await conn.close()


@pytest.fixture(scope="module")
def large(postgres_server: SessionServer) -> Iterator[str]:
    """A database with a million events, for tests that only look."""
    name = postgres_server.create(schema=True)
    run_coroutine(lambda: fill(postgres_server.dsn(name)))
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


async def addresses(dsn: str) -> list[str]:
    """Every page, and lists with the filters that people use."""
    conn = await asyncpg.connect(dsn)
    cause = await conn.fetchval(CAUSE, shop.FAILING)
    late = await conn.fetchrow(
        "SELECT id, domain_id, created_at FROM core.outbox WHERE idempotency_key = 'many-900000'"
    )
    await conn.close()
    group, until = quote(cause, safe=""), quote(late["created_at"].isoformat(), safe="")
    listed = [
        "/events?status=delivered",
        "/events?status=failed",
        "/events?status=pending",
        "/events?key=many-900000",
        f"/events?domain-id={late['domain_id']}",
        f"/events?until={until}",
        f"/events?handler={shop.FAILING}",
        "/events?event-type=nothing.like_this",
        f"/events/{late['id']}",
        f"/failures?group={group}",
        f"/failures?handler={shop.FAILING}",
        f"/failures/hand-over?group={group}",
        *LEADS_TO,
        f"/plans/new?group={group}",
    ]
    return list(dict.fromkeys([*[await address_of(page, dsn) for page in SHOWN], *listed]))


async def scans(dsn: str) -> tuple[int, int]:
    """How often the outbox was read as a whole, and by an index. Connections report it when they end, at the latest."""
    conn = await asyncpg.connect(dsn)
    async with asyncio.timeout(20):
        while await conn.fetchval(OTHERS):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    found = await conn.fetchrow(SCANS)
    await conn.close()
    return found["seq_scan"], found["idx_scan"]


async def test_every_page_of_a_large_installation(large: str) -> None:
    """Within the time of a read, in 150 KB, and without reading a whole table; the slowest are printed (OPS-2)."""
    paths = await addresses(large)
    whole, by_index = await scans(large)
    console = create_console(large, provider=as_role(Role.ADMIN), settings=ConsoleSettings())
    took: dict[str, tuple[float, int]] = {}
    wrong: list[str] = []
    try:
        async with Browser(console, follow_redirects=True) as browser:
            for path in paths:
                start = time.perf_counter()
                answer = await browser.get(path)
                took[path] = time.perf_counter() - start, len(answer.content)
                if path in LEADS_TO:
                    assert LEADS_TO[path] in answer.text and answer.url.path.startswith("/events"), answer.url
                if answer.status_code >= 400 and path != NEEDS_MORE:
                    wrong.append(f"{path}: {answer.status_code} {answer.text[-600:]}")
    finally:
        await console.close()  # its connections report their scans when they end
    for path, (seconds, size) in sorted(took.items(), key=lambda each: -each[1][0]):
        print(f"{seconds * 1000:7.0f} ms {size / 1000:6.1f} KB  {path}")
    assert wrong == []
    assert [path for path, (seconds, _) in took.items() if seconds > SLOWEST] == []
    assert [path for path, (_, size) in took.items() if size > LARGEST] == []
    after = await scans(large)
    assert after[1] > by_index and after[0] == whole
