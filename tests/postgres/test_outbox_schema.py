"""The table: its columns, what it refuses, what it fills in, and when it rings the bell."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from io import BytesIO
from typing import Any

import asyncpg
import pytest

from holdfast.ids import uuid7_time
from tests.outbox import CHANNEL, EVENT, Outbox, connect

pytestmark = pytest.mark.both_postgres

DECIDED_COLUMNS = {
    "id": "uuid",
    "event_type": "text",
    "event_version": "integer",
    "occurred_at": "timestamp with time zone",
    "source": "text",
    "target": "text",
    "content_class": "text",
    "channel": "text",
    "generation": "bigint",
    "domain_id": "uuid",
    "payload": "jsonb",
    "idempotency_key": "text",
    "trace_context": "text",
    "status": "text",
    "attempts": "integer",
    "last_error": "text",
    "first_failed_at": "timestamp with time zone",
    "failure_history": "jsonb",
    "delivered_at": "timestamp with time zone",
    "deleted_at": "timestamp with time zone",
    "created_at": "timestamp with time zone",
    "available_at": "timestamp with time zone",
    "settled_at": "timestamp with time zone",
}


async def test_the_columns_of_the_decision_records_are_there(outbox: Outbox) -> None:
    """Under the names and with the types that were decided on (OBX-1)."""
    rows = await outbox.connection.fetch(
        """SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute
           WHERE attrelid = 'core.outbox'::regclass AND attnum > 0"""
    )
    found = {row[0]: row[1] for row in rows}
    assert {name: found.get(name) for name in DECIDED_COLUMNS} == DECIDED_COLUMNS


async def test_no_index_mentions_what_a_claim_changes(outbox: Outbox) -> None:
    """A claim is a heap-only update as long as no index has the status, the lease or the attempts (OBX-1, LSN-1)."""
    indexes = await outbox.connection.fetch(
        "SELECT pg_get_indexdef(indexrelid) AS sql FROM pg_index WHERE indrelid = 'core.outbox'::regclass"
    )
    for index in indexes:
        for column in ("status", "attempts", "lease_token", "lease_expires_at", "claimed_by"):
            assert column not in index["sql"]
    await outbox.insert_many(20)
    async with outbox.connection.transaction():
        await outbox.claim()
        counters = await outbox.connection.fetchrow(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relid = 'core.outbox'::regclass"
        )
    assert tuple(counters) == (10, 10)


# --- what is refused ---

NOW = datetime(2030, 1, 1, tzinfo=UTC)
TOKEN = uuid.UUID(int=1)
FAILED = {"status": "failed", "failed_at": NOW, "settled_at": NOW, "failure_reason": "rejected"}
LEASED = {"status": "in_flight", "lease_token": TOKEN, "lease_expires_at": NOW}
DELIVERED = {"status": "delivered", "settled_at": NOW, "delivered_at": NOW}

LEGAL: dict[str, dict[str, Any]] = {
    "pending": {},
    "in flight": LEASED,
    "delivered": DELIVERED,
    "failed": FAILED,
    "stripped": DELIVERED | {"deleted_at": NOW},
    "longest channel": {"channel": "c" * 63},
    "longest key": {"idempotency_key": "\u20ac" * 340},
    "headers": {"headers": {"tenant": "acme"}},
    "longest texts": {"trace_context": "t" * 1020, "content_class": "c" * 800},
    "longest name": {"event_type": "e" * 200, "source": "s" * 200, "target": "t" * 200},
    "far ahead": {"available_at": datetime(9999, 12, 30, tzinfo=UTC), "expires_at": datetime(9999, 12, 30, tzinfo=UTC)},
    "held": {"available_at": datetime.max.replace(tzinfo=UTC)},  # asyncpg writes it as infinity
}

# What is refused, as by a CHECK with the name of the constraint.
ILLEGAL: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown status": ("outbox_status", {"status": "done"}),
    "delivered without a time": ("outbox_settled", {"status": "delivered"}),
    "pending with a time": ("outbox_settled", {"settled_at": NOW}),
    "in flight without a lease": ("outbox_leased", {"status": "in_flight"}),
    "in flight without an end": ("outbox_leased", {"status": "in_flight", "lease_token": TOKEN}),
    "pending with a lease": ("outbox_leased", {"lease_token": TOKEN, "lease_expires_at": NOW}),
    "pending with half a lease": ("outbox_leased", {"lease_expires_at": NOW}),
    "delivered with a lease": ("outbox_leased", DELIVERED | {"lease_token": TOKEN, "lease_expires_at": NOW}),
    "failed without a reason": ("outbox_failed", FAILED | {"failure_reason": None}),
    "failed without a time": ("outbox_failed", FAILED | {"failed_at": None}),
    "delivered with a reason": ("outbox_failed", DELIVERED | {"failure_reason": "rejected"}),
    "failed for an unknown reason": ("outbox_failure_reason", FAILED | {"failure_reason": "bad luck"}),
    "a payload of megabytes": ("outbox_payload_size", {"payload": {"x": "y" * 600_000}}),
    "headers of a hundred kilobytes": ("outbox_headers_size", {"headers": {"x": "y" * 100_000}}),
    "a payload of numbers that only look small": ("outbox_payload_size", {"payload": {"n": [10**4000] * 200}}),
    "headers of numbers that only look small": ("outbox_headers_size", {"headers": {"n": [10**4000] * 20}}),
    "trace context of 1,021 bytes": ("outbox_texts", {"trace_context": "t" * 1021}),
    "empty content class": ("outbox_texts", {"content_class": ""}),
    "content class of 801 bytes": ("outbox_texts", {"content_class": "c" * 801}),
    "empty channel": ("outbox_channel", {"channel": ""}),
    "channel of 64 bytes": ("outbox_channel", {"channel": "c" * 64}),
    "channel of 66 bytes in 22 characters": ("outbox_channel", {"channel": "\u20ac" * 22}),
    "empty idempotency key": ("outbox_keys", {"idempotency_key": ""}),
    "idempotency key of 1,021 bytes": ("outbox_keys", {"idempotency_key": "k" * 1021}),
    "empty dedupe key": ("outbox_keys", {"dedupe_key": ""}),
    "dedupe key of 1,023 bytes": ("outbox_keys", {"dedupe_key": "\u20ac" * 341}),
    "version 0": ("outbox_numbers", {"event_version": 0}),
    "negative generation": ("outbox_numbers", {"generation": -1}),
    "negative attempts": ("outbox_numbers", {"attempts": -1}),
    "priority 3": ("outbox_numbers", {"priority": 3}),
    "priority -1": ("outbox_numbers", {"priority": -1}),
    "empty ordering key": ("outbox_ordering_key", {"ordering_key": ""}),
    "ordering key of 801 bytes": ("outbox_ordering_key", {"ordering_key": "k" * 801}),
    "empty fairness key": ("outbox_fairness_key", {"fairness_key": ""}),
    "fairness key of 801 bytes": ("outbox_fairness_key", {"fairness_key": "k" * 801}),
    "both keys": ("outbox_ordering_key", {"ordering_key": "a", "fairness_key": "b"}),
    "handler name with a slash": ("outbox_handler_name", {"handler_name": "a/b"}),
}


@pytest.mark.parametrize("columns", LEGAL.values(), ids=LEGAL)
async def test_a_legal_row_is_accepted(outbox: Outbox, columns: dict[str, Any]) -> None:
    """The edges of what is allowed, each beside the row that is not (OBX-1)."""
    assert await outbox.insert(**columns)


@pytest.mark.parametrize(("constraint", "columns"), ILLEGAL.values(), ids=ILLEGAL)
async def test_an_illegal_row_is_refused_by_name(outbox: Outbox, constraint: str, columns: dict[str, Any]) -> None:
    """Four states and what belongs to each; sizes that indexes and NOTIFY can carry (OBX-1, S4, D2)."""
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await outbox.insert(**columns)
    assert refused.value.constraint_name == constraint
    assert await outbox.value("SELECT count(*) FROM core.outbox") == 0


@pytest.mark.parametrize(("constraint", "columns"), ILLEGAL.values(), ids=ILLEGAL)
async def test_an_update_by_hand_is_refused_by_the_same_name(
    outbox: Outbox, constraint: str, columns: dict[str, Any]
) -> None:
    """What is written in psql is held to the rules of an INSERT (OBX-1, S4)."""
    id = await outbox.insert(expires_at=NOW, trace_context="t")
    names = list(columns)
    assignments = ", ".join(f"{name} = ${number}" for number, name in enumerate(names, start=2))
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await outbox.connection.execute(f"UPDATE core.outbox SET {assignments} WHERE id = $1", id, *columns.values())
    assert (refused.value.constraint_name, refused.value.table_name) == (constraint, "outbox")
    assert await outbox.states(id) == ["pending"]


async def test_statements_pay_for_no_check(outbox: Outbox) -> None:
    """Each CHECK, and each WHEN of an INSERT, would be compiled anew for every statement (LSN-1, PUB-1)."""
    checks = "SELECT count(*) FROM pg_constraint WHERE conrelid = 'core.outbox'::regclass AND contype = 'c'"
    conditions = """SELECT count(*) FROM pg_trigger
                    WHERE tgrelid = 'core.outbox'::regclass AND tgqual IS NOT NULL AND tgenabled <> 'D'
                      AND tgtype & 4 > 0"""
    assert [await outbox.value(checks), await outbox.value(conditions)] == [0, 0]


async def test_only_updates_by_hand_call_the_trigger(outbox: Outbox) -> None:
    """The functions of claims and settles check what they write, and each event needs two of them (LSN-1, LSN-2)."""
    calls = """SELECT coalesce(sum(calls), 0) FROM pg_stat_xact_user_functions
               WHERE schemaname = 'core' AND funcname = 'outbox_changed'"""
    await outbox.insert_many(3)
    async with outbox.connection.transaction():
        await outbox.connection.execute("SET LOCAL track_functions = 'pl'")
        assert await outbox.deliver(*await outbox.hold()) == []
        assert await outbox.value(calls) == 0
        await outbox.connection.execute("UPDATE core.outbox SET available_at = now()")
        assert await outbox.value(calls) == 3


TIMES = ["-infinity", "0044-03-15 00:00:00+00 BC", "0001-01-01 12:00:00+00", "9999-12-31 12:00:00+00", "20000-01-01"]


@pytest.mark.parametrize("column", ["occurred_at", "available_at", "expires_at"])
@pytest.mark.parametrize("moment", TIMES)
async def test_a_time_that_not_every_driver_can_read_is_refused(outbox: Outbox, column: str, moment: str) -> None:
    """One such row would fail the claim of its whole batch, or lie below every mark and wait for ever (P6)."""
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await outbox.insert_many(1, **{column: f"'{moment}'"})
    assert refused.value.constraint_name == "outbox_times"


FILLED = {
    "payload is an array": ("payload", {"payload": [1]}, "array"),
    "payload is a string": ("payload", {"payload": "text"}, "string"),
    "payload is a number": ("payload", {"payload": 1}, "number"),
    "payload is JSON null": ("payload", {"payload": "null"}, "null"),
    "payload is NULL": ("payload", {"payload": None}, "NULL"),
    "headers are an array": ("headers", {"headers": ["a"]}, "array"),
    "headers are JSON null": ("headers", {"headers": "null"}, "null"),
    "empty type": ("event_type", {"event_type": ""}, ""),
    "type with a slash": ("event_type", {"event_type": "a/b"}, ""),
    "type with a star": ("event_type", {"event_type": "order.*"}, ""),
    "type with a space": ("event_type", {"event_type": "order placed"}, ""),
    "type with a line break": ("event_type", {"event_type": "order\nplaced"}, ""),
    "type with a control character": ("event_type", {"event_type": "order\x7fplaced"}, ""),
    "type of 201 characters": ("event_type", {"event_type": "e" * 201}, ""),
    "empty source": ("source", {"source": ""}, ""),
    "source with a slash": ("source", {"source": "a/b"}, ""),
    "source with a tab": ("source", {"source": "a\tb"}, ""),
    "empty target": ("target", {"target": ""}, ""),
    "target that is a star": ("target", {"target": "*"}, ""),
    "target with a slash": ("target", {"target": "a/b"}, ""),
}


@pytest.mark.parametrize("key", [None, "k"], ids=["key left out", "key given"])
@pytest.mark.parametrize(("field", "columns", "found"), FILLED.values(), ids=FILLED)
async def test_a_bad_event_is_refused_with_what_to_write(
    outbox: Outbox, field: str, columns: dict[str, Any], found: str, key: str | None
) -> None:
    """A writer in another language learns the field and the remedy (PUB-1, PUB-3)."""
    if "null" in columns.values():
        columns = {"payload": "{}"} | columns
        await outbox.connection.reset_type_codec("jsonb", schema="pg_catalog")
    with pytest.raises(asyncpg.InvalidParameterValueError) as refused:
        await outbox.insert(**columns, idempotency_key=key)
    assert str(refused.value).startswith(f"{field} must be ")
    assert found in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize("column", ["event_type", "source"])
async def test_what_only_the_writer_knows_must_be_given(outbox: Outbox, column: str) -> None:
    """Three columns are needed, and no more (PUB-1)."""
    with pytest.raises(asyncpg.NotNullViolationError, match=column):
        await outbox.insert(**{column: None})


async def test_payloads_are_measured_as_json_text(outbox: Outbox) -> None:
    """The wall stands at twice the library's limit, however jsonb stores the value (D2, PUB-3)."""
    many_numbers = {"n": [1] * 80_000}  # 240 KB of text, more than a megabyte of jsonb
    assert await outbox.insert(payload=many_numbers)
    assert await outbox.insert(payload={"x": "y" * 524_000})
    with pytest.raises(asyncpg.CheckViolationError, match=r"payload has 5242\d\d bytes.*524288 are allowed") as refused:
        await outbox.insert(payload={"x": "y" * 524_290})
    assert "reference" in refused.value.hint


async def test_numbers_that_jsonb_stores_in_a_few_bytes_are_measured_as_text(outbox: Outbox) -> None:
    """Such a payload would fail every claim that meets it, and with it its whole lane (D2, P6)."""
    await outbox.connection.reset_type_codec("jsonb", schema="pg_catalog")
    payload = '{"n": [' + ", ".join(["1e131071"] * 5) + "]}"
    assert await outbox.value("SELECT pg_column_size($1::jsonb) < 200", payload)
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await outbox.insert(payload=payload)
    assert refused.value.constraint_name == "outbox_payload_size"


async def test_a_large_multibyte_payload_does_not_break_the_bell(outbox: Outbox) -> None:
    """A NOTIFY holds 8,000 bytes, and carries an id and no payload (D3)."""
    payload = {"x": "\U0001f4a5" * 20_000}
    await outbox.connection.execute("ALTER TABLE core.outbox DISABLE TRIGGER outbox_bell")
    await outbox.connection.execute(
        """CREATE CONSTRAINT TRIGGER always AFTER INSERT ON core.outbox DEFERRABLE INITIALLY DEFERRED
           FOR EACH ROW EXECUTE FUNCTION core.outbox_notify('always')"""
    )
    try:
        id = await outbox.insert(payload=payload)
    finally:
        await outbox.connection.execute("DROP TRIGGER always ON core.outbox")
        await outbox.connection.execute("ALTER TABLE core.outbox ENABLE TRIGGER outbox_bell")
    assert (await outbox.row(id))["payload"] == payload


async def test_settled_and_pending_rows_need_a_payload_until_they_are_tombstoned(outbox: Outbox) -> None:
    """STRIP_PAYLOAD is for what retention has tombstoned (OBX-5)."""
    held = await outbox.held()
    await outbox.deliver(held)
    with pytest.raises(asyncpg.CheckViolationError, match="outbox_payload_present"):
        await outbox.connection.execute("UPDATE core.outbox SET payload = NULL")
    await outbox.connection.execute("UPDATE core.outbox SET payload = NULL, deleted_at = now()")


# --- what is filled in ---


async def test_ids_are_version_7_and_carry_the_servers_time(outbox: Outbox) -> None:
    """Without an extension, on every supported server (OBX-7)."""
    before = await outbox.value("SELECT clock_timestamp()")
    rows = await outbox.connection.fetch("SELECT core.uuid7() AS id FROM generate_series(1, 2000)")
    after = await outbox.value("SELECT clock_timestamp()")
    ids = [row["id"] for row in rows]
    assert len(set(ids)) == 2000
    assert {(id.version, id.variant) for id in ids} == {(7, uuid.RFC_4122)}
    moment = timedelta(milliseconds=1)
    assert all(before - moment <= uuid7_time(id) <= after + moment for id in ids)
    times = [id.int >> 80 for id in ids]
    assert times == sorted(times)
    # Version and variant leave 74 random bits: each is set in about half of the ids.
    for bit in (*range(62), *range(64, 76)):
        share = sum(id.int >> bit & 1 for id in ids)
        assert 800 < share < 1200, bit


async def test_the_route_follows_target_type_and_handler(outbox: Outbox) -> None:
    """Until a handler is known the lane is the event's, then the handler's (LSN-1)."""
    broadcast, targeted = await outbox.insert(), await outbox.insert(target="mail")
    owned = await outbox.insert(target="mail", handler_name="mail.thank")
    routes = [(await outbox.row(id))["route"] for id in (broadcast, targeted, owned)]
    assert routes == [f"*/{EVENT}", f"mail/{EVENT}", "mail.thank"]


async def test_the_generation_and_its_channel_come_from_the_deployments(outbox: Outbox) -> None:
    """Generation 0 without deployments, else the newest that is not retired (GEN-1, PUB-1)."""

    async def stamped() -> tuple[int, str]:
        row = await outbox.row(await outbox.insert())
        return row["generation"], row["channel"]

    assert await stamped() == (0, CHANNEL)
    await outbox.connection.execute("INSERT INTO core.deployments (generation) VALUES (3), (7)")
    assert await stamped() == (7, "outbox_gen_7")
    await outbox.connection.execute("UPDATE core.deployments SET retired_at = now() WHERE generation = 7")
    assert await stamped() == (3, "outbox_gen_3")
    await outbox.connection.execute("UPDATE core.deployments SET retired_at = now()")
    assert await stamped() == (0, CHANNEL)
    await outbox.connection.execute("INSERT INTO core.deployments (generation) VALUES (9223372036854775807)")
    assert await stamped() == (2**63 - 1, "outbox_gen_9223372036854775807")


# --- the bell ---


class Bell:
    """A listener, and a worker that sleeps or is busy."""

    def __init__(self, listener: asyncpg.Connection) -> None:
        self.listener = listener
        self.heard: list[tuple[str, str]] = []

    async def sleep(self, channel: str = CHANNEL) -> None:
        await self.listener.execute("SELECT pg_advisory_lock(hashtextextended('core.' || $1, 0))", channel)

    async def ring(self, outbox: Outbox) -> list[tuple[str, str]]:
        """Everything that was notified until now."""
        await outbox.connection.execute("NOTIFY finish")
        deadline = time.monotonic() + 5
        while ("finish", "") not in self.heard:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        heard, self.heard = self.heard, []
        return heard[:-1]

    def hear(self, _connection: object, _pid: int, channel: str, text: object) -> None:
        self.heard.append((channel, str(text)))


@pytest.fixture
async def bell(shared_dsn: str) -> AsyncIterator[Bell]:
    connection = await asyncpg.connect(shared_dsn)
    bell = Bell(connection)
    for channel in (CHANNEL, "outbox_slow", "finish"):
        await connection.add_listener(channel, bell.hear)
    yield bell
    await connection.close()


async def test_the_bell_is_silent_while_nobody_sleeps(outbox: Outbox, bell: Bell) -> None:
    """A NOTIFY makes committing producers wait for each other, so it is sent for sleepers only (LSN-1)."""
    await outbox.insert()
    assert await bell.ring(outbox) == []
    await bell.sleep()
    await outbox.insert()
    assert await bell.ring(outbox) == [(CHANNEL, "")]
    await outbox.insert(channel="outbox_slow")
    assert await bell.ring(outbox) == [], "nobody sleeps on that channel"


async def test_a_transaction_rings_once_per_channel(outbox: Outbox, bell: Bell) -> None:
    """However many rows it writes, by whatever statement (LSN-1)."""
    await bell.sleep()
    await bell.sleep("outbox_slow")
    async with outbox.connection.transaction():
        await outbox.insert_many(500)
        lines = f"{EVENT}\tshop\t{{}}\n" * 9
        await outbox.connection.copy_to_table(
            "outbox", schema_name="core", columns=["event_type", "source", "payload"], source=BytesIO(lines.encode())
        )
        await outbox.insert_many(10, channel="'outbox_slow'")
    assert sorted(channel for channel, _ in await bell.ring(outbox)) == [CHANNEL, "outbox_slow"]


async def test_what_is_rolled_back_rings_no_bell(outbox: Outbox, bell: Bell) -> None:
    """Neither a transaction nor a savepoint that is rolled back; what comes after a savepoint still rings (E6)."""
    await bell.sleep()
    transaction = outbox.connection.transaction()
    await transaction.start()
    await outbox.insert()
    await transaction.rollback()
    assert await bell.ring(outbox) == []
    async with outbox.connection.transaction():
        savepoint = outbox.connection.transaction()
        await savepoint.start()
        await outbox.insert()
        await savepoint.rollback()
    assert await bell.ring(outbox) == []
    async with outbox.connection.transaction():
        savepoint = outbox.connection.transaction()
        await savepoint.start()
        await outbox.insert()
        await savepoint.rollback()
        await outbox.insert()
    assert await bell.ring(outbox) == [(CHANNEL, "")]


async def test_a_producer_can_opt_out_of_the_bell(outbox: Outbox, bell: Bell) -> None:
    """For two-phase commit, which refuses NOTIFY; for one transaction (E6)."""
    await bell.sleep()
    async with outbox.connection.transaction():
        await outbox.connection.execute("SET LOCAL holdfast.notify = 'off'")
        await outbox.insert()
    assert await bell.ring(outbox) == []
    await outbox.insert()
    assert len(await bell.ring(outbox)) == 1


async def test_a_worker_that_falls_asleep_waits_for_commits_under_way(
    outbox: Outbox, bell: Bell, shared_dsn: str
) -> None:
    """No wake-up is lost. Once the sleeper has its lock, what saw nobody asleep is visible (LSN-1)."""
    producer = Outbox(await connect(shared_dsn))
    asleep: asyncio.Task[None] | None = None
    try:
        transaction = producer.connection.transaction()
        await transaction.start()
        id = await producer.insert()
        await producer.connection.execute("SET CONSTRAINTS ALL IMMEDIATE")  # the moment of the commit's question
        asleep = asyncio.create_task(bell.sleep())
        await outbox.somebody_waits()
        late = await outbox.insert()
        assert not asleep.done()
        await transaction.commit()
        async with asyncio.timeout(5):
            await asleep
        assert {row["id"] for row in await outbox.claim()} == {id, late}
        assert await bell.ring(outbox) == [(CHANNEL, "")], "a queued sleeper is rung for"
    finally:
        if asleep is not None:
            await asyncio.wait([asleep], timeout=5)
        await producer.connection.close()
