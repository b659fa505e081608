"""What a command says that it did is what it did, and what it recommends works when it is typed."""

from __future__ import annotations

import asyncio
import json
from uuid import UUID

import asyncpg
import pytest

from tests.operator.support import HANDLER, command, fail

pytestmark = [pytest.mark.newcomer, pytest.mark.newest_postgres]

ARCHIVE = """
WITH gone AS (DELETE FROM core.outbox WHERE id = ANY ($1) RETURNING *)
INSERT INTO core.archive (original_id, queue, payload, headers, deliveries_count, created_at, failed_at, failure_reason,
                          last_exception, event_type, event_version, occurred_at, source, content_class, channel, generation,
                          idempotency_key, origin_id, priority, first_failed_at, error_signature, failure_history)
SELECT id, handler_name, payload, headers, attempts, created_at, failed_at, failure_reason, last_error, event_type,
       event_version, occurred_at, source, content_class, channel, generation, idempotency_key, origin_id, priority, first_failed_at,
       error_signature, failure_history
FROM gone ORDER BY failed_at
"""


async def archive(conn: asyncpg.Connection, count: int = 1, *, handler: str = HANDLER) -> list[UUID]:
    """Dead letters as a worker with `dead_letters="archive"` leaves them."""
    ids = await fail(conn, count, handler=handler)
    await conn.execute(ARCHIVE, ids)
    return ids


async def typed(dsn: str, *words: object) -> tuple[int | None, str, str]:
    """The code, the output and the errors of a command."""
    process = await command(dsn, *map(str, words))
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


async def discarded(conn: asyncpg.Connection) -> set[UUID]:
    return {each[0] for each in await conn.fetch("SELECT original_id FROM core.archive WHERE deleted_at IS NOT NULL")}


# --- what is in the archive ---


@pytest.mark.parametrize("named", ["delivery", "event"])
async def test_what_is_archived_is_discarded_and_restored_by_its_id(
    dsn: str, conn: asyncpg.Connection, named: str
) -> None:
    """DLQ-2: among others in the archive, and the command says so; a dry run says the same and changes nothing."""
    ids = await archive(conn, 4)
    event, one = UUID(int=7), ids[1]
    await conn.execute("UPDATE core.archive SET origin_id = $1 WHERE original_id = $2", event, one)
    name = one if named == "delivery" else event
    assert await typed(dsn, "failed", "discard", name, "--dry-run") == (0, f"1 event would be discarded\n  {one}\n", "")
    assert await discarded(conn) == set()
    assert await typed(dsn, "failed", "discard", name, "--yes") == (0, "1 event discarded\n", "")
    assert await discarded(conn) == {one}
    assert await typed(dsn, "failed", "restore", name, "--dry-run") == (0, f"1 event would be restored\n  {one}\n", "")
    assert await typed(dsn, "failed", "restore", name) == (0, "1 event restored\n", "")
    assert await discarded(conn) == set()
    counts = [json.loads(each[0]) for each in await conn.fetch("SELECT counts FROM core.audit ORDER BY id")]
    assert counts == [{"moved": 1}, {"moved": 1}]


async def test_a_number_that_is_not_in_the_archive_is_not_called_gone(dsn: str, conn: asyncpg.Connection) -> None:
    """DLQ-2: it was replayed, or was never there; and one that is discarded comes back by the archive's own verb."""
    await archive(conn, 2)
    first, second = [each[0] for each in await conn.fetch("SELECT id FROM core.archive ORDER BY id")]
    assert (await typed(dsn, "archive", "replay", first, "--yes"))[0] == 0
    for verb in ("replay", "discard", "restore"):
        for number in (first, 4711):
            code, out, _ = await typed(dsn, "archive", verb, number, *(["--yes"] if verb != "restore" else []))
            assert code == 1
            assert out.endswith("1 event left: replayed or never there: no archived row has this number\n")
    assert (await typed(dsn, "archive", "discard", second, "--yes"))[0] == 0
    _, out, _ = await typed(dsn, "archive", "discard", second, "--yes")
    assert "holdfast archive restore" in out and "failed restore" not in out
