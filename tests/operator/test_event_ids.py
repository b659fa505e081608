"""The id of an event from an alert: every verb takes it, wherever the dead letters are, or says why nothing moved."""

from __future__ import annotations

from uuid import UUID, uuid4

import asyncpg
import pytest

from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Selection
from tests.operator.support import ACTOR, subscribe

pytestmark = pytest.mark.newcomer

PUBLISHED = """
INSERT INTO core.outbox (id, event_type, source, payload, handler_name, status, settled_at, delivered_at)
VALUES ($1, 'order.placed', 'shop', '{}', '*', 'delivered', now(), now())
"""
DELIVERY = """
INSERT INTO core.outbox (id, origin_id, event_type, source, payload, idempotency_key, handler_name, status, attempts,
                         last_error, error_signature, failure_reason, first_failed_at, failed_at, settled_at,
                         delivered_at)
SELECT core.sibling_id($1, $2, core.secret()), $1, 'order.placed', 'shop', '{"n": 1}', $1::text, $2, $3, 5,
       e.error, e.signature, CASE WHEN $3 = 'failed' THEN 'retry_terminal' END, e.failed, e.failed,
       CASE WHEN $3 <> 'pending' THEN now() END, CASE WHEN $3 = 'delivered' THEN now() END
FROM (SELECT CASE WHEN $3 = 'failed' THEN 'ValueError: no price' END AS error,
             CASE WHEN $3 = 'failed' THEN 'ValueError-1' END AS signature,
             CASE WHEN $3 = 'failed' THEN now() END AS failed) e
RETURNING id
"""
ARCHIVE = """
WITH gone AS (DELETE FROM core.outbox WHERE id = $1 RETURNING *)
INSERT INTO core.archive (original_id, queue, payload, headers, deliveries_count, created_at, failed_at, failure_reason,
                          last_exception, event_type, event_version, occurred_at, source, target, content_class,
                          channel, generation, domain_id, idempotency_key, trace_context, origin_id, priority,
                          ordering_key, dedupe_key, expires_at, first_failed_at, error_signature, failure_history,
                          traceback)
SELECT id, handler_name, payload, headers, attempts, created_at, failed_at, failure_reason, last_error, event_type,
       event_version, occurred_at, source, target, content_class, channel, generation, domain_id, idempotency_key,
       trace_context, origin_id, priority, ordering_key, dedupe_key, expires_at, first_failed_at, error_signature,
       failure_history, E'raised at app.py:7 in charge\n...' FROM gone
"""


async def published(conn: asyncpg.Connection, **handlers: str) -> UUID:
    """An event that was split: each handler, `a_b` for `a.b`, with the state of its delivery."""
    event = await conn.fetchval("SELECT core.uuid7()")
    await conn.execute(PUBLISHED, event)
    for name, state in handlers.items():
        handler = name.replace("_", ".")
        await subscribe(conn, handler)
        row = await conn.fetchval(DELIVERY, event, handler, "failed" if state == "archived" else state)
        if state == "archived":
            await conn.execute(ARCHIVE, row)
    return UUID(str(event))


async def states(conn: asyncpg.Connection, event: UUID) -> dict[str, str]:
    """Each handler with the state of its delivery."""
    rows = await conn.fetch("SELECT handler_name, state FROM core.deliveries_of($1)", [event])
    return {row["handler_name"]: row["state"] for row in rows}


async def replayed(conn: asyncpg.Connection, id: UUID) -> tuple[int, str]:
    """What core.outbox_replay answers in psql: the number, and its notice."""
    notices: list[str] = []

    def listen(_: object, message: asyncpg.PostgresLogMessage) -> None:
        notices.append(str(message))

    conn.add_log_listener(listen)
    try:
        return await conn.fetchval("SELECT core.outbox_replay($1, 0, 'sql-direct')", id), " ".join(notices)
    finally:
        conn.remove_log_listener(listen)


async def test_the_sql_function_replays_every_dead_letter_of_an_event(conn: asyncpg.Connection) -> None:
    """In the outbox and in the archive, and no other delivery (DLQ-8)."""
    event = await published(conn, billing_charge="failed", mail_thank="archived", stock_book="delivered")
    other = await published(conn, billing_charge="failed", mail_thank="archived")
    assert await replayed(conn, event) == (2, "")
    assert await states(conn, event) == {
        "billing.charge": "pending",
        "mail.thank": "pending",
        "stock.book": "delivered",
    }
    assert await states(conn, other) == {"billing.charge": "failed", "mail.thank": "archived"}
    kept = await conn.fetchval(
        "SELECT failure_history->0->>'last_error' FROM core.outbox WHERE handler_name = 'mail.thank'"
    )
    assert kept == "ValueError: no price"
    place = "SELECT failure_history->0->>'raised_at' FROM core.outbox WHERE handler_name = 'mail.thank'"
    assert await conn.fetchval(place) == "app.py:7 in charge"


async def test_the_sql_function_takes_one_delivery(conn: asyncpg.Connection) -> None:
    """A row's own id is that row, also in the archive (DLQ-8)."""
    event = await published(conn, billing_charge="failed", mail_thank="archived")
    row = await conn.fetchval("SELECT original_id FROM core.archive")
    assert await replayed(conn, row) == (1, "")
    assert await states(conn, event) == {"billing.charge": "failed", "mail.thank": "pending"}


async def test_the_sql_function_says_why_nothing_moved(conn: asyncpg.Connection) -> None:
    """In a notice, which psql shows; the answer stays a number (DLQ-8)."""
    event = await published(conn, billing_charge="delivered", mail_thank="pending")
    count, notice = await replayed(conn, event)
    assert count == 0
    assert (
        "nothing was replayed: the delivery to billing.charge is delivered; the delivery to mail.thank is pending"
        in notice
    )
    unknown = uuid4()
    count, notice = await replayed(conn, unknown)
    assert (count, f"no event and no delivery has the id {unknown}" in notice) == (0, True)
    archived = await published(conn, billing_charge="archived")
    await conn.execute("SELECT core.archive_discard(ARRAY(SELECT id FROM core.archive), false, 'ann')")
    count, notice = await replayed(conn, archived)
    assert (count, "billing.charge is discarded" in notice) == (0, True)


async def test_a_dead_letter_beside_the_published_row(conn: asyncpg.Connection, dsn: str) -> None:
    """An event that one handler took as it was published, and for which another one has failed (DLQ-8)."""
    event = await published(conn, billing_charge="failed")
    await conn.execute("UPDATE core.outbox SET handler_name = 'mail.thank' WHERE id = $1", event)
    assert await replayed(conn, event) == (1, "")
    assert await states(conn, event) == {"billing.charge": "pending", "mail.thank": "delivered"}
    async with Operator(dsn, actor=ACTOR) as operator:
        done = await operator.failed.replay([event])
    assert (done.moved, done.left) == ([], {"pending": 1, "delivered": 1})


@pytest.mark.parametrize("verbs", ["failed", "archive"])
async def test_both_groups_of_verbs_find_both(conn: asyncpg.Connection, dsn: str, verbs: str) -> None:
    """Discard, restore and replay by the event's id (DLQ-8)."""
    event = await published(conn, billing_charge="failed", mail_thank="archived", stock_book="delivered")
    async with Operator(dsn, actor=ACTOR) as operator:
        chosen = operator.failed if verbs == "failed" else operator.archive
        assert (await chosen.discard([str(event)])).count == 2
        assert await states(conn, event) == {
            "billing.charge": "discarded", "mail.thank": "discarded", "stock.book": "delivered"
        }  # fmt: skip
        again = await chosen.discard([event])
        assert (again.count, again.left) == (0, {"discarded": 2})
        assert (await chosen.replay([event])).left == {"discarded": 2}
        assert (await chosen.restore([event])).count == 2
        assert (await chosen.replay([event], dry_run=True)).count == 2
        assert (await chosen.replay([event])).count == 2
        assert await states(conn, event) == {
            "billing.charge": "pending", "mail.thank": "pending", "stock.book": "delivered"
        }  # fmt: skip
        left = (await chosen.replay([event])).left
        assert left == {"pending": 2, "delivered": 1}
        with pytest.raises(ConfigurationError, match="no event and no delivery has"):
            await chosen.replay([uuid4()])


async def test_an_archived_dead_letter_is_corrected(conn: asyncpg.Connection, dsn: str) -> None:
    """It comes back, is discarded for good, and another event takes its place (DLQ-8)."""
    event = await published(conn, billing_charge="archived")
    async with Operator(dsn, actor=ACTOR) as operator:
        done = await operator.failed.edit(event, {"n": 2})
    assert done.handler_name == "billing.charge"
    assert await states(conn, event) == {"billing.charge": "edited"}
    assert await conn.fetchval("SELECT count(*) FROM core.archive") == 0
    assert await conn.fetchval("SELECT payload::text FROM core.outbox WHERE id = $1", done.new_id) == '{"n": 2}'


async def test_an_event_shows_its_archived_deliveries(conn: asyncpg.Connection, dsn: str) -> None:
    """By its own id and by that of each delivery; also when nothing of it is left in the outbox (DLQ-8)."""
    event = await published(conn, billing_charge="failed", mail_thank="archived")
    number, row = await conn.fetchrow("SELECT id, original_id FROM core.archive")
    async with Operator(dsn, actor=ACTOR) as operator:
        for id in (event, row):
            found = await operator.events.detail(id, payload=True)
            assert found.event_id == event
            assert {d.handler_name: d.archive_id for d in found.deliveries} == {
                "*": None, "billing.charge": None, "mail.thank": number
            }  # fmt: skip
        await conn.execute("DELETE FROM core.outbox")
        found = await operator.events.detail(event, payload=True)
        assert ([d.handler_name for d in found.deliveries], found.payload) == (["mail.thank"], {"n": 1})
        cancelled = await operator.events.cancel(event)
        assert (cancelled.moved, cancelled.left) == ([], {"archived": 1})


async def test_plans_select_in_the_archive(conn: asyncpg.Connection, dsn: str) -> None:
    """By ids and by a filter; a dry run takes no number (DLQ-8)."""
    first = await published(conn, billing_charge="archived", mail_thank="archived")
    second = await published(conn, billing_charge="archived")
    async with Operator(dsn, actor=ACTOR) as operator:
        wanted = Selection(handler="billing.charge", archived=True)
        dry = await operator.plans.create(wanted, dry_run=True)
        assert (dry.plan.id, dry.plan.total, dry.preview.lines[0].not_failed) == (0, 2, 0)
        made = await operator.plans.create(wanted, patience=1, canary=0, rate=1000)
        assert (made.plan.id, made.plan.total, made.plan.selection) == (
            1, 2, {"handler": "billing.charge", "archived": True}
        )  # fmt: skip
        by_id = await operator.plans.create(ids=[first], generation=0, patience=1, canary=0, rate=1000)
        assert (by_id.plan.id, by_id.plan.total) == (2, 2)
        await operator.plans.run(2)
        assert await states(conn, first) == {"billing.charge": "pending", "mail.thank": "pending"}
        assert await states(conn, second) == {"billing.charge": "archived"}
        with pytest.raises(ConfigurationError, match="holdfast archive groups"):
            await operator.plans.create(Selection(handler="stock.book", archived=True))


async def test_cancelling_by_the_event_in_sql(conn: asyncpg.Connection) -> None:
    """Every open delivery of an event that was split (DLQ-8)."""
    event = await published(conn, billing_charge="pending", mail_thank="pending", stock_book="delivered")
    assert await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann')", event) == 2
    assert await states(conn, event) == {
        "billing.charge": "cancelled", "mail.thank": "cancelled", "stock.book": "delivered"
    }  # fmt: skip
    assert await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann')", event) == 0
