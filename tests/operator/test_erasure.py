"""Erasing the data of a person or a tenant, by domain_id, in one audited command (OBX-5)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import asyncpg
import pytest

import holdfast.operator.retention
from holdfast import EventEnvelope, HandlerRegistry
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator
from tests.operator.kept import archived, policy, row, rows, sweep, swept
from tests.worker.support import publish, running, until

ANN = "ann@example.org"
SETTLED = ("delivered", "tombstone", "failed", "discarded", "cancelled")


@pytest.fixture
async def ann(dsn: str) -> AsyncIterator[Operator]:
    async with Operator(dsn, actor=ANN) as operator:
        yield operator


async def traces(conn: asyncpg.Connection, domain: UUID) -> list[str]:
    """Where something of the domain can still be read."""
    found = []
    for table in ("outbox", "archive"):
        for each in await conn.fetch(f"SELECT id::text, t::text AS text FROM core.{table} t"):
            if any(trace in each["text"] for trace in (str(domain), "x411", "acme", "key-")):
                found.append(f"{table} {each['id']}")
    return found


async def test_everything_of_a_domain_is_taken(conn: asyncpg.Connection, ann: Operator) -> None:
    """Payload, headers, errors, history, keys and the domain itself, from the outbox and the archive (OBX-5)."""
    domain = uuid4()
    mine = [(await rows(conn, state, 10, domain=domain))[0] for state in SETTLED]
    await archived(conn, 10, 2, domain=domain)
    await archived(conn, 10, domain=domain, deleted=3)
    assert len(await traces(conn, domain)) == 8
    done = await ann.retention.erase(domain, reason="request 17")
    assert (done.outbox, done.archive, done.open, done.total) == (5, 3, 0, 8)
    assert await traces(conn, domain) == []
    for id, state in zip(mine, SETTLED, strict=True):
        left = await row(conn, id)
        assert (left["event_type"], left["source"], left["handler_name"]) == (
            "order.placed", "shop", "billing.charge_card",
        )  # fmt: skip
        assert left["settled_at"] is not None and left["deleted_at"] is not None
        assert left["status"] == ("delivered" if state in ("delivered", "tombstone") else "failed")
    assert await conn.fetchval("SELECT count(*) FROM core.failed") == 0


async def test_others_keep_theirs(conn: asyncpg.Connection, ann: Operator) -> None:
    """Rows of other domains and of none are as they were (OBX-5)."""
    domain = uuid4()
    await rows(conn, "delivered", 10, domain=domain)
    others = [*(await rows(conn, "delivered", 10, domain=uuid4())), *(await rows(conn, "failed", 10))]
    kept = await archived(conn, 10, domain=uuid4())
    before = [await row(conn, id) for id in others]
    await ann.retention.erase(domain)
    assert [await row(conn, id) for id in others] == before
    assert await conn.fetchval("SELECT payload FROM core.archive WHERE id = $1", kept[0]) is not None


async def test_open_events_stay_and_are_counted(conn: asyncpg.Connection, ann: Operator) -> None:
    """What is not delivered yet may be the very event that tells others to erase; it is left, and told (OBX-5)."""
    domain = uuid4()
    waiting = [(await rows(conn, state, 1, domain=domain))[0] for state in ("pending", "future", "in_flight")]
    before = [await row(conn, id) for id in waiting]
    preview = await ann.retention.preview_erasure(domain)
    assert (preview.outbox, preview.archive, preview.open, preview.dry_run) == (0, 0, 3, True)
    done = await ann.retention.erase(domain)
    assert (done.total, done.open) == (0, 3)
    assert [await row(conn, id) for id in waiting] == before


async def test_open_events_may_be_cancelled(conn: asyncpg.Connection, ann: Operator) -> None:
    """If that is asked for; also those whose handlers run, and whose leases are taken (OBX-5)."""
    domain = uuid4()
    for state in ("pending", "future", "in_flight"):
        await rows(conn, state, 1, domain=domain)
    done = await ann.retention.erase(domain, cancel_open=True)
    assert (done.outbox, done.open) == (3, 0)
    assert await traces(conn, domain) == []
    states = await conn.fetch("SELECT DISTINCT status, failure_reason, lease_token FROM core.outbox")
    assert [tuple(each) for each in states] == [("failed", "cancelled", None)]


async def test_an_event_in_a_handlers_transaction_is_left_for_the_next_time(
    dsn: str, conn: asyncpg.Connection, ann: Operator
) -> None:
    """Nothing waits for the handler; it is told to end, and the second erasure finds the row settled (OBX-5,
    LSN-11).
    """
    registry, started = HandlerRegistry(), asyncio.Event()

    @registry.handler("order.placed", name="billing.charge_card")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        started.set()
        await asyncio.sleep(60)

    domain = uuid4()
    await publish(conn, "order.placed", {"card": "x411"}, domain_id=domain)
    async with running(dsn, registry, poll_interval=0.2, lease=2.0):
        await asyncio.wait_for(started.wait(), 20)
        async with asyncio.timeout(10):
            first = await ann.retention.erase(domain, cancel_open=True)
        assert (first.total, first.open) == (0, 1)
        query = "SELECT count(*) = 0 FROM core.outbox WHERE settled_at IS NULL"
        await until(lambda: conn.fetchval(query), what="the handler is ended and the event cancelled")
        second = await ann.retention.erase(domain, cancel_open=True)
        assert (second.total, second.open) == (1, 0)
    assert await traces(conn, domain) == []


async def test_it_is_audited(conn: asyncpg.Connection, ann: Operator) -> None:
    """Who, why, which domain, how many; also when nothing was found, because somebody has to prove it (OBX-5, S17)."""
    domain, nobody = uuid4(), uuid4()
    (id,) = await rows(conn, "delivered", 10, domain=domain)
    await archived(conn, 10, domain=domain)
    await ann.retention.erase(domain, reason="request 17")
    await ann.retention.erase(nobody)
    lines = await conn.fetch("SELECT * FROM core.audit ORDER BY id")
    found = [
        (each["actor"], each["action"], each["reason"], json.loads(each["arguments"]), json.loads(each["counts"]))
        for each in lines
    ]
    assert [(actor, action, reason) for actor, action, reason, _, _ in found] == [
        (ANN, "retention.erase", "request 17"),
        (ANN, "retention.erase", "request 17"),
        (ANN, "retention.erase", None),
    ]
    assert [(each["table"], each["domain_id"]) for *_, each, _ in found] == [
        ("archive", str(domain)),
        ("outbox", str(domain)),
        ("outbox", str(nobody)),
    ]
    assert [counts["erased"] for *_, counts in found] == [1, 1, 0]
    assert found[1][3]["ids"] == [str(id)]


async def test_page_by_page(conn: asyncpg.Connection, ann: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole outbox is read, and each page is told, for whoever waits (OBX-5)."""
    monkeypatch.setattr(holdfast.operator.retention, "_PAGE", 100)
    domain = uuid4()
    for _ in range(3):
        await rows(conn, "delivered", 10, 150)
        await rows(conn, "delivered", 10, 7, domain=domain)
    looked: list[int] = []
    assert (await ann.retention.preview_erasure(domain, on_page=looked.append)).outbox == 21
    assert (sum(looked), max(looked)) == (471, 100)
    looked.clear()
    assert (await ann.retention.erase(domain, on_page=looked.append)).outbox == 21
    assert sum(looked) == 471
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE payload IS NULL") == 21


async def test_what_is_erased_cannot_come_back(conn: asyncpg.Connection, ann: Operator) -> None:
    """Neither by a replay nor by a restore, from either table (OBX-5)."""
    domain = uuid4()
    (id,) = await rows(conn, "failed", 10, domain=domain)
    (number,) = await archived(conn, 10, domain=domain)
    await ann.retention.erase(domain)
    assert await conn.fetchval("SELECT core.outbox_replay($1, 0, 'ann')", id) == 0
    assert (await ann.archive.restore([number])).left == {"stripped": 1}
    assert (await ann.archive.replay([number])).left == {"stripped": 1}


@pytest.mark.parametrize("disposal", ["HARD_DELETE", "STRIP_PAYLOAD"])
async def test_retention_goes_on_with_what_is_left(conn: asyncpg.Connection, ann: Operator, disposal: str) -> None:
    """The policy is applied to an erased row when its time comes, once (OBX-5)."""
    await policy(conn, "outbox_row", 45, 7, disposal)
    domain = uuid4()
    await rows(conn, "failed", 100, domain=domain)
    await archived(conn, 100, domain=domain)
    await ann.retention.erase(domain)
    assert swept(await sweep(conn)) == {}, "it was set aside just now"
    await conn.execute(
        """UPDATE core.outbox SET deleted_at = now() - interval '8 days';
           UPDATE core.archive SET deleted_at = now() - interval '8 days'"""
    )
    assert swept(await sweep(conn)) == {"discarded": 1, "archive_tombstones": 1}
    assert swept(await sweep(conn)) == {}
    left = await conn.fetchval("SELECT (SELECT count(*) FROM core.outbox) + (SELECT count(*) FROM core.archive)")
    assert left == (0 if disposal == "HARD_DELETE" else 2)


@pytest.mark.parametrize("domain", ["", "alice", None, 7])
async def test_a_domain_is_an_id(ann: Operator, domain: object) -> None:
    """Refused before anything is read (OBX-5)."""
    for verb in (ann.retention.erase, ann.retention.preview_erasure):
        with pytest.raises(ConfigurationError, match="domain_id"):
            await verb(domain)  # type: ignore[arg-type]
