"""An event is due when it is written, at the earliest: no date puts it before others, or makes up its age."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import pytest

from holdfast import Publisher
from holdfast.postgres.operations import status
from holdfast.testing import MemoryOutbox
from tests.outbox import Lane, Outbox, connect

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

LONG_AGO = datetime(1, 1, 3, tzinfo=UTC)


@pytest.fixture
async def outbox(dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(dsn)
    yield Outbox(connection)
    await connection.close()


async def claimed(outbox: Outbox, count: int) -> list[UUID]:
    """The order in which a worker gets them."""
    return [row["id"] for _ in range(count) for row in await outbox.claim(Lane(limit=1))]


async def test_an_early_date_does_not_jump_the_queue(outbox: Outbox) -> None:
    """It comes after what was published before it, and is as old as it is (SEC-1, OBS-3)."""
    first = await outbox.insert()
    dated = await outbox.insert(available_at=LONG_AGO)
    headed = await outbox.insert(available_at=LONG_AGO, headers={}, expires_at=datetime.now(UTC) + timedelta(hours=1))
    assert await claimed(outbox, 3) == [first, dated, headed]
    for each in (dated, headed):
        row = await outbox.row(each)
        assert row["available_at"] == row["created_at"]
    await outbox.clear()
    await outbox.insert(available_at=LONG_AGO)
    oldest = (await status.read(outbox.connection)).oldest
    assert oldest is not None and oldest < 60


async def test_a_pending_event_is_not_rescheduled_before_now(conn: asyncpg.Connection) -> None:
    """Also by publishing its key again (SEC-1)."""
    publisher = Publisher("shop")
    async with conn.transaction():
        await publisher.publish(conn, "order.remind", {}, key="k", delay=60)
    for way in ("reschedule", "publish"):
        async with conn.transaction():
            if way == "reschedule":
                await publisher.reschedule(conn, "k", available_at=LONG_AGO)
            else:
                again = {"key": "k", "on_duplicate": "reschedule", "available_at": LONG_AGO}
                await publisher.publish(conn, "order.remind", {}, **again)
            assert await conn.fetchval("SELECT available_at = now() FROM core.outbox"), way


async def test_rows_imported_with_their_creation_keep_their_order(outbox: Outbox) -> None:
    """created_at is the owner's to write, and no producer's (SEC-1)."""
    new = await outbox.insert()
    then = datetime.now(UTC) - timedelta(days=2)
    old = await outbox.insert(created_at=then, available_at=then)
    assert await claimed(outbox, 2) == [old, new]
    assert (await outbox.row(old))["available_at"] == then
    assert not await outbox.value(
        "SELECT has_column_privilege('holdfast_producer', 'core.outbox', 'created_at', 'INSERT')"
    )


def test_the_memory_outbox_does_the_same() -> None:
    """What tests see is what Postgres does (SEC-1)."""
    outbox = MemoryOutbox()
    before = outbox.now
    outbox.publish("order.placed", {}, available_at=LONG_AGO)
    (published,) = outbox.published()
    assert published.available_at is not None and before <= published.available_at <= outbox.now
