"""Commands of handlers with each kind of transaction: carried out once for each key, with the rest of the delivery."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope
from holdfast.errors import KeyReused
from holdfast.idempotency import Commands, job_key
from tests.handling.kinds import KINDS, TABLE, Kind, Work
from tests.handling.test_contract import working
from tests.worker.support import drained, publish_many, row

COMMANDS = Commands(secrets={1: "a secret that only the tests know, of thirty-two bytes"})
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture(autouse=True)
async def entries(conn: asyncpg.Connection) -> None:
    await conn.execute(TABLE)


@every_kind
async def test_a_command_is_carried_out_once(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Of all events that ask for it; one whose handler fails takes the command back with it (LSN-13, IDM-2)."""
    runs: list[int] = []
    results: list[Any] = []

    async def body(event: EventEnvelope, work: Work) -> None:
        async def remind() -> dict[str, int]:
            runs.append(1)
            await work.book(event)
            await work.flush()
            return {"run": len(runs)}

        result = await work.command(COMMANDS, job_key("2026-03-01", "remind"), {"order": 17}, remind)
        if len(runs) == 1:
            raise ConnectionError("the other side is not there")
        results.append(result)

    await publish_many(conn, "order.booked", 5)
    async with working(dsn, kind, body):
        await drained(conn)
    assert results == [{"run": 2}] * 5
    assert await conn.fetchval("SELECT count(*) FROM entries") == 1
    assert await conn.fetchval("SELECT count(*) FROM core.idempotency_records") == 1


@every_kind
async def test_a_key_of_another_command(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """It is refused, and nothing of the handler is there (LSN-13, IDM-2)."""

    async def body(event: EventEnvelope, work: Work) -> None:
        async def nothing() -> None: ...

        await work.book(event, event.payload["n"])
        await work.command(COMMANDS, job_key("2026-03-01", "remind"), {"order": event.payload["n"]}, nothing)

    first, second = await publish_many(conn, "order.booked", 2)
    async with working(dsn, kind, body, concurrency=1):
        await drained(conn)
    failed = [each for each in (await row(conn, first), await row(conn, second)) if each["status"] == "failed"]
    assert len(failed) == 1 and KeyReused.__name__ in failed[0]["last_error"]
    assert await conn.fetchval("SELECT count(*) FROM entries") == 1
