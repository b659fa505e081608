"""The audit (S17): who did what, in the same transaction, for ever."""

from __future__ import annotations

from datetime import timedelta

import asyncpg
import pytest

from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Refused
from tests.operator.support import ACTOR, HANDLER, fail, subscribe

FORGERIES = ("UPDATE core.audit SET actor = 'nobody'", "DELETE FROM core.audit", "TRUNCATE core.audit")
REFUSE = "SELECT core.audit_refused('ann', $1, $2, $3::text::jsonb, $4)"


async def test_nobody_changes_what_was_written_down(conn: asyncpg.Connection) -> None:
    """Not the owner, and not a superuser by accident (S17)."""
    await subscribe(conn)
    await conn.execute("SELECT core.retire($1, NULL, 'ann')", HANDLER)
    before = await conn.fetch("SELECT * FROM core.audit")
    assert len(before) == 1
    for role in (None, "holdfast_owner"):
        for forgery in FORGERIES:
            with pytest.raises(asyncpg.InsufficientPrivilegeError, match="append-only") as refused:
                async with conn.transaction():
                    if role:
                        await conn.execute(f"SET LOCAL ROLE {role}")
                    await conn.execute(forgery)
            assert refused.value.hint
    assert await conn.fetch("SELECT * FROM core.audit") == before


async def test_what_is_rolled_back_leaves_no_line(conn: asyncpg.Connection) -> None:
    """The line and the change are one transaction (S17)."""
    (id,) = await fail(conn)
    transaction = conn.transaction()
    await transaction.start()
    assert await conn.fetchval("SELECT core.outbox_replay($1, 0, 'ann')", id) == 1
    assert await conn.fetchval("SELECT count(*) FROM core.audit") == 1
    await transaction.rollback()
    assert await conn.fetchval("SELECT count(*) FROM core.audit") == 0
    assert await conn.fetchval("SELECT status FROM core.outbox") == "failed"


async def test_every_sql_verb_writes_its_line(conn: asyncpg.Connection) -> None:
    """Also for those who call the functions from psql (S17)."""
    await subscribe(conn)
    ids = await fail(conn, 5)
    calls = {
        "replay": ("SELECT core.outbox_replay($1, 0, 'ann')", ids[0]),
        "cancel": ("SELECT core.outbox_cancel_event($1, 'ann', 'wrong')", ids[0]),
        "discard": ("SELECT core.outbox_discard(ARRAY[$1::uuid], 'ann')", ids[1]),
        "restore": ("SELECT core.outbox_restore(ARRAY[$1::uuid], 'ann')", ids[1]),
        "edit": ("SELECT core.outbox_edit($1, core.uuid7(), '{}', 0, 'ann')", ids[2]),
        "note": ("SELECT core.failure_note($1::text, 'E:1', 'known', 'ann')", HANDLER),
        "handler.retire": ("SELECT core.retire($1::text)", HANDLER),
        "generation.begin": ("SELECT core.generation_begin($1, 'ann')", "v1"),
        "generation.move": ("SELECT core.generation_move($1::bigint, 7, 10, 'ann')", 3),
        "generation.retire": ("SELECT core.generation_retire($1::bigint, false, 'ann')", 3),
    }
    for action, (statement, argument) in calls.items():
        await conn.fetch(statement, argument)
        line = await conn.fetchrow("SELECT actor, action, login FROM core.audit ORDER BY id DESC LIMIT 1")
        login = await conn.fetchval("SELECT session_user")
        assert tuple(line) == (login if action == "handler.retire" else "ann", action, login)


@pytest.mark.parametrize("actor", [None, "", "x" * 201, "a\x1b[2Jb"])
async def test_a_line_without_a_name_is_refused(conn: asyncpg.Connection, actor: str | None) -> None:
    """And with it the change (S17, S22)."""
    ids = await fail(conn)
    for statement in (
        "SELECT core.outbox_discard($1, $2)",
        "SELECT core.outbox_restore($1, $2)",
        "SELECT core.plan_create($1, NULL, 10, 0, 1, 1, 0.1, '1 minute', false, $2, NULL)",
    ):
        with pytest.raises((asyncpg.InvalidParameterValueError, asyncpg.NotNullViolationError)):
            await conn.fetch(statement, ids, actor)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE deleted_at IS NULL AND status = 'failed'") == 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("p_problem", {"problem": None}),
        ("p_problem", {"problem": ""}),
        ("p_action", {"action": None}),
        ("p_action", {"action": ""}),
        ("p_action", {"action": "x" * 101}),
        ("p_action", {"action": "replay\n"}),
        ("p_reason", {"reason": "two\nlines"}),
        ("p_arguments", {"arguments": "[]"}),
    ],
)
async def test_a_refusal_says_what_it_is(conn: asyncpg.Connection, field: str, values: dict[str, str | None]) -> None:
    """Nobody writes a line by hand that could be taken for something done (S17, S22)."""
    given = {"action": "replay", "reason": None, "arguments": "{}", "problem": "not allowed"} | values
    with pytest.raises(asyncpg.InvalidParameterValueError, match=field):
        await conn.execute(REFUSE, *given.values())
    assert await conn.fetchval("SELECT count(*) FROM core.audit") == 0


async def test_a_refusal_names_no_rows(conn: asyncpg.Connection) -> None:
    """Whatever the caller claims, and also without arguments (S17)."""
    for arguments in (None, '{"ids": ["x"], "refused": null, "rows": 1}'):
        await conn.execute(REFUSE, "replay", "why", arguments, "not allowed")
    lines = await conn.fetch("SELECT arguments - 'rows' = '{\"refused\": \"not allowed\"}' AS marked FROM core.audit")
    assert [line["marked"] for line in lines] == [True, True]


async def test_a_reason_is_one_line(conn: asyncpg.Connection) -> None:
    """For those who call the functions from psql as well (S22)."""
    ids = await fail(conn)
    with pytest.raises(asyncpg.InvalidParameterValueError, match="p_reason has control characters"):
        await conn.fetch("SELECT core.outbox_discard($1, 'ann', $2)", ids, "\x1b[2J")
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE deleted_at IS NULL") == 1


async def test_the_trail_is_filtered_and_paged(dsn: str, conn: asyncpg.Connection) -> None:
    """OPS-1, S17."""
    ids = await fail(conn, 6)
    async with Operator(dsn, actor="bob") as bob:
        await bob.failed.discard(ids[:1])
    async with Operator(dsn, actor=ACTOR) as operator:
        await operator.failed.discard(ids[1:3], reason="tests")
        await operator.failed.replay(ids[3:])
        made = await operator.plans.create(ids=ids[:2])
        await operator.plans.cancel(made.plan.id)
        with pytest.raises(Refused):
            await operator.plans.pause(made.plan.id)
        everything = await operator.audit.page()
        assert [line.action for line in everything] == [
            "plan.pause", "plan.cancel", "plan.create", "replay", "discard", "discard",
        ]  # fmt: skip
        assert everything[0].arguments["refused"] == f"plan {made.plan.id} is cancelled"
        assert [line.id for line in await operator.audit.page(actor="bob")] == [everything[-1].id]
        assert [line.action for line in await operator.audit.page(action="plan")] == [
            "plan.pause", "plan.cancel", "plan.create",
        ]  # fmt: skip
        assert [line.rows for line in await operator.audit.page(action="discard")] == [2, 1]
        assert await operator.audit.page(since=everything[0].at + timedelta(seconds=1)) == []
        first = await operator.audit.page(limit=4)
        rest = await operator.audit.page(limit=4, before=first[-1].id)
        assert [*first, *rest] == everything
        for bad in ({"limit": 0}, {"limit": 1_001}, {"actor": ""}, {"before": -1}, {"action": "a b"}):
            with pytest.raises(ConfigurationError):
                await operator.audit.page(**bad)  # type: ignore[arg-type]
