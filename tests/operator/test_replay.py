"""Replays by operators (DLQ-3, OBX-5): many rows at once, old ones, and several people at the same rows."""

from __future__ import annotations

import asyncio
from collections import Counter
from uuid import UUID

import asyncpg
import pytest

from holdfast import HandlerRegistry, RetryPolicy
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Refused, Selection
from holdfast.operator.arguments import MOST_AT_ONCE
from holdfast.postgres.operations import failed as statements
from tests.operator import kept
from tests.operator.support import ACTOR, EVENT, HANDLER, beat, fail, states, subscribe
from tests.worker.support import drained, publish, publish_many, running, settled


@pytest.mark.slow
async def test_many_rows_are_replayed_in_one_call(dsn: str, conn: asyncpg.Connection) -> None:
    """10,000 of them, with one line in the audit that names each (DLQ-4)."""
    ids = await fail(conn, MOST_AT_ONCE)
    async with Operator(dsn, actor=ACTOR) as operator:
        dry = await operator.failed.replay(ids, dry_run=True)
        assert (dry.count, await states(conn)) == (MOST_AT_ONCE, {"failed": MOST_AT_ONCE})
        done = await operator.failed.replay(ids, reason="the price list is back")
    assert (done.count, done.left, done.generation) == (MOST_AT_ONCE, {}, 0)
    assert await states(conn) == {"pending": MOST_AT_ONCE}
    (line,) = await conn.fetch("SELECT actor, login, reason, arguments, counts FROM core.audit")
    assert (line["actor"], line["reason"]) == (ACTOR, "the price list is back")
    assert line["login"] == await conn.fetchval("SELECT session_user")
    found = await conn.fetchrow(
        "SELECT jsonb_array_length(arguments->'ids') AS ids, counts->'moved' AS moved FROM core.audit"
    )
    assert (found["ids"], found["moved"]) == (MOST_AT_ONCE, str(MOST_AT_ONCE))
    assert await conn.fetchval("SELECT DISTINCT failure_history->0->>'replayed_by' FROM core.outbox") == ACTOR


async def test_a_replay_goes_where_somebody_works(dsn: str, conn: asyncpg.Connection) -> None:
    """To the newest generation that a living worker serves, unless another is named (GEN-1, GEN-2)."""
    first, second, third = await fail(conn, 3, generation=1)
    async with Operator(dsn, actor=ACTOR) as operator:
        assert (await operator.failed.replay([first])).generation == 0
        await beat(conn, "old", HANDLER, generation=4)
        await beat(conn, "new", HANDLER, generation=6)
        assert (await operator.failed.replay([second])).generation == 6
        assert (await operator.failed.replay([third], generation=4)).generation == 4
    rows = await conn.fetch("SELECT generation, channel FROM core.outbox ORDER BY failure_history->0->>'replayed_at'")
    assert [tuple(row) for row in rows] == [(0, "outbox_default"), (6, "outbox_gen_6"), (4, "outbox_gen_4")]


async def test_what_the_inbox_may_have_forgotten_needs_force(dsn: str, conn: asyncpg.Connection) -> None:
    """The refusal and the force are both in the audit (OBX-5)."""
    old, young = (await fail(conn, age="61 days"))[0], (await fail(conn, age="59 days"))[0]
    async with Operator(dsn, actor=ACTOR) as operator:
        with pytest.raises(Refused, match="older than the inbox") as refused:
            await operator.failed.replay([old])
        assert "--force" in refused.value.remedy
        mixed = await operator.failed.replay([old, young])
        assert (mixed.moved, mixed.left) == ([young], {"too_old": 1})
        assert (await operator.failed.replay([old], force=True, reason="checked by hand")).count == 1
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="older than the inbox") as raised:
        (older,) = await fail(conn, age="90 days")
        await conn.fetchval("SELECT core.outbox_replay($1, 0, 'sql-direct')", older)
    assert "--force" in raised.value.hint
    lines = await conn.fetch("SELECT arguments->>'force', arguments ? 'refused', reason FROM core.audit ORDER BY id")
    assert [tuple(line) for line in lines] == [
        ("false", True, None),
        (None, False, None),
        ("true", False, "checked by hand"),
    ]


async def test_the_default_memory_is_that_of_the_registry(conn: asyncpg.Connection) -> None:
    """The horizon is what the policy of the inbox says now (OBX-5)."""
    days = await conn.fetchval("SELECT extract(day FROM now() - core.inbox_horizon())::int")
    assert days == await conn.fetchval(
        "SELECT active_ttl_days FROM core.retention_policies WHERE entity = 'event_handled'"
    )


async def test_a_replay_outlives_the_expiry(dsn: str, conn: asyncpg.Connection) -> None:
    """It failed while it was in time, was replayed after that, and runs: somebody has decided so (DLQ-3)."""
    registry, broken = HandlerRegistry(), True

    @registry.handler(EVENT, name=HANDLER, retry=RetryPolicy(strategy="none"))
    async def charge_card(event: object) -> None:
        if broken:
            raise ValueError("no price")

    id = await publish(conn, EVENT, expires_in=3600)
    async with running(dsn, registry), Operator(dsn, actor=ACTOR) as operator:
        await settled(conn, id, "failed")
        await conn.execute("UPDATE core.outbox SET expires_at = now() - interval '1 second'")
        broken = False
        assert (await operator.failed.replay([id])).count == 1
        await settled(conn, id)


async def test_rows_that_others_hold_are_left(dsn: str, conn: asyncpg.Connection) -> None:
    """An operator never waits for a row (E8, B12)."""
    ids = await fail(conn, 3)
    other = await asyncpg.connect(dsn)
    try:
        async with Operator(dsn, actor=ACTOR) as operator, other.transaction():
            await other.execute("SELECT FROM core.outbox WHERE id = $1 FOR UPDATE", ids[1])
            async with asyncio.timeout(5):
                done = await operator.failed.replay(ids)
                assert (done.count, done.left) == (2, {"busy": 1})
                assert (await operator.failed.discard(ids)).left == {"busy": 1, "pending": 2}
    finally:
        await other.close()


@pytest.mark.timeout(180)
async def test_two_operators_workers_and_retention_at_the_same_rows(dsn: str, conn: asyncpg.Connection) -> None:
    """Each row moves at most once, every event is handled once, nothing delivered comes back (E8, B12, DLQ-3)."""
    registry = HandlerRegistry()
    runs: Counter[UUID] = Counter()

    @registry.handler(EVENT, name=HANDLER)
    async def charge_card(event: object) -> None:
        runs[event.event_id] += 1  # type: ignore[attr-defined]

    await subscribe(conn)
    dead = await fail(conn, 1_500)
    others = await publish_many(conn, EVENT, 1_500)
    moved: Counter[UUID] = Counter()
    deleted = 0
    done = asyncio.Event()

    async def replay(name: str, order: list[UUID]) -> None:
        async with Operator(dsn, actor=name) as operator:
            for _ in range(3):
                for start in range(0, len(order), 100):
                    # Not by the verb, which refuses ids that are gone: here they vanish all the time.
                    ids = [*order[start : start + 100], *others[:20]]
                    options = {"generation": 0, "actor": name, "reason": None, "force": False}
                    async with operator._session.changing("replay") as each:
                        outcomes = await statements.replay(each, ids, **options)  # type: ignore[arg-type]
                    moved.update(outcomes.moved)

    async def sweep() -> None:
        nonlocal deleted
        connection = await asyncpg.connect(dsn)
        try:
            while not done.is_set():
                deleted += kept.swept(await kept.sweep(connection)).get("tombstones", 0)
                await asyncio.sleep(0.01)
        finally:
            await connection.close()

    async with running(dsn, registry):
        # Now, and not before: a worker that had known it would delete what it delivers.
        await kept.policy(conn, "outbox_row", 0, 0)
        sweeper = asyncio.create_task(sweep())
        try:
            await asyncio.gather(replay("ann", dead), replay("bob", dead[::-1]))
            await drained(conn, within=60)
        finally:
            done.set()
            await sweeper
    assert set(moved) == set(dead), "every failed row was replayed by one of the two, and no other row"
    assert set(moved.values()) == {1}
    assert set(runs) == {*dead, *others}
    assert set(runs.values()) == {1}
    left = await conn.fetch("SELECT id, status, jsonb_array_length(failure_history) AS cycles FROM core.outbox")
    assert {row["status"] for row in left} <= {"delivered"}
    assert all(row["cycles"] == (row["id"] in moved) for row in left)
    assert deleted > 0 and deleted + len(left) == 3_000
    counted = await conn.fetchval("SELECT sum((counts->>'moved')::int) FROM core.audit WHERE action = 'replay'")
    assert counted == 1_500


# --- bad arguments ---

NOTHING = UUID(int=4711)
BAD_IDS: list[object] = [
    [], None, [None], ["no id"], "0192", [17], [NOTHING], ["'; DROP TABLE core.outbox; --"], b"x", 5,
]  # fmt: skip


@pytest.mark.parametrize("ids", BAD_IDS, ids=repr)
async def test_bad_ids_change_nothing(dsn: str, conn: asyncpg.Connection, ids: object) -> None:
    """The error names the field and what to do (S9)."""
    await fail(conn, 2)
    async with Operator(dsn, actor=ACTOR) as operator:
        for verb in (operator.failed.replay, operator.failed.discard, operator.failed.restore):
            with pytest.raises(ConfigurationError) as refused:
                await verb(ids)  # type: ignore[arg-type]
            assert refused.value.field == "ids"
            assert refused.value.remedy
    assert await states(conn) == {"failed": 2}
    assert await conn.fetchval("SELECT count(*) FROM core.audit") == 0


async def test_a_million_ids_are_refused_before_they_are_sent(dsn: str, conn: asyncpg.Connection) -> None:
    """S9."""
    async with Operator(dsn, actor=ACTOR) as operator:
        with pytest.raises(ConfigurationError, match="more than 10,000"):
            await operator.failed.replay(UUID(int=n) for n in range(1_000_000))
    with pytest.raises(asyncpg.InvalidParameterValueError, match="10001 ids"):
        await conn.fetch("SELECT * FROM core.outbox_discard(array_fill(core.uuid7(), ARRAY[10001]), 'ann')")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("generation", {"generation": -1}),
        ("generation", {"generation": 2**63}),
        ("generation", {"generation": True}),
        ("generation", {"generation": 1.5}),
        ("reason", {"reason": ""}),
        ("reason", {"reason": "x" * 2_001}),
        ("reason", {"reason": "two\nlines"}),
        ("reason", {"reason": "\x1b[2J"}),
    ],
)
async def test_bad_options_of_a_replay_change_nothing(
    dsn: str, conn: asyncpg.Connection, field: str, options: dict[str, object]
) -> None:
    """S9, S22."""
    ids = await fail(conn)
    async with Operator(dsn, actor=ACTOR) as operator:
        with pytest.raises(ConfigurationError) as refused:
            await operator.failed.replay(ids, **options)  # type: ignore[arg-type]
    assert refused.value.field == field
    assert await states(conn) == {"failed": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("handler", "x'; DELETE FROM core.outbox; --"),
        ("handler", "billing"),
        ("handler", None),
        ("event_type", "order placed"),
        ("event_type", ""),
        ("source", "a/b"),
        ("source", "a\x00b"),
        ("signature", "a' OR 'a' = 'a"),
        ("signature", "x" * 301),
        ("reason", "cancelled"),
        ("reason", "1=1"),
        ("generation", -1),
        ("generation", float("inf")),
        ("since", "yesterday"),
        ("until", 5),
    ],
)
def test_a_bad_filter_is_refused(field: str, value: object) -> None:
    """SQL in a filter is a name that nothing has (S5, S9)."""
    if value is None:
        with pytest.raises(ConfigurationError, match="selection is empty"):
            Selection(**{field: value}).required()  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigurationError) as refused:
        Selection(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field


async def test_a_filter_that_the_database_does_not_know_is_refused(conn: asyncpg.Connection) -> None:
    """A misspelt name must not select everything (S9)."""
    for filter in ('{"handlr": "billing.charge_card"}', "[]", "null", '{"since": "soon"}'):
        with pytest.raises(asyncpg.DataError):
            await conn.fetch("SELECT core.failed_select($1::text::jsonb, 10)", filter)
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await conn.fetch("SELECT core.failed_select(NULL, 10)")


async def test_nothing_is_selected_by_accident(dsn: str, conn: asyncpg.Connection) -> None:
    """Before something changes, all has to be meant; and what matches nothing is an error (S9)."""
    await fail(conn, 2)
    async with Operator(dsn, actor=ACTOR) as operator:
        with pytest.raises(ConfigurationError, match="--all"):
            await operator.failed.select(Selection())
        assert len(await operator.failed.select(Selection(everything=True))) == 2
        with pytest.raises(ConfigurationError, match="matches no dead letter"):
            await operator.failed.select(Selection(handler="mail.thank"))
    with pytest.raises(ConfigurationError, match="together"):
        Selection(everything=True, handler=HANDLER)


@pytest.mark.parametrize("actor", ["", "   ", "x" * 201, "a\nb", "\x1b[31m", None])
def test_an_operator_has_a_name(actor: object) -> None:
    """S17, S22."""
    with pytest.raises(ConfigurationError) as refused:
        Operator("postgresql://h/db", actor=actor)  # type: ignore[arg-type]
    assert refused.value.field == "actor"
