"""A login that listens and does not read fills the queue of notifications: no commit of others fails by it (SEC-1)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from holdfast.embedded import EmbeddedPostgres
from holdfast.postgres.schema import migrate

pytestmark = pytest.mark.trust

INSERT = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}')"
ASLEEP = "SELECT pg_advisory_lock(hashtextextended('core.outbox_default', 0))"


@pytest.fixture
async def dsn() -> AsyncIterator[str]:
    """A server whose queue has room for half a megabyte, instead of eight gigabytes."""
    with EmbeddedPostgres(settings={"max_notify_queue_pages": "64"}) as server:
        dsn = server.create_database("shop")
        await migrate.apply(dsn)
        yield dsn


async def filled(dsn: str) -> asyncpg.Connection:
    """A session that listens in an open transaction, after another has notified until it was refused."""
    listening = await asyncpg.connect(dsn)
    await listening.execute("LISTEN x")
    await listening.execute("BEGIN; SELECT 1")
    other = await asyncpg.connect(dsn)
    with pytest.raises(asyncpg.PostgresError, match="too many notifications"):
        for n in range(200):
            await other.execute(
                "SELECT pg_notify('x', repeat('a', 7000) || $1 || g) FROM generate_series(1, 10) g", str(n)
            )
    await other.close()
    return listening


async def test_commits_succeed_while_the_queue_is_full(dsn: str) -> None:
    """The bell is silent, workers poll; when there is room again it rings (SEC-1, LSN-1)."""
    heard: list[str] = []
    worker, producer = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    await worker.execute(ASLEEP)
    listening = await filled(dsn)
    assert await producer.fetchval("SELECT pg_notification_queue_usage()") > 0.9
    for _ in range(3):
        await producer.execute(INSERT)
    await producer.execute("SELECT core.wake('outbox_default', 'rescan')")
    await listening.close()
    await worker.add_listener("outbox_default", lambda *hint: heard.append(hint[-1]))
    await producer.execute(INSERT)
    await worker.execute("SELECT 1")
    assert heard == [""]
    for connection in (worker, producer):
        await connection.close()
