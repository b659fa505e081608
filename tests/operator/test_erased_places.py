"""Erasing a domain covers every place that names it, and says what stays (OBX-5, SEC-1, T10)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import asyncpg
import pytest

from holdfast.operator import Operator
from tests.outbox import EVENT, HANDLER, Outbox, connect

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

TABLES = "SELECT c.relname::text FROM pg_class c WHERE c.relnamespace = 'core'::regnamespace AND c.relkind = 'r'"


@pytest.fixture
async def outbox(dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(dsn)
    yield Outbox(connection)
    await connection.close()


@pytest.fixture
async def ann(dsn: str) -> AsyncIterator[Operator]:
    async with Operator(dsn, actor="ann@example.org") as operator:
        yield operator


async def places(outbox: Outbox, trace: str) -> set[str]:
    """The tables in which a text can still be read."""
    found = set()
    for (table,) in await outbox.connection.fetch(TABLES):
        query = f"SELECT EXISTS (SELECT FROM core.{table} t WHERE strpos(t::text, $1) > 0 OR strpos(t::text, $2) > 0)"
        if await outbox.value(query, trace, trace.encode().hex()):
            found.add(table)
    return found


async def record(outbox: Outbox, scope: str, key: str, body: bytes) -> None:
    async with outbox.connection.transaction():
        await outbox.value("SELECT core.idempotency_begin($1, $2, '{h}', 1, '1 hour', 2000, NULL)", scope, key)
        await outbox.value("SELECT core.idempotency_complete($1, $2, false, 200, '{}', $3, false)", scope, key, body)


async def test_nothing_is_left_or_it_is_named(outbox: Outbox, ann: Operator) -> None:
    """Outbox, archive, inbox keys, producers' keys, idempotency records; the audit and notes are named (T10)."""
    domain, other = uuid4(), uuid4()
    await outbox.subscribe(HANDLER, EVENT)
    for whose, trace in ((domain, f"person-{domain}"), (other, f"person-{other}")):
        key = {"idempotency_key": trace, "dedupe_key": trace, "domain_id": whose, "payload": {"name": trace}}
        delivered = await outbox.held(**key)
        await outbox.call(
            "outbox_hold_key", source="shop", key=trace, id=delivered.id, reschedule=False, available_at=None
        )
        assert await outbox.deliver(delivered) == []
        failed = await outbox.held(**(key | {"idempotency_key": f"{trace}-2"}))
        fence = {"ids": [failed.id], "tokens": [failed.token], "handlers": [HANDLER], "reasons": ["rejected"]}
        await outbox.call("outbox_archive", **fence, errors=[trace], signatures=["s"])
        await outbox.connection.execute(
            "INSERT INTO core.event_handled VALUES ($1, $2, now(), 'shop')", HANDLER, f"{trace}-2"
        )
        await record(outbox, str(whose), "k", b"{}")
        await record(outbox, "tenant", f"k-{whose}", b"{}")
        await record(outbox, "tenant", f"body-{trace[-4:]}", json.dumps({"id": str(whose)}).encode())
    everywhere = {"outbox", "archive", "event_handled", "outbox_keys", "idempotency_records"}
    assert await places(outbox, str(domain)) == everywhere
    preview = await ann.retention.preview_erasure(domain)
    assert (preview.outbox, preview.archive, preview.records) == (1, 1, 3)
    assert await places(outbox, str(domain)) == everywhere
    done = await ann.retention.erase(domain, reason="request 17")
    assert (done.outbox, done.archive, done.records, done.kept) == (1, 1, 3, {})
    assert await places(outbox, str(domain)) == {"audit"}, "only the lines that prove the erasure"
    assert await places(outbox, str(other)) == everywhere
    # A command whose answer is gone was carried out all the same.
    again = "SELECT core.idempotency_begin('tenant', $1, '{h}', 1, '1 hour', 2000, NULL)"
    assert json.loads(await outbox.value(again, f"body-{str(domain)[-4:]}"))["omitted"] is True
    # What cannot be erased is named.
    await outbox.connection.execute(
        "SELECT core.audit_refused('ann', 'replay', $1, '{}', 'no'), core.failure_note('a.b', 's', $1, 'ann')",
        f"for {domain}",
    )
    assert (await ann.retention.erase(domain)).kept == {"audit": 2, "notes": 1}


@pytest.mark.parametrize("id", [UUID(int=0), UUID(int=2**128 - 1)])
async def test_the_first_and_the_last_id_are_not_missed(outbox: Outbox, ann: Operator, id: UUID) -> None:
    """Nil and max, which a page by page look could begin after or end before (T10)."""
    domain = uuid4()
    await outbox.subscribe(HANDLER, EVENT)
    assert await outbox.deliver(await outbox.held(id=id, domain_id=domain, payload={"x": 1})) == []
    assert (await ann.retention.preview_erasure(domain)).outbox == 1
    assert (await ann.retention.erase(domain)).outbox == 1
    assert (await outbox.row(id))["payload"] is None


async def test_records_are_read_page_by_page(outbox: Outbox, ann: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, whatever their order (T10)."""
    monkeypatch.setattr("holdfast.operator.retention._ERASE_AT_ONCE", 3)
    domain = uuid4()
    for n in range(10):
        await record(outbox, f"s{n % 4}", f"k{n}", str(domain).upper().encode() if n % 2 else b"{}")
    assert (await ann.retention.erase(domain)).records == 5


async def test_the_answer_of_another_domain_stays(outbox: Outbox, ann: Operator, conn: asyncpg.Connection) -> None:
    """Byte for byte (T10)."""
    await record(outbox, "tenant", "k", b"\x00\xff binary")
    before = await conn.fetchrow("SELECT * FROM core.idempotency_records")
    assert (await ann.retention.erase(uuid4())).records == 0
    assert await conn.fetchrow("SELECT * FROM core.idempotency_records") == before
