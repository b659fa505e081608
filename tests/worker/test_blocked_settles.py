"""A transaction that a producer leaves open keeps nothing from being settled but events with the keys it has taken."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.ids import uuid7
from holdfast.postgres.doctor import Limits, examine
from tests.logins import Logins
from tests.worker.support import Facts, publish_many, row, running, settled, until

pytestmark = pytest.mark.trust

PLAIN, TRANSACTIONAL, OTHER = "mail.confirm", "billing.charge", "other.handle"


def registry(runs: Counter[str]) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name=PLAIN, timeout=1.0)
    async def confirm(event: EventEnvelope) -> None:
        runs[PLAIN] += 1

    @registry.handler("order.paid", name=TRANSACTIONAL)
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        runs[TRANSACTIONAL] += 1

    @registry.handler("other.thing", name=OTHER)
    async def handle(event: EventEnvelope) -> None:
        runs[OTHER] += 1

    @registry.handler("other.paid", name="other.book")
    async def book(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        runs["other.book"] += 1

    return registry


@asynccontextmanager
async def holding(
    logins: Logins, handler: str, event_type: str, count: int = 1, source: str = "bank"
) -> AsyncIterator[list[UUID]]:
    """Another producer's events, whose inbox rows it has written in a transaction that it leaves open.

    With a source of many names each event has one of its own.
    """
    bank = await asyncpg.connect(logins.dsn_of(logins.names["bank"]), server_settings={"application_name": "bank app"})
    insert = """INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, available_at)
                VALUES ($1, $2, $3, '{}', $4, now() + interval '1 second')"""
    events = [(uuid7(), source.format(n), f"{source} {n}") for n in range(count)]
    enter = "SELECT core.reaction_enter($1, $2, $3, $4, interval '1 day')"
    try:
        await bank.executemany(insert, [(event, event_type, *others) for event, *others in events])
        transaction = bank.transaction()
        await transaction.start()
        for event in events:
            assert await bank.fetchval(enter, handler, *event)
        yield [event for event, *_ in events]
        if bank.is_in_transaction():
            await transaction.rollback()
    finally:
        await bank.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 60])
async def test_a_blocked_row_holds_up_no_other(dsn: str, conn: asyncpg.Connection, logins: Logins, count: int) -> None:
    """The others are settled at once; its own handler runs once, however long it takes (LSN-3, OPS-6)."""
    runs: Counter[str] = Counter()
    facts = Facts()
    async with running(dsn, registry(runs), facts, lease=1.0, poll_interval=0.2):
        async with holding(logins, PLAIN, "order.placed", count) as events:
            await until(lambda: runs[PLAIN] == count, what="the bank's events are handled")
            handled = time.monotonic()
            for _ in range(3):
                began = time.monotonic()
                others = await publish_many(conn, "other.thing", 300)
                await settled(conn, others[-1], within=4)
                await until(lambda: conn.fetchval(
                    "SELECT count(*) = 0 FROM core.outbox WHERE event_type = 'other.thing' AND settled_at IS NULL"
                ), within=4, what="everything else is settled")  # fmt: skip
                assert time.monotonic() - began < 4
            # Longer than a delivery that is merely late keeps its lease: the handler's time and two leases.
            await until(lambda: time.monotonic() - handled > 1.0 + 2 * 1.0 + 1.5)
            assert {(await row(conn, each))["status"] for each in events} == {"in_flight"}
            assert len(facts.notices("settle_blocked")) == 1
        for event in events:
            assert (await settled(conn, event))["attempts"] == 1
    assert runs == {PLAIN: count, OTHER: 900}
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled WHERE handler_name = $1", PLAIN) == count


async def test_a_worker_that_stops_settles_what_it_has_handled(
    dsn: str, conn: asyncpg.Connection, logins: Logins
) -> None:
    """Without the inbox row, which it cannot have, so that no other worker runs the handler again (LSN-3)."""
    runs: Counter[str] = Counter()
    async with holding(logins, PLAIN, "order.placed", 3) as events:
        async with running(dsn, registry(runs)):
            await until(lambda: runs[PLAIN] == 3)
        assert [(await row(conn, event))["status"] for event in events] == ["delivered"] * 3
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 0


async def test_blocked_transactional_handlers_leave_the_sessions_to_others(
    dsn: str, conn: asyncpg.Connection, logins: Logins
) -> None:
    """More of them than there are sessions; they count no attempt, and run when they can (LSN-3, OPS-6)."""
    runs: Counter[str] = Counter()
    async with running(dsn, registry(runs), connections=2, poll_interval=0.2):
        async with holding(logins, TRANSACTIONAL, "order.paid", 8) as events:
            waits = "SELECT count(*) FROM core.outbox WHERE event_type = 'order.paid' AND claimed_by IS NOT NULL"
            await until(lambda: conn.fetchval(waits), what="the first was tried")
            for _ in range(5):
                began = time.monotonic()
                (other,) = await publish_many(conn, "other.paid", 1)
                await settled(conn, other, within=3)
                assert time.monotonic() - began < 3
        for event in events:
            assert (await settled(conn, event))["attempts"] == 1
    assert runs == {TRANSACTIONAL: 8, "other.book": 5}


@pytest.mark.slow
async def test_a_blocked_transaction_holds_up_no_other_of_its_handler(
    dsn: str, conn: asyncpg.Connection, logins: Logins
) -> None:
    """It waits for the producer a moment, not seconds, and meanwhile its session is for others (LSN-3, OPS-6)."""
    runs: Counter[str] = Counter()
    async with running(dsn, registry(runs), connections=1, poll_interval=0.2):
        async with holding(logins, TRANSACTIONAL, "order.paid", 4):
            waits = "SELECT count(*) FROM core.outbox WHERE source = 'bank' AND claimed_by IS NOT NULL"
            await until(lambda: conn.fetchval(waits), what="the first was tried")
            own = await publish_many(conn, "order.paid", 5)
            for each in own:
                await settled(conn, each, within=4)
            assert runs == {TRANSACTIONAL: 5}
        await until(lambda: runs[TRANSACTIONAL] == 9, what="the bank's events, when it lets them")


@pytest.mark.slow
async def test_many_blocked_rows_hold_up_no_transactional_handler(
    dsn: str, conn: asyncpg.Connection, logins: Logins
) -> None:
    """The handler's other events run between them, whatever the sources are; it is reported once (LSN-3, OPS-6)."""
    runs: Counter[str] = Counter()
    facts = Facts()
    async with running(dsn, registry(runs), facts, connections=2, poll_interval=0.2):
        async with holding(logins, TRANSACTIONAL, "order.paid", 400, "bank{}") as events:
            waits = "SELECT count(*) FROM core.outbox WHERE event_type = 'order.paid' AND claimed_by IS NOT NULL"
            await until(lambda: conn.fetchval(waits), what="the first was tried")
            for _ in range(3):
                (other,) = await publish_many(conn, "order.paid", 1)
                await settled(conn, other)  # and not only when the four hundred were tried, one after the other
            await until(lambda: facts.notices("settle_blocked"), what="the handler is reported")
        for event in events:
            assert (await settled(conn, event))["attempts"] == 1
    assert runs == {TRANSACTIONAL: 403}
    assert [notice.details["handler_name"] for notice in facts.notices("settle_blocked")] == [TRANSACTIONAL]


async def test_blocked_rows_are_unsettled_within_bounds(dsn: str, conn: asyncpg.Connection, logins: Logins) -> None:
    """As many as others; past that the handled ones are settled without their inbox rows (LSN-16)."""
    handled, peak = 0, 0
    registry = HandlerRegistry()

    @registry.handler("order.placed", name=PLAIN)
    async def confirm(event: EventEnvelope) -> None:
        nonlocal handled, peak
        handled += 1
        peak = max(peak, handled - worker.counters.delivered)

    async with holding(logins, PLAIN, "order.placed", 600):
        async with running(dsn, registry, batch=100, concurrency=20) as worker:
            await until(lambda: handled == 600, what="all are handled")
            few = "SELECT count(*) = 20 FROM core.outbox WHERE status = 'in_flight'"
            await until(lambda: conn.fetchval(few), what="a few wait for their inbox rows")
        assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'in_flight'") == 0
    assert handled == 600
    assert peak <= 2 * 100 + 20


@pytest.mark.slow
async def test_blocked_rows_take_no_others_with_them(dsn: str, conn: asyncpg.Connection, logins: Logins) -> None:
    """Of the same batch, handler and neighbouring sources; those are settled with their inbox rows (LSN-3)."""
    runs: Counter[str] = Counter()
    unsettled = "SELECT count(*) = 0 FROM core.outbox WHERE source = 'shop' AND settled_at IS NULL"
    async with (
        holding(logins, PLAIN, "order.placed", 600, "sho{:05}") as left,
        holding(logins, PLAIN, "order.placed", 600, "shop{:05}") as right,
    ):
        async with running(dsn, registry(runs)):
            for count in range(20, 120, 20):
                await publish_many(conn, "order.placed", 20)
                await publish_many(conn, "other.thing", 20)
                await until(lambda: runs[OTHER] == count, what="the worker has the next")  # noqa: B023
            await until(lambda: runs[PLAIN] == 1300, what="all are handled")
            await until(lambda: conn.fetchval(unsettled), within=6, what="the shop's events are settled")
            recorded = "SELECT count(*) FROM core.event_handled WHERE source = 'shop'"
            assert await conn.fetchval(recorded) == 200
        open_rows = "SELECT count(*) FROM core.outbox WHERE id = ANY ($1) AND status <> 'delivered'"
        assert await conn.fetchval(open_rows, left + right) == 0
    assert runs == {PLAIN: 1300, OTHER: 100}


@pytest.mark.parametrize("event_type", ["order.placed", "order.paid"])
async def test_a_reaction_holds_no_row_that_is_deleted_with_its_delivery(
    dsn: str, conn: asyncpg.Connection, logins: Logins, event_type: str
) -> None:
    """A producer that has locked its event while the handler runs keeps neither the session nor the lease (LSN-3)."""
    await conn.execute("SELECT core.retention_set('ann', NULL, 'outbox_row', '*', 0, 0, 'HARD_DELETE')")
    begun, locked, handlers = asyncio.Event(), asyncio.Event(), HandlerRegistry()

    @handlers.handler("order.placed", name=PLAIN)
    async def confirm(event: EventEnvelope) -> None:
        begun.set()
        await locked.wait()

    @handlers.handler("order.paid", name=TRANSACTIONAL)
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        begun.set()
        await locked.wait()

    bank = await asyncpg.connect(logins.dsn_of(logins.names["bank"]))
    event = uuid7()
    envelope = {"event_id": str(event), "event_type": event_type, "event_version": 1, "source": "bank", "payload": {}}
    envelope |= {"occurred_at": "2026-01-01T00:00:00Z", "idempotency_key": "k"}
    insert = """INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key)
                VALUES ($1, $2, 'bank', '{}', 'k')"""
    settle = "SELECT core.reaction_settle($1, '{}', '{bank.react}', '{rejected}', '{no}', '{no}', false)"
    try:
        async with running(dsn, handlers, batch=1):
            await bank.execute(insert, event, event_type)
            await begun.wait()
            transaction = bank.transaction()
            await transaction.start()
            await bank.fetchval(settle, json.dumps(envelope))
            locked.set()
            await settled(conn, event, within=5)
            await transaction.rollback()
    finally:
        await bank.close()


async def test_doctor_names_the_session(dsn: str, conn: asyncpg.Connection, logins: Logins) -> None:
    """With its pid, its login, and since when (OPS-6)."""
    async with holding(logins, PLAIN, "order.placed"):
        report = await examine(conn, limits=Limits(blocked=timedelta(0)))
        pid = await conn.fetchval("SELECT pid FROM pg_stat_activity WHERE application_name = 'bank app'")
    (finding,) = [each for each in report.findings if each.code == "inbox-blocked"]
    assert finding.object == f"pid {pid}"
    assert f"login {logins.names['bank']}, application bank app, idle in transaction, since " in finding.evidence
    assert finding.remedy == f"SELECT pg_terminate_backend({pid});"
    assert not [each for each in (await examine(conn)).findings if each.code == "inbox-blocked"]
