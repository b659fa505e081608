"""Retention: tombstones, then disposal, of what was kept long enough and of nothing else (OBX-5, E7)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import UUID, uuid4

import asyncpg
import pytest

import holdfast.postgres.operations.retention
import holdfast.postgres.retention
from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, RetryPolicy, Worker, WorkerSettings
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator
from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import MOST_IN_BATCH, BatchSize, Sweep, acquire_sweep, policies
from holdfast.retention import DEFAULT_POLICIES, Disposal, RetentionPolicy
from holdfast.worker import maintenance, sweeper
from tests.operator.kept import age, archived, ids, policy, row, rows, sweep, swept
from tests.worker.support import Facts, drained, publish, publish_many, running, settled, until

ANN = "ann@example.org"
QUERIES = Queries("core")
EVENT, HANDLER = "order.placed", "billing.charge_card"


@pytest.fixture
async def other(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


@pytest.fixture
async def ann(dsn: str) -> AsyncIterator[Operator]:
    async with Operator(dsn, actor=ANN) as operator:
        yield operator


# --- the policies ---


async def test_a_new_schema_has_the_default_policies(conn: asyncpg.Connection) -> None:
    """Outbox 45 + 7, event_handled 60 + 7; the archive and failed rows are kept until somebody resolves them
    (OBX-5).
    """
    assert await policies(conn, QUERIES) == dict(DEFAULT_POLICIES)


async def test_policies_are_set_and_audited(conn: asyncpg.Connection, ann: Operator) -> None:
    """Keyed by entity and content class; who changed what is written down (OBX-5)."""
    wanted = RetentionPolicy(30, 1, Disposal.STRIP_PAYLOAD)
    registry = await ann.retention.set_policy("outbox_row", "billing", wanted, reason="the law")
    assert registry["outbox_row", "billing"] == wanted
    await ann.retention.set_policy("outbox_row", "billing", None)
    assert await policies(conn, QUERIES) == dict(DEFAULT_POLICIES)
    lines = await conn.fetch("SELECT * FROM core.audit ORDER BY id")
    assert [(each["actor"], each["action"], each["reason"]) for each in lines] == [
        (ANN, "retention.set", "the law"),
        (ANN, "retention.set", None),
    ]
    assert json.loads(lines[1]["arguments"])["before"]["active_ttl_days"] == 30


REFUSED = [
    ("outbox_row", "*", RetentionPolicy(53, 7), "61 or more"),
    ("archive_row", "*", RetentionPolicy(60, 0), "61 or more"),
    ("failed_row", "billing", RetentionPolicy(30, 30), "61 or more"),
    ("event_handled", "*", RetentionPolicy(52, 30), "53 or more"),
    ("event_handled", "billing", RetentionPolicy(90, 0), "use '\\*'"),
    ("event_handled", "*", RetentionPolicy(90, 0, Disposal.STRIP_PAYLOAD), "HARD_DELETE"),
    ("outbox_row", "*", None, "no policy for 'outbox_row'"),
    ("event_handled", "*", None, "no policy for 'event_handled'"),
    ("invoices", "*", RetentionPolicy(1, 1), "outbox_row, failed_row"),
    ("outbox_row", "", RetentionPolicy(1, 1), "name a class"),
]


@pytest.mark.parametrize(("entity", "content_class", "wanted", "message"), REFUSED)
async def test_a_wrong_policy_is_refused(
    conn: asyncpg.Connection,
    ann: Operator,
    entity: str,
    content_class: str,
    wanted: RetentionPolicy | None,
    message: str,
) -> None:
    """By the library with the field and the remedy, and by the database whoever asks; nothing is changed (OBX-5)."""
    with pytest.raises(ConfigurationError, match=message):
        await ann.retention.set_policy(entity, content_class, wanted)
    values = (None, None, None) if wanted is None else (*_days(wanted), wanted.disposal.value)
    with pytest.raises(asyncpg.PostgresError):
        await conn.execute("SELECT core.retention_set('ann', NULL, $1, $2, $3, $4, $5)", entity, content_class, *values)
    assert await policies(conn, QUERIES) == dict(DEFAULT_POLICIES)


def _days(wanted: RetentionPolicy) -> tuple[int, int]:
    return wanted.active_ttl_days, wanted.tombstoned_grace_days


WRONG = {
    "retention.event_handled.active_ttl_days": (
        "UPDATE core.retention_policies SET active_ttl_days = 52 WHERE entity = 'event_handled'"
    ),
    "retention has no policy for 'outbox_row'": "DELETE FROM core.retention_policies WHERE entity = 'outbox_row'",
}


@pytest.mark.parametrize("field", WRONG)
async def test_a_worker_refuses_a_wrong_configuration_at_its_start(
    dsn: str, conn: asyncpg.Connection, field: str
) -> None:
    """Whoever wrote it into the table, and also for a worker that does not sweep (OBX-5)."""
    await conn.execute(WRONG[field])
    registry = HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER)
    async def charge(event: EventEnvelope) -> None: ...

    for settings in (WorkerSettings(), WorkerSettings(sweep=False)):
        with pytest.raises(ConfigurationError, match=field):
            await Worker(dsn, registry, settings, observers=()).drain()


# --- what goes, and what stays ---


async def test_first_a_tombstone_then_the_disposal(conn: asyncpg.Connection) -> None:
    """45 days from settlement a row is tombstoned, and 7 days later it is gone (OBX-5)."""
    (id,) = await rows(conn, "delivered", 44.9)
    assert swept(await sweep(conn)) == {}
    await age(conn, 0.2)
    assert swept(await sweep(conn)) == {"delivered": 1}
    found = await row(conn, id)
    assert (found["status"], found["deleted_at"] is not None, found["payload"] is not None) == ("delivered", True, True)
    await age(conn, 6.9)
    assert swept(await sweep(conn)) == {}
    await age(conn, 0.2)
    assert swept(await sweep(conn)) == {"tombstones": 1}
    assert await ids(conn) == set()


async def test_the_age_runs_from_settlement(conn: asyncpg.Connection) -> None:
    """An event that waited for years and was delivered yesterday is a day old (OBX-5)."""
    (id,) = await rows(conn, "delivered", 1)
    await conn.execute("UPDATE core.outbox SET created_at = now() - interval '900 days', occurred_at = created_at")
    await sweep(conn)
    assert (await row(conn, id))["deleted_at"] is None


LEFT = {
    "STRIP_PAYLOAD": {"payload", "headers"},
    "RETAIN_METADATA": {
        "payload", "headers", "domain_id", "trace_context", "idempotency_key", "last_error", "error_signature",
        "failure_history", "claimed_by",
    },
}  # fmt: skip


@pytest.mark.parametrize("disposal", LEFT)
@pytest.mark.parametrize("state", ["tombstone", "discarded"])
async def test_what_a_disposal_leaves(conn: asyncpg.Connection, disposal: str, state: str) -> None:
    """STRIP_PAYLOAD nulls payload and headers; RETAIN_METADATA keeps id, type, times, outcome. Each once (OBX-5)."""
    await policy(conn, "outbox_row", 45, 7, disposal)
    (id,) = await rows(conn, state, 60, domain=uuid4(), deleted=8)
    before = dict(await row(conn, id))
    assert sum(swept(await sweep(conn)).values()) == 1
    after = dict(await row(conn, id))
    assert after.pop("disposed_at") is not None
    before.pop("disposed_at")
    # What a delivered row never had cannot change.
    expected = {name for name in LEFT[disposal] if before[name] not in (None, "[]")}
    assert {name for name, value in after.items() if value != before[name]} == expected
    assert (after["payload"], after["headers"]) == (None, None)
    if disposal == "RETAIN_METADATA":
        assert after["idempotency_key"] == str(id)
        assert "x411" not in repr(after)
    await age(conn, 400)
    assert swept(await sweep(conn)) == {}, "what is left is left"


async def test_a_class_has_its_own_policy(conn: asyncpg.Connection) -> None:
    """Keyed (entity, content_class): shorter, longer and other disposals beside each other (OBX-5)."""
    await policy(conn, "outbox_row", 10, 0, content_class="brief")
    await policy(conn, "outbox_row", 50, 5, "RETAIN_METADATA", content_class="legal")
    _brief, plain, legal = [
        (await rows(conn, "delivered", 48, content_class=name))[0] for name in ("brief", "x", "legal")
    ]
    assert swept(await sweep(conn)) == {"delivered": 2, "tombstones": 1}
    assert await ids(conn) == {plain, legal}
    assert await ids(conn, "deleted_at IS NULL") == {legal}
    await age(conn, 8)
    assert swept(await sweep(conn)) == {"delivered": 1, "tombstones": 1}
    await age(conn, 6)
    assert swept(await sweep(conn)) == {"tombstones": 1}
    assert [(await row(conn, legal))["payload"], await ids(conn)] == [None, {legal}]


async def test_a_failed_row_is_kept_unless_asked(conn: asyncpg.Connection) -> None:
    """Until an operator resolves it, however old it is; with a policy for failed_row it goes like others (E7,
    OBX-5).
    """
    old, young = (await rows(conn, "failed", 800))[0], (await rows(conn, "failed", 20))[0]
    other = (await rows(conn, "failed", 800, content_class="billing"))[0]
    assert swept(await sweep(conn)) == {}
    await policy(conn, "failed_row", 30, 7, content_class="operations")
    assert swept(await sweep(conn)) == {"failed": 1}
    assert await ids(conn, "deleted_at IS NULL") == {young, other}
    assert (await row(conn, old))["payload"] is not None, "it can be restored for 7 days"
    await age(conn, 7.1)
    assert swept(await sweep(conn)) == {"discarded": 1}
    await policy(conn, "failed_row", 30, 7)
    assert swept(await sweep(conn)) == {"failed": 1}
    assert await ids(conn) == {young, other}
    assert await ids(conn, "deleted_at IS NULL") == {young}


@pytest.mark.parametrize("state", ["discarded", "cancelled"])
async def test_what_was_set_aside_is_not_swept_early(conn: asyncpg.Connection, state: str) -> None:
    """It lives its 45 + 7 days from settlement, and its grace from the day it was set aside (OBX-5, DLQ-4)."""
    await rows(conn, state, 51.9, deleted=51.9)
    late = (await rows(conn, state, 300, deleted=6.9))[0]
    assert await conn.fetch("SELECT * FROM core.retention_due('discarded', 'operations', '-infinity', 10)") == []
    assert swept(await sweep(conn)) == {}
    await age(conn, 0.2)
    assert swept(await sweep(conn)) == {"discarded": 2}
    assert late not in await ids(conn)


async def test_the_archive_is_swept_by_its_own_policy(conn: asyncpg.Connection) -> None:
    """Kept until resolved; discarded rows go like the outbox's; with a policy all go by that (DLQ-2, OBX-5)."""
    live = await archived(conn, 300)
    await archived(conn, 60, deleted=8)
    kept = await archived(conn, 60, deleted=6)
    assert swept(await sweep(conn)) == {"archive_tombstones": 1}
    assert [each["id"] for each in await conn.fetch("SELECT id FROM core.archive ORDER BY id")] == [*live, *kept]
    await policy(conn, "archive_row", 30, 20, "STRIP_PAYLOAD")
    assert swept(await sweep(conn)) == {"archived": 1}
    await age(conn, 21)
    assert swept(await sweep(conn)) == {"archive_tombstones": 2}
    left = await conn.fetch("SELECT * FROM core.archive")
    assert {(each["payload"], each["headers"], each["last_exception"]) for each in left} == {
        (None, None, "card x411 declined")
    }
    assert swept(await sweep(conn)) == {}


@pytest.mark.parametrize("disposal", ["HARD_DELETE", "RETAIN_METADATA"])
async def test_the_disposals_of_the_archive(conn: asyncpg.Connection, disposal: str) -> None:
    """DLQ-2, OBX-5."""
    await policy(conn, "archive_row", 30, 7, disposal)
    await archived(conn, 60, domain=uuid4(), deleted=8)
    assert swept(await sweep(conn)) == {"archive_tombstones": 1}
    left = await conn.fetch("SELECT * FROM core.archive")
    assert len(left) == (disposal != "HARD_DELETE")
    assert "x411" not in repr(left)
    for each in left:
        assert (each["idempotency_key"], each["domain_id"]) == (str(each["original_id"]), None)
        assert (each["event_type"], each["failure_reason"], each["deliveries_count"]) == (EVENT, "retry_terminal", 5)


async def test_the_inbox_forgets_last(conn: asyncpg.Connection) -> None:
    """60 + 7 days, with nothing in between: until it is gone it counts (OBX-5)."""
    for days in (66.9, 67.1, 0):
        await conn.execute(
            "INSERT INTO core.event_handled VALUES ($1, 'k', now() - $2 * interval '24 hours', 'shop')",
            f"h.{days}",
            days,
        )
    assert swept(await sweep(conn)) == {"inbox": 1}
    left = {each["handler_name"] for each in await conn.fetch("SELECT handler_name FROM core.event_handled")}
    assert left == {"h.66.9", "h.0"}


async def test_workers_read_the_inbox_in_parts(conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass reads a share of it and the next one goes on there, until all of it was read; then from the top
    (OBX-5).
    """
    monkeypatch.setattr(holdfast.postgres.retention, "_PAGES", 4)
    monkeypatch.setattr(holdfast.postgres.retention, "_PASSES_A_DAY", 3)
    await conn.execute(
        """INSERT INTO core.event_handled SELECT 'a.b', lpad(n::text, 100, '0'), now() - CASE n % 2
               WHEN 0 THEN interval '68 days' ELSE interval '66 days' END, 's' FROM generate_series(1, 3000) n"""
    )
    size = await conn.fetchval("SELECT pg_relation_size('core.event_handled') / 8192")
    assert size > 30
    page, taken, passes = 0, 0, 0
    while True:
        passing = Sweep(QUERIES, inbox_page=page)
        while await passing.next(conn) is not None:
            pass
        assert passing.counts["inbox"] < 1500, "one pass is not enough"
        page, taken, passes = passing.inbox_page, taken + passing.counts["inbox"], passes + 1
        if page == 0:
            break
    assert (taken, passes) == (1500, 3)
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 1500


async def test_an_inbox_larger_than_a_batch(conn: asyncpg.Connection) -> None:
    """Nothing is passed over when a batch ends in the middle of a page (OBX-5, E7)."""
    await conn.execute(
        """INSERT INTO core.event_handled
           SELECT 'a.b', n::text, now() - interval '68 days', 'shop' FROM generate_series(1, 12000) n"""
    )
    batches = await sweep(conn)
    assert swept(batches) == {"inbox": 12_000}
    assert max(batch.swept for batch in batches) <= MOST_IN_BATCH
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 0


async def test_keys_are_freed_when_no_event_needs_them(conn: asyncpg.Connection) -> None:
    """Of events that are delivered, discarded or gone; an open event or a dead letter keeps its key (PUB-2, OBX-5)."""
    kept = {state: (await rows(conn, state, 1))[0] for state in ("pending", "in_flight", "future", "failed")}
    freed = {state: (await rows(conn, state, 1))[0] for state in ("delivered", "discarded", "cancelled", "tombstone")}
    for state, id in ({**kept, **freed, "gone": uuid4()}).items():
        await conn.execute("INSERT INTO core.outbox_keys VALUES ('shop', $1, $2)", state, id)
    assert swept(await sweep(conn)) == {"keys": 5}
    left = {each["dedupe_key"] for each in await conn.fetch("SELECT dedupe_key FROM core.outbox_keys")}
    assert left == set(kept)


async def test_a_key_that_changes_hands_is_not_freed(conn: asyncpg.Connection, other: asyncpg.Connection) -> None:
    """A producer that takes a settled event's key over at this moment keeps it (PUB-2)."""
    shop = Publisher("shop")
    async with conn.transaction():
        await shop.publish(conn, EVENT, {}, key="k")
    await conn.execute("UPDATE core.outbox SET status = 'delivered', settled_at = now(), delivered_at = now()")
    transaction = other.transaction()
    await transaction.start()
    await shop.publish(other, EVENT, {"second": True}, key="k", delay=3600)
    assert swept(await sweep(conn)) == {}, "its row is locked: it is passed over"
    await transaction.commit()
    assert swept(await sweep(conn)) == {}
    async with conn.transaction():
        assert await shop.cancel(conn, "k")


PLAN = """
INSERT INTO core.plans (created_by, selection, generation, canary, rate, max_failure_ratio, patience, state,
                        finished_at)
VALUES ('ann', '{}', 0, 1, 1, 0.5, '1 minute', $1, CASE WHEN $1 IN ('done', 'cancelled') THEN now() END) RETURNING id
"""


@pytest.mark.parametrize(("state", "held"), [("open", True), ("stopped", True), ("done", False)])
async def test_rows_of_an_unfinished_plan_are_kept(conn: asyncpg.Connection, state: str, held: bool) -> None:
    """Whatever their age and state, until the plan is finished (DLQ-4, OBX-5)."""
    await policy(conn, "failed_row", 45, 7)
    found = [
        (await rows(conn, each, 100, deleted=100))[0] for each in ("delivered", "tombstone", "failed", "discarded")
    ]
    plan = await conn.fetchval(PLAN, state)
    for position, id in enumerate(found):
        await conn.execute(
            "INSERT INTO core.plan_rows (plan_id, row_id, position) VALUES ($1, $2, $3)", plan, id, position
        )
    assert sum(swept(await sweep(conn)).values()) == (0 if held else 4)


# --- many rows ---

DONE, BESIDE = 60_000, 8_000


@pytest.mark.slow
async def test_only_what_is_done_and_past_its_age_goes(conn: asyncpg.Connection) -> None:
    """Beside failed, in flight, pending and future-dated rows of any age; in batches of 5,000 rows at most, which
    take less than 200 ms each (E7).
    """
    await conn.execute("SET session_replication_role = replica")  # the bell has no part in this
    gone = set(await rows(conn, "tombstone", 60, DONE // 2, deleted=8))
    marked = set(await rows(conn, "delivered", 46, DONE // 2))
    for state in ("failed", "in_flight", "pending", "future"):
        await rows(conn, state, 400, BESIDE // 4)
    await rows(conn, "delivered", 44, BESIDE)
    await rows(conn, "tombstone", 51, BESIDE, deleted=6)
    before = await ids(conn)
    batches = await sweep(conn)
    assert swept(batches) == {"delivered": DONE // 2, "tombstones": DONE // 2}
    assert max(batch.swept for batch in batches) <= MOST_IN_BATCH
    # The first of them find an empty cache; the promise is about what a batch costs, not about the machine's
    # worst moment: nine of ten.
    durations = sorted(batch.seconds for batch in batches if batch.swept)
    assert durations[int(len(durations) * 0.9)] < 0.2, durations
    assert await ids(conn) == before - gone
    assert await ids(conn, "deleted_at IS NOT NULL AND settled_at < now() - interval '44 days 12 hours'") >= marked
    untouched = "status IN ('failed', 'in_flight', 'pending') AND deleted_at IS NULL AND payload IS NOT NULL"
    assert len(await ids(conn, untouched)) == BESIDE


NOBODY_ANALYZES = """SELECT count(*) = 0 FROM pg_stat_activity
    WHERE backend_type = 'autovacuum worker' AND datname = current_database()"""


async def pages(conn: asyncpg.Connection, sql: str, *values: object) -> int:
    """How many pages a statement looks at, once the catalogue is known and dead rows are gone.

    The server's own ANALYZE of a table holds a snapshot for a moment, and nothing dead goes away beside it.
    """
    await conn.fetch(sql, *values)
    await until(lambda: conn.fetchval(NOBODY_ANALYZES), what="no ANALYZE of the server's own")
    await conn.execute("VACUUM core.outbox")
    (plan,) = await conn.fetch(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", *values)
    node = json.loads(plan[0])[0]["Plan"]
    return int(node["Shared Hit Blocks"] + node["Shared Read Blocks"])


STEPS_WITH_ROWS = ["delivered", "tombstones", "discarded", "archived", "archive_tombstones", "inbox"]


@pytest.mark.slow
async def test_a_sweep_does_not_read_what_has_to_stay(conn: asyncpg.Connection) -> None:
    """Kept classes, tombstones in their grace, failed rows and what was stripped long ago lie beside what is
    due, and not before it (E7, OBX-5).
    """
    await conn.execute("SET session_replication_role = replica")
    await policy(conn, "outbox_row", 50, 1, "RETAIN_METADATA", content_class="audit")
    await policy(conn, "archive_row", 40, 1)
    await rows(conn, "delivered", 49, 10_000, content_class="audit")
    await rows(conn, "failed", 300, 10_000)
    await rows(conn, "cancelled", 40, 10_000, deleted=40)
    await rows(conn, "tombstone", 51, 10_000, deleted=5)
    await rows(conn, "delivered", 30, 10_000)
    await conn.execute(
        """UPDATE core.outbox SET disposed_at = now(), payload = NULL WHERE id IN (
               SELECT id FROM core.outbox WHERE deleted_at IS NOT NULL AND status = 'failed' LIMIT 5000)"""
    )
    await archived(conn, 30, 10_000)
    await conn.execute(
        "INSERT INTO core.event_handled SELECT 'a.b', n::text, now(), 'shop' FROM generate_series(1, 10000) n"
    )
    for step in STEPS_WITH_ROWS:
        for content_class in ("operations", "audit"):
            looked = await pages(
                conn, "SELECT * FROM core.retention_due($1, $2, '-infinity', 5000)", step, content_class
            )
            assert looked < 200, (step, content_class)
        assert await pages(conn, "SELECT core.retention_classes($1)", step) < 200, step
    assert swept(await sweep(conn)) == {}


async def test_batches_keep_to_their_time() -> None:
    """They grow while they are quick, shrink when they are slow, and never pass 5,000 rows (E7)."""
    batch_size = BatchSize()
    for _ in range(20):
        batch_size.took(0.001)
    assert batch_size.rows == MOST_IN_BATCH
    batch_size.took(0.4)
    assert 100 <= (slower := batch_size.rows) <= MOST_IN_BATCH // 2
    batch_size.failed()
    assert batch_size.rows == slower // 4
    for _ in range(20):
        batch_size.failed()
    assert batch_size.rows == 50


async def test_a_caller_cannot_ask_for_more_than_5000(conn: asyncpg.Connection) -> None:
    """Whatever the limit that it names (E7)."""
    await conn.execute("SET session_replication_role = replica")
    await rows(conn, "delivered", 46, 5_200)
    found = await conn.fetchrow("SELECT * FROM core.retention_sweep('delivered', 'operations', '-infinity', 1000000)")
    assert (found["swept"], found["more"]) == (5_000, True)


# --- several at once ---


async def test_two_sweepers_at_once(conn: asyncpg.Connection, other: asyncpg.Connection) -> None:
    """Neither waits for the other, each row is taken once, and nothing that has to stay goes (OBX-5, B12)."""
    await conn.execute("SET session_replication_role = replica")
    await rows(conn, "delivered", 46, 6_000)
    await rows(conn, "tombstone", 60, 6_000, deleted=8)
    await rows(conn, "failed", 60, 500)
    one, two = await asyncio.gather(sweep(conn), sweep(other))
    rest = await sweep(conn)  # what one had locked while the other passed
    total = [swept(each) for each in (one, two, rest)]
    for step in ("delivered", "tombstones"):
        assert sum(each.get(step, 0) for each in total) == 6_000
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 6_500
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE deleted_at IS NULL") == 500


async def test_what_is_locked_is_passed_over(conn: asyncpg.Connection, other: asyncpg.Connection) -> None:
    """An operator who holds a row makes no sweep wait; the next one takes it (B12)."""
    held, free = (await rows(conn, "tombstone", 60, deleted=8))[0], (await rows(conn, "tombstone", 60, deleted=8))[0]
    async with other.transaction():
        await other.execute("SELECT FROM core.outbox WHERE id = $1 FOR UPDATE", held)
        async with asyncio.timeout(5):
            assert swept(await sweep(conn)) == {"tombstones": 1}
    assert free not in await ids(conn)
    assert swept(await sweep(conn)) == {"tombstones": 1}


PAUSE = """
CREATE OR REPLACE FUNCTION core.is_in_replay_plan(p_id uuid) RETURNS boolean LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(77); RETURN false; END $$
"""


async def test_what_was_restored_in_between_stays(conn: asyncpg.Connection, other: asyncpg.Connection) -> None:
    """Found as due, restored by an operator while the sweep is still looking, and left alone by it (DLQ-4)."""
    await rows(conn, "discarded", 60, deleted=8)
    await conn.fetchval(PLAN, "open")  # so that each row is asked whether it is planned
    await conn.execute(PAUSE)
    await other.execute("SELECT pg_advisory_lock(77)")
    sweeping = asyncio.create_task(sweep(conn))
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 77 AND NOT granted"
    await until(lambda: other.fetchval(waiting), what="the sweep has found the row")
    await other.execute("UPDATE core.outbox SET deleted_at = NULL")
    await other.execute("SELECT pg_advisory_unlock(77)")
    assert swept(await sweeping) == {}
    assert len(await ids(conn, "deleted_at IS NULL")) == 1


async def test_sweeps_beside_running_workers(dsn: str, conn: asyncpg.Connection, other: asyncpg.Connection) -> None:
    """Every event is handled once while old rows go, and no lease is lost to a sweep (OBX-5)."""
    await conn.execute("SET session_replication_role = replica")
    await rows(conn, "delivered", 46, 4_000)
    await rows(conn, "tombstone", 60, 4_000, deleted=8)
    await conn.execute("SET session_replication_role = DEFAULT")
    registry, seen = HandlerRegistry(), []

    @registry.handler(EVENT, name=HANDLER)
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.event_id)
        await asyncio.sleep(0.001)

    facts = Facts()
    async with running(dsn, registry, facts) as worker:
        published: list[UUID] = []
        sweeping = asyncio.create_task(_sweep_until(other, lambda: len(seen) >= 2_000))
        for _ in range(10):
            published += await publish_many(conn, EVENT, 200)
        await until(lambda: len(seen) >= 2_000, what="all are handled")
        took = await sweeping
        await drained(conn)
        assert worker.counters.lost_leases == 0
    assert sorted(seen) == sorted(published)
    assert took == {"delivered": 4_000, "tombstones": 4_000}
    assert await ids(conn, "deleted_at IS NULL") == set(published)


async def _sweep_until(connection: asyncpg.Connection, done: object) -> dict[str, int]:
    total: dict[str, int] = {}
    while True:
        finished = done()  # type: ignore[operator]
        for step, count in swept(await sweep(connection)).items():
            total[step] = total.get(step, 0) + count
        if finished:
            return total
        await asyncio.sleep(0.05)


# --- the worker's own sweeps ---


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "_INTERVAL", 0.05)
    monkeypatch.setattr(sweeper, "_REST", timedelta(0))
    monkeypatch.setattr(sweeper, "_ASK_EVERY", 0.0)


def idle() -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER)
    async def charge(event: EventEnvelope) -> None: ...

    return registry


async def test_a_worker_sweeps(dsn: str, conn: asyncpg.Connection, eager: None) -> None:
    """Beside its work, and tells what it took; it writes no audit, because nobody asked for it (OBX-5)."""
    await rows(conn, "delivered", 46, 30)
    await rows(conn, "tombstone", 60, 20, deleted=8)
    facts = Facts()
    async with running(dsn, idle(), facts, lease=5.0):
        (notice,) = await until(lambda: facts.notices("retention_swept"), what="the pass is told")
        await settled(conn, await publish(conn, EVENT))
    assert (notice.level, notice.details) == ("info", {"delivered": 30, "tombstones": 20})
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE deleted_at IS NULL") == 1
    state = await conn.fetchrow("SELECT * FROM core.sweeps")
    assert state["finished_at"] is not None
    assert await conn.fetchval("SELECT count(*) FROM core.audit") == 0


async def test_a_worker_may_be_told_not_to(dsn: str, conn: asyncpg.Connection, eager: None) -> None:
    """The setting sweep=False (OBX-5)."""
    await rows(conn, "delivered", 46)
    facts = Facts()
    async with running(dsn, idle(), facts, sweep=False):
        beats = "SELECT max(heartbeat_at) > min(started_at) + interval '300 ms' FROM core.workers"
        await until(lambda: conn.fetchval(beats), what="the maintenance has run a few times")
    assert len(await ids(conn, "deleted_at IS NULL")) == 1
    assert facts.notices("retention_swept") == []


async def test_one_sweeps_at_a_time(conn: asyncpg.Connection) -> None:
    """The others wait until it is done and the rest is over, or until it was not heard of for a minute (OBX-5)."""
    one, two = uuid4(), uuid4()

    async def may(sweeper: UUID, *, force: bool = False) -> bool:
        return await acquire_sweep(conn, QUERIES, sweeper, timedelta(minutes=10), force=force) is not None

    await conn.execute("UPDATE core.sweeps SET finished_at = now()")  # when the test's template was migrated
    assert not await may(one), "a fresh schema has nothing to sweep"
    await conn.execute("UPDATE core.sweeps SET finished_at = now() - interval '11 minutes'")
    assert await may(one)
    assert await may(one), "it goes on"
    assert not await may(two)
    await conn.execute("UPDATE core.sweeps SET seen_at = now() - interval '2 minutes'")
    assert await may(two), "the other one died"
    assert not await may(one)
    await conn.execute("SELECT core.sweep_finish($1, '{}', 0)", one)
    assert await may(two), "only who has the turn can end it"
    await conn.execute("SELECT core.sweep_finish($1, '{}', 7)", two)
    assert not await may(one), "somebody has just done it"
    assert await may(one, force=True)
    assert await acquire_sweep(conn, QUERIES, one, timedelta(0)) == 7, "where the last one ended in the inbox"


async def test_of_two_workers_one_sweeps(dsn: str, conn: asyncpg.Connection, eager: None) -> None:
    """Together they take each row once (OBX-5)."""
    await rows(conn, "delivered", 46, 300)
    facts, others = Facts(), Facts()
    async with running(dsn, idle(), facts, name="one"), running(dsn, idle(), others, name="two"):
        query = "SELECT count(*) = 0 FROM core.outbox WHERE deleted_at IS NULL"
        await until(lambda: conn.fetchval(query), what="all are tombstoned")
        told = lambda: [*facts.notices("retention_swept"), *others.notices("retention_swept")]  # noqa: E731
        await until(told, what="it is told")
        assert sum(int(str(each.details["delivered"])) for each in told()) == 300


async def test_a_sweep_that_fails_does_not_silence_the_worker(dsn: str, conn: asyncpg.Connection, eager: None) -> None:
    """It is told once, with a remedy, and the heartbeat goes on (OBX-5)."""
    await rows(conn, "tombstone", 60, deleted=8)
    await conn.execute(
        """CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN RAISE EXCEPTION 'not today' USING ERRCODE = '42501'; END $$;
           CREATE TRIGGER refuse BEFORE DELETE ON core.outbox FOR EACH ROW EXECUTE FUNCTION public.refuse()"""
    )
    facts = Facts()
    async with running(dsn, idle(), facts):
        (notice,) = await until(lambda: facts.notices("sweep_failed"), what="it is told")
        assert "not today" in str(notice.details["error"])
        before = await conn.fetchval("SELECT max(heartbeat_at) FROM core.workers")
        await until(
            lambda: conn.fetchval("SELECT max(heartbeat_at) > $1 FROM core.workers", before),
            what="it says that it lives",
        )
    assert len(facts.notices("sweep_failed")) == 1


async def test_a_row_that_cannot_go_stops_nothing_else(dsn: str, conn: asyncpg.Connection, eager: None) -> None:
    """Its step and class wait for the next pass; everything else is swept, and it is told once (OBX-5, E7)."""
    (stuck,) = await rows(conn, "tombstone", 60, content_class="billing", deleted=8)
    await rows(conn, "tombstone", 60, 3, deleted=8)
    await rows(conn, "discarded", 60, 2, deleted=8)
    await conn.execute("CREATE TABLE public.invoices (event uuid REFERENCES core.outbox)")
    try:
        await conn.execute("INSERT INTO public.invoices VALUES ($1)", stuck)
        facts = Facts()
        async with running(dsn, idle(), facts):
            (first, *_) = await until(lambda: facts.notices("retention_swept"), what="the pass is told")
            turns = len(facts.notices("retention_swept"))
            await rows(conn, "discarded", 60, 1, deleted=8)
            await until(lambda: len(facts.notices("retention_swept")) > turns, what="another pass")
        assert first.details == {"tombstones": 3, "discarded": 2}
        assert await ids(conn) == {stuck}
        (notice,) = facts.notices("sweep_failed")
        assert (notice.level, notice.details["step"], notice.details["content_class"]) == (
            "error", "tombstones", "billing",
        )  # fmt: skip
        assert (notice.details["sqlstate"], str(stuck) in repr(notice)) == ("23503", False)
        assert "invoices" in str(notice.details["error"]) and notice.details["remedy"]
        async with Operator(dsn, actor=ANN) as ann:
            (left,) = (await ann.retention.sweep()).refused
        assert (left.step, left.content_class, left.sqlstate) == ("tombstones", "billing", "23503")
    finally:
        await conn.execute("DROP TABLE public.invoices")


SWEEPS = (
    "SELECT core.retention_sweep('delivered', 'operations', '-infinity', 10, $1)",
    "SELECT core.sweep_inbox(0, 10, 10, $1)",
    "SELECT core.sweep_keys('', '', 10, $1)",
)


async def test_a_worker_cannot_speak_for_a_person(conn: asyncpg.Connection) -> None:
    """Only operators and the owner name an actor; a worker sweeps without one (S17, OBX-2)."""
    for statement in SWEEPS:
        for role, actor in (("holdfast_operator", ANN), ("holdfast_owner", ANN), ("holdfast_worker", None)):
            async with conn.transaction():
                await conn.execute(f"SET LOCAL ROLE {role}")
                await conn.fetch(statement, actor)
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="p_actor is for operators"):
            async with conn.transaction():
                await conn.execute("SET LOCAL ROLE holdfast_worker")
                await conn.fetch(statement, ANN)


async def test_a_pass_goes_on_after_a_fault(conn: asyncpg.Connection, other: asyncpg.Connection) -> None:
    """Where it was, with smaller batches (OBX-5)."""
    await rows(conn, "delivered", 46, 10)
    batch_size = BatchSize()
    passing = Sweep(QUERIES, batch_size)
    async with other.transaction():
        await other.execute("LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE")
        await conn.execute("SET statement_timeout = '50 ms'")
        with pytest.raises(asyncpg.QueryCanceledError):
            await passing.next(conn)
    await conn.execute("SET statement_timeout = 0")
    while await passing.next(conn) is not None:
        pass
    assert passing.counts["delivered"] == 10


# --- rows that are not kept at all ---


async def test_zero_days_delete_with_the_settle(dsn: str, conn: asyncpg.Connection) -> None:
    """No sweep is needed; the inbox remembers all the same, and other classes are kept (OBX-5)."""
    await policy(conn, "outbox_row", 0, 0, content_class="brief")
    registry, seen = HandlerRegistry(), []

    @registry.handler(EVENT, name=HANDLER)
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.idempotency_key)

    brief = await publish(conn, EVENT, content_class="brief", idempotency_key="once")
    kept = await publish(conn, EVENT)
    async with running(dsn, registry, sweep=False) as worker:
        await settled(conn, kept)
        await until(lambda: _is_gone(conn, brief), what="the brief one is gone")
        await publish(conn, EVENT, content_class="brief", idempotency_key="once")
        await until(lambda: worker.counters.duplicates == 1, what="the duplicate is skipped")
        await until(lambda: _count_is(conn, 1), what="and gone as well")
        assert worker.counters.lost_leases == 0
    assert seen.count("once") == 1
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 2


async def _is_gone(conn: asyncpg.Connection, id: UUID) -> bool:
    return await row(conn, id) is None


async def _count_is(conn: asyncpg.Connection, count: int) -> bool:
    return bool(await conn.fetchval("SELECT count(*) FROM core.outbox") == count)


async def test_zero_days_and_a_transactional_handler(dsn: str, conn: asyncpg.Connection) -> None:
    """The handler's transaction deletes the row; one that fails keeps it for the retry (OBX-5, LSN-5)."""
    await conn.execute("CREATE TABLE effects (n int)")
    await policy(conn, "outbox_row", 0, 0)
    registry, runs = HandlerRegistry(), []

    @registry.handler(EVENT, name=HANDLER, retry=RetryPolicy(base_delay=0.001, max_delay=0.001))
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        runs.append(event.event_id)
        await tx.execute("INSERT INTO effects VALUES (1)")
        if len(runs) == 1:
            raise ConnectionError("again")

    id = await publish(conn, EVENT)
    async with running(dsn, registry, sweep=False, poll_interval=0.1):
        await until(lambda: _is_gone(conn, id), what="it is gone")
    assert (len(runs), await conn.fetchval("SELECT count(*) FROM effects")) == (2, 1)
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 1


async def test_zero_days_and_a_lost_lease(dsn: str, conn: asyncpg.Connection) -> None:
    """The settle that deletes is fenced like every other (LSN-3)."""
    await policy(conn, "outbox_row", 0, 0)
    registry = HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER)
    async def charge(event: EventEnvelope) -> None:
        await conn.execute("UPDATE core.outbox SET lease_token = gen_random_uuid() WHERE id = $1", event.event_id)

    id = await publish(conn, EVENT)
    async with running(dsn, registry, sweep=False) as worker:
        await until(lambda: worker.counters.lost_leases == 1, what="the lease is lost")
        assert worker.counters.delivered == 0
    assert await row(conn, id) is not None
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 0
    await conn.execute("DELETE FROM core.outbox")


# --- the operator's verbs ---


async def test_an_operator_sweeps(conn: asyncpg.Connection, ann: Operator) -> None:
    """What is due is shown, taken in batches that are told, and written into the audit (OBX-5, OPS-1, S17)."""
    await rows(conn, "delivered", 46, 30)
    await rows(conn, "tombstone", 60, 20, content_class="billing", deleted=8)
    await conn.execute("INSERT INTO core.outbox_keys VALUES ('shop', 'k', gen_random_uuid())")
    report = await ann.retention.report()
    assert [(each.step, each.content_class, each.count) for each in report.due] == [
        ("delivered", "operations", 30),
        ("tombstones", "billing", 20),
        ("keys", "", 1),
    ]
    assert (report.total, report.more, report.sweeping) == (51, False, False)
    assert dict(report.policies) == dict(DEFAULT_POLICIES)
    batches = []
    done = await ann.retention.sweep(reason="the disk", on_batch=batches.append)
    assert {step: count for step, count in done.swept.items() if count} == {
        "delivered": 30,
        "tombstones": 20,
        "keys": 1,
    }
    assert done.total == sum(batch.swept for batch in batches) == 51
    lines = await conn.fetch("SELECT * FROM core.audit ORDER BY id")
    assert [(each["actor"], each["action"], each["reason"], json.loads(each["counts"])["swept"]) for each in lines] == [
        (ANN, "retention.sweep", "the disk", count) for count in (30, 20, 1)
    ]
    after = await ann.retention.report()
    assert after.due == []
    assert after.last == {"delivered": 30, "tombstones": 20, "keys": 1}
    assert after.finished_at > report.finished_at


async def test_show_reads_no_more_than_it_may(
    conn: asyncpg.Connection, ann: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts end at a limit (OBS-4)."""
    monkeypatch.setattr(holdfast.postgres.operations.retention, "MOST", 10)
    await rows(conn, "delivered", 46, 30)
    report = await ann.retention.report()
    assert (report.total, report.more) == (10, True)


async def test_an_operator_takes_the_turn(conn: asyncpg.Connection, ann: Operator) -> None:
    """A worker that sweeps leaves it to the operator (OBX-5)."""
    worker, turns = uuid4(), []
    assert await acquire_sweep(conn, QUERIES, worker, timedelta(0)) is not None
    assert (await ann.retention.report()).sweeping
    await rows(conn, "delivered", 46)
    passing = Sweep(QUERIES, actor=ANN)
    await acquire_sweep(conn, QUERIES, UUID(int=7), timedelta(0), force=True)
    turns.append(await acquire_sweep(conn, QUERIES, worker, timedelta(0)))
    while await passing.next(conn) is not None:
        pass
    assert turns == [None]
    done = await ann.retention.sweep()
    assert done.total == 0
    assert not (await ann.retention.report()).sweeping


async def test_the_worker_role_may_sweep_and_no_more(conn: asyncpg.Connection) -> None:
    """By the policies and the clock; it can neither change a policy nor erase (OBX-2, P10)."""
    await rows(conn, "delivered", 46, 3)
    await rows(conn, "delivered", 1, 3)
    async with conn.transaction():
        await conn.execute("SET LOCAL ROLE holdfast_worker")
        assert swept(await sweep(conn)) == {"delivered": 3}
    denied = [
        "SELECT core.retention_set('a', NULL, 'outbox_row', '*', 0, 0, 'HARD_DELETE')",
        "SELECT core.erase_outbox(gen_random_uuid(), 'a', NULL, false, 10, gen_random_uuid())",
        "SELECT core.outbox_dispose('{}', 'HARD_DELETE')",
        "SELECT * FROM core.archive",
        "UPDATE core.retention_policies SET active_ttl_days = 0",
    ]
    for statement in denied:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with conn.transaction():
                await conn.execute("SET LOCAL ROLE holdfast_worker")
                await conn.execute(statement)


async def test_publishing_while_a_sweep_holds_its_rows(conn: asyncpg.Connection, other: asyncpg.Connection) -> None:
    """A producer never waits for a sweep (OBX-5)."""
    await rows(other, "delivered", 46, 100)
    async with other.transaction():
        await other.execute("SELECT core.retention_sweep('delivered', 'operations', '-infinity', 100)")
        began = time.monotonic()
        async with conn.transaction():
            await Publisher("shop").publish_many(conn, [NewEvent(EVENT, {}) for _ in range(10)])
        assert time.monotonic() - began < 1
