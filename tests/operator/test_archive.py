"""Archive mode: what has failed for good moves, in one statement, and comes back whole (DLQ-2, seed C)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, Reject, RetryPolicy, Worker, WorkerSettings
from holdfast.errors import ConfigurationError, SchemaMismatch
from holdfast.failure import MAX_ERROR_BYTES, TRUNCATED, FailureCycle
from holdfast.operator import Operator, Refused
from holdfast.postgres.operations.connection import Statements
from holdfast.telemetry import Failed
from tests.outbox import CHANNEL, EVENT, HANDLER, InFlight, Lane, Outbox, connect
from tests.worker.support import (
    Facts,
    drained,
    make_tables,
    publish,
    publish_many,
    row,
    running,
    settled,
    siblings,
    until,
)

ANN = "ann@example.org"
ARCHIVE = {"dead_letters": "archive", "poll_interval": 0.2}
ONCE = RetryPolicy(strategy="none")


@pytest.fixture
async def outbox(dsn: str) -> AsyncIterator[Outbox]:
    connection = await connect(dsn)
    yield Outbox(connection)
    await connection.close()


@pytest.fixture
async def ann(dsn: str) -> AsyncIterator[Operator]:
    async with Operator(dsn, actor=ANN) as operator:
        yield operator


async def archived(conn: asyncpg.Connection, identity: UUID) -> list[asyncpg.Record]:
    return await conn.fetch("SELECT * FROM core.archive WHERE original_id = $1 ORDER BY id", identity)


async def moved(conn: asyncpg.Connection, identity: UUID) -> asyncpg.Record:
    """The archived row, once it is there and the outbox has it no more."""

    async def there() -> asyncpg.Record | None:
        found = await archived(conn, identity)
        return found[-1] if found and await row(conn, identity) is None else None

    return await until(there, what=f"event {identity} in the archive")


async def archive_rows(
    outbox: Outbox, *held: InFlight, reason: str = "retry_terminal", error: str | None = "boom"
) -> list[UUID]:
    """What a worker sends; the ids whose lease was lost."""
    count = len(held)
    rows = await outbox.call(
        "outbox_archive",
        ids=[each.id for each in held],
        tokens=[each.token for each in held],
        handlers=[each.handler for each in held],
        reasons=[reason] * count,
        errors=[error] * count,
        signatures=["E:1"] * count,
    )
    return [each[0] for each in rows]


async def one_archived(outbox: Outbox, **columns: object) -> int:
    held = await outbox.held(**columns)
    assert await archive_rows(outbox, held) == []
    return int(
        await outbox.value("SELECT id FROM core.archive WHERE original_id = $1 ORDER BY id DESC LIMIT 1", held.id)
    )


def failing(registry: HandlerRegistry, error: Exception, *, retry: RetryPolicy = ONCE) -> None:
    @registry.handler(EVENT, name=HANDLER, retry=retry)
    async def charge(event: EventEnvelope) -> None:
        raise error


# --- what is archived ---


async def test_a_terminal_failure_moves_with_everything(dsn: str, conn: asyncpg.Connection) -> None:
    """The columns of seed C under the names that SPEC maps them to, and what a replay needs (DLQ-2)."""
    registry, facts = HandlerRegistry(), Facts()
    failing(registry, ConnectionError("refused"), retry=RetryPolicy(max_attempts=2, base_delay=0.001, max_delay=0.001))
    domain = uuid4()
    identity = await publish(
        conn,
        EVENT,
        {"order": 17},
        idempotency_key="order-17",
        domain_id=domain,
        headers={"tenant": "acme"},
        correlation_id="chain-1",
        content_class="billing",
        priority=2,
    )
    before = await row(conn, identity)
    async with running(dsn, registry, facts, **ARCHIVE) as worker:
        found = await moved(conn, identity)
        assert (worker.counters.failed, worker.counters.archived) == (1, 1)
    assert (found["original_id"], found["queue"], found["failure_reason"]) == (identity, HANDLER, "retry_terminal")
    assert json.loads(found["payload"]) == {"order": 17}
    assert json.loads(found["headers"])["correlation_id"] == "chain-1"
    assert found["deliveries_count"] == 2
    assert found["created_at"] == before["created_at"]
    assert found["failed_at"] > before["created_at"]
    assert found["last_exception"] == "ConnectionError: refused"
    for column in (
        "event_type", "event_version", "occurred_at", "source", "target", "content_class", "channel", "generation",
        "domain_id", "idempotency_key", "trace_context", "priority", "failure_history",
    ):  # fmt: skip
        assert found[column] == before[column], column
    (told,) = facts.of(Failed)
    assert (told.delivery_id, told.error_signature) == (identity, found["error_signature"])
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0


async def test_each_reason_of_failure(dsn: str, conn: asyncpg.Connection, outbox: Outbox) -> None:
    """retry_terminal, rejected with and without words, max_deliveries; a bare reject has no exception (DLQ-2)."""
    registry = HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER, retry=ONCE)
    async def charge(event: EventEnvelope) -> Reject:
        if event.payload["how"] == "raise":
            raise ValueError("no")
        return Reject("not ours" if event.payload["how"] == "words" else None)

    cases = {how: await publish(conn, EVENT, {"how": how}) for how in ("raise", "words", "bare")}
    crashed = await publish(conn, EVENT, {"how": "crash"})
    await conn.execute("UPDATE core.outbox SET attempts = 9, last_error = 'earlier' WHERE id = $1", crashed)
    # It was tried before and failed then: a bare reject says nothing about that.
    await conn.execute("UPDATE core.outbox SET attempts = 1, last_error = 'earlier' WHERE id = $1", cases["bare"])
    async with running(dsn, registry, **ARCHIVE):
        found = {how: await moved(conn, identity) for how, identity in (*cases.items(), ("crash", crashed))}
    assert {how: (each["failure_reason"], each["last_exception"]) for how, each in found.items()} == {
        "raise": ("retry_terminal", "ValueError: no"),
        "words": ("rejected", "not ours"),
        "bare": ("rejected", None),
        "crash": ("max_deliveries", "earlier"),
    }
    assert found["crash"]["deliveries_count"] == 10


async def test_success_is_never_archived(dsn: str, conn: asyncpg.Connection) -> None:
    """What is delivered, cancelled or expired stays in the outbox (DLQ-2)."""
    registry = HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER)
    async def charge(event: EventEnvelope) -> None:
        pass

    good = await publish(conn, EVENT)
    late = await publish(conn, EVENT, expires_in=0.001)
    cancelled = await publish(conn, EVENT, delay=3600)
    assert await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann')", cancelled) == 1
    async with running(dsn, registry, **ARCHIVE) as worker:
        await settled(conn, good)
        expired = await settled(conn, late, "failed")
        assert worker.counters.archived == 0
    assert (expired["failure_reason"], expired["deleted_at"] is not None) == ("expired", True)
    assert (await row(conn, cancelled))["failure_reason"] == "cancelled"
    assert await conn.fetchval("SELECT count(*) FROM core.archive") == 0


async def test_the_exception_is_bounded(dsn: str, conn: asyncpg.Connection) -> None:
    """At most 8 KiB, ending in the marker (DLQ-2)."""
    registry = HandlerRegistry()
    failing(registry, ValueError("é" * 1_000_000))
    identity = await publish(conn, EVENT)
    async with running(dsn, registry, **ARCHIVE):
        found = await moved(conn, identity)
    assert len(found["last_exception"].encode()) <= MAX_ERROR_BYTES
    assert found["last_exception"].endswith(TRUNCATED)


async def test_a_transactional_handler_archives_in_its_transaction(dsn: str, conn: asyncpg.Connection) -> None:
    """What the handler wrote is gone, the dead letter is in the archive, and the inbox knows nothing (DLQ-2, LSN-5)."""
    await make_tables(conn)
    registry = HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER, retry=ONCE)
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (handler, n) VALUES ('charge', 1)")
        raise ValueError("no")

    identity = await publish(conn, EVENT)
    async with running(dsn, registry, **ARCHIVE) as worker:
        await moved(conn, identity)
        await until(lambda: worker.counters.archived == 1, what="it is counted")
    assert await conn.fetchval("SELECT count(*) FROM ledger") == 0
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 0


async def test_only_the_sibling_that_failed_moves(dsn: str, conn: asyncpg.Connection, ann: Operator) -> None:
    """Of an event that two handlers want, one delivery is archived and replayed (DLQ-2, DLQ-3, LSN-7)."""
    registry, seen, broken = HandlerRegistry(), [], True

    @registry.handler(EVENT, name=HANDLER, retry=ONCE)
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        seen.append((context.handler_name, event.event_id))
        if broken:
            raise ValueError("no")

    @registry.handler(EVENT, name="mail.thank", retry=ONCE)
    async def thank(event: EventEnvelope, context: HandlerContext) -> None:
        seen.append((context.handler_name, event.event_id))

    identity = await publish(conn, EVENT)
    async with running(dsn, registry, **ARCHIVE):
        await until(lambda: conn.fetchval("SELECT count(*) FROM core.archive"), what="the sibling is archived")
        await drained(conn)
        assert [(each["queue"], each["origin_id"]) for each in await conn.fetch("SELECT * FROM core.archive")] == [
            (HANDLER, identity)
        ]
        assert set(await siblings(conn, identity)) == {"mail.thank"}
        broken = False
        result = await ann.archive.replay([identity])
        assert result.count == 1
        await until(lambda: seen.count((HANDLER, identity)) == 2, what="it is handled again")
        await drained(conn)
    assert seen.count(("mail.thank", identity)) == 1
    assert set(await siblings(conn, identity)) == {"mail.thank", HANDLER}


# --- the fence, and what an archive that refuses does ---


async def test_a_lost_lease_writes_nothing(outbox: Outbox) -> None:
    """The row another worker has claimed is neither deleted nor archived; the others of the batch are (DLQ-2)."""
    mine, lost, expired = [await outbox.held() for _ in range(3)]
    await outbox.expire_lease(lost.id)
    [again] = await outbox.hold()
    assert again.id == lost.id
    await outbox.expire_lease(expired.id)  # nobody has taken it yet: it is still this worker's
    gone = InFlight(uuid4(), mine.token)
    assert set(await archive_rows(outbox, mine, lost, expired, gone)) == {lost.id, gone.id}
    kept = {each["original_id"] for each in await outbox.connection.fetch("SELECT original_id FROM core.archive")}
    assert kept == {mine.id, expired.id}
    assert (await outbox.row(lost.id))["lease_token"] == again.token
    assert await archive_rows(outbox, again) == []


async def test_the_same_row_is_archived_once(outbox: Outbox) -> None:
    """The second settle finds nothing, as after a lost lease (DLQ-2)."""
    held = await outbox.held()
    assert await archive_rows(outbox, held) == []
    assert await archive_rows(outbox, held) == [held.id]
    assert await outbox.value("SELECT count(*) FROM core.archive") == 1


async def test_a_lost_lease_is_counted_and_not_told(dsn: str, conn: asyncpg.Connection, outbox: Outbox) -> None:
    """No dead letter is told or counted where none was written (OBS-2, DLQ-2)."""
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler(EVENT, name=HANDLER, retry=ONCE)
    async def charge(event: EventEnvelope) -> None:
        await conn.execute("UPDATE core.outbox SET lease_token = gen_random_uuid() WHERE id = $1", event.event_id)
        raise ValueError("no")

    identity = await publish(conn, EVENT)
    async with running(dsn, registry, facts, **ARCHIVE) as worker:
        await until(lambda: worker.counters.lost_leases, what="the lease is lost")
        assert (worker.counters.failed, worker.counters.archived) == (0, 0)
    assert facts.of(Failed) == []
    assert await archived(conn, identity) == []
    await conn.execute("DELETE FROM core.outbox")


async def test_an_archive_that_refuses_keeps_the_row(dsn: str, conn: asyncpg.Connection) -> None:
    """The statement rolls back, the row stays leased and comes back after the lease; the others of the batch
    flow; there is one alarm; and once the archive is right again the dead letters are in it (D7, DLQ-2).
    """
    registry, facts, runs = HandlerRegistry(), Facts(), []

    @registry.handler(EVENT, name=HANDLER, retry=ONCE)
    async def charge(event: EventEnvelope) -> None:
        runs.append(event.event_id)
        if "bad" in event.payload:
            raise ValueError("no")

    async with running(dsn, registry, facts, **ARCHIVE, lease=1.0) as worker:
        await conn.execute("ALTER TABLE core.archive RENAME COLUMN last_exception TO elsewhere")
        bad = [await publish(conn, EVENT, {"bad": True}) for _ in range(3)]
        good = await publish_many(conn, EVENT, 20)
        late = await publish(conn, EVENT, expires_in=0.001)
        await settled(conn, late, "failed")
        for identity in good:
            await settled(conn, identity)
        (alarm,) = await until(lambda: facts.notices("archive_refused"), what="the alarm")
        assert (alarm.level, alarm.details["sqlstate"]) == ("error", "42703")
        assert "core.archive" in str(alarm.details["remedy"])
        assert {(await row(conn, identity))["status"] for identity in bad} == {"in_flight"}
        claims = await conn.fetchval("SELECT min(attempts) FROM core.outbox WHERE id = ANY ($1)", bad)
        query = "SELECT min(attempts) FROM core.outbox WHERE id = ANY ($1)"
        await until(lambda: _more(conn, query, bad, claims), what="they come back after their lease")
        assert await conn.fetchval("SELECT count(*) FROM core.archive") == 0
        assert (worker.counters.failed, worker.counters.archived) == (0, 0)
        assert len(facts.notices("archive_refused")) == 1
        await conn.execute("ALTER TABLE core.archive RENAME COLUMN elsewhere TO last_exception")
        for identity in bad:
            await moved(conn, identity)
    assert facts.notices("settle_refused") == []


async def _more(conn: asyncpg.Connection, query: str, ids: list[UUID], than: int) -> bool:
    return bool(await conn.fetchval(query, ids) > than)


# --- what is checked at the start ---


async def start(dsn: str, **settings: object) -> None:
    registry = HandlerRegistry()
    failing(registry, ValueError())
    await Worker(dsn, registry, WorkerSettings(**settings), observers=()).drain()  # type: ignore[arg-type]


DRIFTS = {
    "core.archive has no column last_exception": "ALTER TABLE core.archive DROP COLUMN last_exception",
    "core.archive has no column idempotency_key": "ALTER TABLE core.archive DROP COLUMN idempotency_key",
    "core.archive has no index queue, failed_at": "DROP INDEX core.archive_queue",
    "core.archive is missing": "DROP TABLE core.archive",
    "core.outbox has no column disposed_at": "ALTER TABLE core.outbox DROP COLUMN disposed_at",
}


@pytest.mark.parametrize("missing", DRIFTS)
async def test_a_drifted_table_is_refused_by_name(dsn: str, conn: asyncpg.Connection, missing: str) -> None:
    """At the start, with what is missing; a worker that does not archive does not mind the archive (DLQ-2)."""
    await conn.execute(DRIFTS[missing])
    with pytest.raises(SchemaMismatch, match=missing):
        await start(dsn, dead_letters="archive")
    if "archive" in missing:
        await start(dsn)


async def test_each_table_is_looked_at_on_its_own(dsn: str, conn: asyncpg.Connection) -> None:
    """Drift in one does not hide drift in the other (DLQ-2)."""
    await conn.execute("ALTER TABLE core.archive DROP COLUMN queue; ALTER TABLE core.outbox DROP COLUMN disposed_at")
    with pytest.raises(SchemaMismatch) as caught:
        await start(dsn, dead_letters="archive")
    assert "core.archive has no column queue" in str(caught.value)
    assert "core.outbox has no column disposed_at" in str(caught.value)


def test_a_wrong_setting_is_refused() -> None:
    """DLQ-2."""
    with pytest.raises(ConfigurationError, match="in_place, archive"):
        WorkerSettings(dead_letters="table")  # type: ignore[arg-type]


async def test_pages_of_the_archive_leave_nothing_out(outbox: Outbox, ann: Operator) -> None:
    """For one handler in the order of the failures, which need not be that of the numbers; also when the
    last row of a page was replayed before the next is asked for (DLQ-2, OPS-1).
    """
    numbers = [await one_archived(outbox) for _ in range(7)]
    late = "UPDATE core.archive SET failed_at = now() - interval '1 hour' WHERE id = ANY ($1)"
    await outbox.connection.execute(late, numbers[3:6])
    for handler in (None, HANDLER):
        for discarded in (False, True):
            seen: list[int] = []
            while found := await ann.archive.page(
                handler=handler, discarded=discarded, limit=2, before=seen[-1] if seen else None
            ):
                seen += [each.id for each in found]
            assert sorted(seen) == ([] if discarded else numbers)
    first = await ann.archive.page(handler=HANDLER, limit=2)
    await ann.archive.replay([first[-1].id])
    rest = await ann.archive.page(handler=HANDLER, limit=20, before=first[-1].id)
    assert {each.id for each in (*first, *rest)} == set(numbers)
    await ann.archive.discard(numbers[:2])
    assert [each.id for each in await ann.archive.page(discarded=True)] == numbers[1::-1]
    plan = await outbox.connection.fetch(
        "EXPLAIN SELECT id FROM core.archive WHERE deleted_at IS NOT NULL AND id < 9 ORDER BY id DESC LIMIT 5"
    )
    assert "archive_discarded" in "\n".join(line[0] for line in plan)


async def test_many_ids_are_looked_up_at_once(outbox: Outbox, ann: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many are refused before anything is asked of the database, and the others in one question (S9)."""
    numbers = [await one_archived(outbox) for _ in range(3)]
    identities = [(await ann.archive.detail(number)).original_id for number in numbers]
    asked: list[str] = []
    fetch = Statements.fetch

    async def noted(self: Statements, name: str, /, **values: object) -> list[asyncpg.Record]:
        asked.append(name)
        return await fetch(self, name, **values)

    monkeypatch.setattr(Statements, "fetch", noted)
    assert sorted(await ann.archive.resolve([*identities, numbers[0]])) == numbers
    assert asked.count("find_archived") == 1
    asked.clear()
    for ids in ([], range(1, 10_002), [uuid4() for _ in range(10_001)]):
        with pytest.raises(ConfigurationError, match="name 1 to 10,000"):
            await ann.archive.resolve(ids)
    assert asked == []
    with pytest.raises(ConfigurationError, match="no event and no delivery has"):
        await ann.archive.resolve([*identities, uuid4()])


async def test_a_failure_of_a_handler_is_found_by_the_index(outbox: Outbox) -> None:
    """Recent failures of one handler, as the archive grows (DLQ-2)."""
    for _ in range(3):
        await one_archived(outbox)
    await outbox.connection.execute("SET enable_seqscan = off")
    plan = await outbox.connection.fetch(
        "EXPLAIN SELECT * FROM core.archive WHERE queue = $1 ORDER BY failed_at DESC LIMIT 10", HANDLER
    )
    assert "archive_queue" in "\n".join(line[0] for line in plan)


# --- back into the outbox ---


async def test_fail_fix_replay_from_the_archive(dsn: str, conn: asyncpg.Connection, ann: Operator) -> None:
    """Same id, same key, attempts from zero, the cycle in the history; audited; and it is delivered (DLQ-3)."""
    registry, seen, broken = HandlerRegistry(), [], True

    @registry.handler(EVENT, name=HANDLER, retry=ONCE)
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        if broken:
            raise ValueError("no price")
        seen.append((event.event_id, event.idempotency_key, event.payload, context.attempt, context.headers["tenant"]))

    identity = await publish(conn, EVENT, {"order": 1}, idempotency_key="order-1", headers={"tenant": "acme"})
    created = (await row(conn, identity))["created_at"]
    async with running(dsn, registry, dead_letters="archive", poll_interval=3600):
        dead = await moved(conn, identity)
        await ann.archive.replay([dead["id"]])
        again = await moved(conn, identity)
        broken = False
        result = await ann.archive.replay([str(identity)], reason="the price is there")
        assert (result.moved, result.left, result.generation) == ([identity], {}, 0)
        delivered = await settled(conn, identity)
    assert seen == [(identity, "order-1", {"order": 1}, 1, "acme")]
    assert delivered["created_at"] == created
    cycles = [FailureCycle.model_validate(each) for each in json.loads(delivered["failure_history"])]
    assert [(each.attempts, each.last_error, each.replayed_by) for each in cycles] == [
        (1, "ValueError: no price", ANN)
    ] * 2
    assert [each.failed_at for each in cycles] == [dead["failed_at"], again["failed_at"]]
    assert await archived(conn, identity) == []
    lines = await conn.fetch("SELECT * FROM core.audit ORDER BY id")
    assert [(each["actor"], each["action"], each["reason"]) for each in lines] == [
        (ANN, "archive.replay", None),
        (ANN, "archive.replay", "the price is there"),
    ]
    assert json.loads(lines[1]["arguments"])["ids"] == [str(identity)]
    assert json.loads(lines[1]["counts"]) == {"moved": 1}


async def test_a_replay_outlives_the_expiry(outbox: Outbox, ann: Operator) -> None:
    """Whoever replays an event has decided that it runs now (DLQ-3)."""
    number = await one_archived(outbox)
    await outbox.connection.execute("UPDATE core.archive SET expires_at = now() - interval '1 hour'")
    (identity,) = (await ann.archive.replay([number])).moved
    assert (await outbox.row(identity))["expires_at"] is None


async def test_what_becomes_of_each_number(outbox: Outbox, ann: Operator) -> None:
    """What cannot be replayed is left where it is, and named for what it is (DLQ-3)."""
    good, gone, aside, stripped, old, there = [await one_archived(outbox) for _ in range(6)]
    await outbox.connection.execute("DELETE FROM core.archive WHERE id = $1", gone)
    await ann.archive.discard([aside])
    await outbox.connection.execute(
        "UPDATE core.archive SET payload = NULL, deleted_at = now() WHERE id = $1", stripped
    )
    await outbox.connection.execute(
        "UPDATE core.archive SET created_at = now() - interval '61 days' WHERE id = $1", old
    )
    identity = await outbox.value("SELECT original_id FROM core.archive WHERE id = $1", there)
    await outbox.insert(id=identity, payload={"another": True})
    result = await ann.archive.replay([good, gone, aside, stripped, old, there])
    assert (result.count, result.left) == (
        1,
        {"missing": 1, "discarded": 1, "stripped": 1, "too_old": 1, "exists": 1},
    )
    assert (await outbox.row(identity))["payload"] == {"another": True}
    kept = await outbox.connection.fetch("SELECT id FROM core.archive ORDER BY id")
    assert [each["id"] for each in kept] == sorted([aside, stripped, old, there])


async def test_a_replay_older_than_the_inbox_needs_force(outbox: Outbox, ann: Operator) -> None:
    """Nobody would know that it was handled; the refusal and the force are audited (OBX-5)."""
    old = await one_archived(outbox)
    await outbox.connection.execute("UPDATE core.archive SET created_at = now() - interval '61 days'")
    with pytest.raises(Refused, match="force"):
        await ann.archive.replay([old])
    assert (await ann.archive.replay([old], force=True, reason="they never saw it")).count == 1
    lines = await outbox.connection.fetch("SELECT * FROM core.audit ORDER BY id")
    assert "refused" in lines[0]["arguments"]
    assert lines[1]["arguments"]["force"] is True


async def test_one_id_may_be_in_the_archive_twice(outbox: Outbox, ann: Operator) -> None:
    """original_id is not unique; the newest of them comes back, and the other stays (DLQ-2)."""
    held = await outbox.held(payload={"n": 1})
    await archive_rows(outbox, held)
    await outbox.insert(id=held.id, payload={"n": 2})
    [again] = await outbox.hold()
    await archive_rows(outbox, again)
    result = await ann.archive.replay([held.id])
    assert (result.count, result.left) == (1, {"exists": 1})
    assert (await outbox.row(held.id))["payload"] == {"n": 2}


async def test_a_replay_goes_to_a_generation(outbox: Outbox, ann: Operator) -> None:
    """Its own channel follows it, another channel stays; a listener of it is told to look (DLQ-3, GEN-1)."""
    plain = await one_archived(outbox)
    await outbox.connection.execute("INSERT INTO core.deployments (generation) VALUES (3)")
    slow = await outbox.insert(channel="outbox_slow", generation=0)
    [held] = await outbox.hold(channel="outbox_slow")
    await archive_rows(outbox, held)
    result = await ann.archive.replay([plain, slow], generation=3)
    assert result.generation == 3
    rows = await outbox.connection.fetch("SELECT channel, generation FROM core.outbox ORDER BY channel")
    assert [tuple(each) for each in rows] == [("outbox_gen_3", 3), ("outbox_slow", 3)]


async def test_a_dry_run_keeps_nothing(outbox: Outbox, ann: Operator) -> None:
    """It says what would happen; neither the rows nor the audit know of it (OPS-1, DLQ-3)."""
    number = await one_archived(outbox)
    result = await ann.archive.replay([number], dry_run=True)
    assert (result.count, result.dry_run) == (1, True)
    assert await outbox.value("SELECT count(*) FROM core.archive") == 1
    assert await outbox.value("SELECT count(*) FROM core.outbox") == 0
    assert await outbox.value("SELECT count(*) FROM core.audit") == 0


async def test_history_stays_bounded(outbox: Outbox, ann: Operator) -> None:
    """Twenty cycles at most, in 64 KiB, however often it comes back (DLQ-3, D4)."""
    held = await outbox.held()
    for _ in range(25):
        assert await archive_rows(outbox, held, error="é" * 4000) == []
        await ann.archive.replay([held.id])
        [held] = await outbox.hold(Lane(HANDLER))
    history = (await outbox.row(held.id))["failure_history"]
    assert 10 <= len(history) <= 20
    assert await outbox.value("SELECT octet_length(failure_history::text) FROM core.outbox") <= 65536
    assert await archive_rows(outbox, held) == []


# --- looking into it ---


async def test_pages_of_the_archive(outbox: Outbox, ann: Operator) -> None:
    """The newest first, by handler, page by page, without payloads (DLQ-2, OPS-1)."""
    numbers = [await one_archived(outbox, payload={"secret": 1}) for _ in range(5)]
    await outbox.insert(event_type="mail.sent")
    [other] = await outbox.hold(Lane("*/mail.sent", handler="mail.thank"))
    await archive_rows(outbox, other)
    first = await ann.archive.page(handler=HANDLER, limit=3)
    rest = await ann.archive.page(handler=HANDLER, limit=3, before=first[-1].id)
    assert [each.id for each in (*first, *rest)] == numbers[::-1]
    assert [each.queue for each in await ann.archive.page()] == ["mail.thank"] + [HANDLER] * 5
    found = await ann.archive.detail(numbers[0])
    assert (found.id, found.payload, found.channel, found.deliveries_count) == (numbers[0], None, CHANNEL, 1)
    assert (await ann.archive.detail(found.original_id, payload=True)).payload == {"secret": 1}
    with pytest.raises(ConfigurationError, match="no event and no delivery has"):
        await ann.archive.detail(uuid4())
    with pytest.raises(ConfigurationError, match="not in the archive"):
        await ann.archive.detail(999_999)


async def test_discard_and_restore(outbox: Outbox, ann: Operator) -> None:
    """Set aside and taken back, audited; only what has its payload comes back (DLQ-4)."""
    number = await one_archived(outbox)
    assert (await ann.archive.discard([number], reason="a test")).count == 1
    assert (await ann.archive.discard([number])).left == {"discarded": 1}
    assert await ann.archive.page() == []
    assert [each.id for each in await ann.archive.page(discarded=True)] == [number]
    assert (await ann.archive.restore([number])).count == 1
    assert (await ann.archive.restore([number])).left == {"archived": 1}
    await outbox.connection.execute("UPDATE core.archive SET deleted_at = now(), payload = NULL")
    assert (await ann.archive.restore([number])).left == {"stripped": 1}
    actions = await outbox.connection.fetch("SELECT action, counts FROM core.audit ORDER BY id")
    assert [each["action"] for each in actions] == ["archive.discard"] * 2 + ["archive.restore"] * 3


@pytest.mark.parametrize("ids", [[], ["seven"], [0], [-1], [True], "7", [2**63]])
async def test_bad_numbers_are_refused_before_anything(ann: Operator, ids: object) -> None:
    """With the field and the remedy (OPS-1)."""
    with pytest.raises(ConfigurationError, match="ids"):
        await ann.archive.replay(ids)  # type: ignore[arg-type]
