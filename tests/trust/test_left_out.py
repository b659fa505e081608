"""Lists and remedies of operators: what a producer makes up hides nothing, and what is left out is counted (OPS-6)."""

from __future__ import annotations

import asyncio
import json
import subprocess

import asyncpg
import pytest
from typer.testing import CliRunner

from holdfast.characters import CONTROL, shell_word, sql_string
from holdfast.cli.app import make_app
from holdfast.operator import Operator
from holdfast.postgres.doctor import examine
from tests.logins import Logins
from tests.operator.support import beat
from tests.servers import SessionServer

pytestmark = pytest.mark.trust

PLANTED = 1_500


async def test_planted_handlers_hide_none(dsn: str, conn: asyncpg.Connection) -> None:
    """Those of living workers come first, then those that are subscribed, and the rest is counted (OPS-6)."""
    await conn.execute(
        f"""INSERT INTO core.subscriptions (domain_context, handler_name, event_type, retired_at, named_by)
            SELECT 'aa', 'aa.h' || n, 'zz.z', now(), 'evil' FROM generate_series(1, {PLANTED}) n"""
    )
    await conn.execute("SELECT core.subscribe('zz', 'zz.live', '{order.placed}')")
    await conn.execute("SELECT core.subscribe('zy', 'zy.stopped', '{order.placed}')")
    await beat(conn, "w", "zz.live")
    async with Operator(dsn, actor="ann@example.org") as operator:
        found = await operator.handlers.all()
        assert {"zz.live", "zy.stopped"} <= {each.handler_name for each in found}
        assert (len(found), found.left_out) == (1_000, PLANTED + 2 - 1_000)
        hidden = ({f"aa.h{n}" for n in range(1, PLANTED + 1)} - {each.handler_name for each in found}).pop()
        assert await operator.handlers.retire(hidden, dry_run=True) == 0, "it is known"
    for options in ([], ["--json"]):
        shown = await asyncio.to_thread(CliRunner().invoke, make_app(), ["handlers", "list", "--dsn", dsn, *options])
        assert "502 more are not listed" in shown.output
        assert "zz.live" in shown.stdout
        if options:
            assert len(json.loads(shown.stdout)) == 1_000


async def test_planted_sources_are_counted(dsn: str, conn: asyncpg.Connection, postgres_server: SessionServer) -> None:
    """Sources with the most events are named first (OPS-6)."""
    await conn.execute(
        """INSERT INTO core.outbox (event_type, source, payload)
           SELECT 't.t', 'a' || n, '{}'::jsonb FROM generate_series(1, 40) n
           UNION ALL SELECT 't.t', 'payroll', '{}' FROM generate_series(1, 3)"""
    )
    logins = Logins(postgres_server, dsn)
    logins.create()
    try:
        found = [each for each in (await examine(conn)).findings if each.code == "source-unowned"]
    finally:
        logins.drop()
    assert found[0].object == "payroll"
    assert found[-1].object == "21 more sources"


async def test_planted_types_are_counted(dsn: str, conn: asyncpg.Connection) -> None:
    """doctor names a flood of types, and types that a handler subscribes to are looked at all the same (OPS-6)."""
    await conn.execute("SELECT core.subscribe('billing', 'billing.charge_card', '{order.placed}')")
    await conn.execute(
        """INSERT INTO core.outbox (event_type, source, payload, available_at)
           SELECT 'order.a' || n, 'evil', '{}', now() + interval '110 minutes' FROM generate_series(1, 12000) n;
           INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}')"""
    )
    async with Operator(dsn, actor="ann@example.org") as operator:
        status = await operator.status()
    assert "*/order.placed" in {route.route for route in status.routes}
    assert len(status.routes) + status.routes.left_out >= 10_000
    (flood,) = [each for each in (await examine(conn)).findings if each.code == "route-flood"]
    assert flood.evidence.startswith("12001 open; at least 12001 routes")
    shown = await asyncio.to_thread(CliRunner().invoke, make_app(), ["status", "--dsn", dsn])
    assert shown.stdout.count("\n") < 150


@pytest.mark.parametrize(
    "name",
    [
        "order\u200b.placed",
        "order\u2028.x",
        "a'b\u200b",
        "a\\b\u202e",
        "a\U000e0041b",
        "x','y');--",
        "plain",
        "a\\b",
        "\ufe0f",
    ],
)
async def test_a_remedy_can_be_pasted(conn: asyncpg.Connection, name: str) -> None:
    """A name with characters that cannot be seen is written with escapes, which shell and Postgres read (OPS-6)."""
    word, literal = shell_word(name), sql_string(name)
    assert not CONTROL.search(word + literal)
    told = subprocess.run(
        ["bash", "-c", f"printf %s {word}"], capture_output=True, check=True, env={"LC_ALL": "C.utf8"}
    )
    assert told.stdout.decode() == name
    assert await conn.fetchval(f"SELECT {literal}") == name


async def test_doctor_escapes_what_cannot_be_seen(dsn: str, conn: asyncpg.Connection) -> None:
    """The command that cancels what waits names the route as it is (OPS-6)."""
    await conn.execute("ALTER TABLE core.outbox DISABLE TRIGGER USER")  # rows written past the checks
    await conn.execute(
        """INSERT INTO core.outbox (event_type, source, payload, idempotency_key)
           VALUES (E'order\\u200b.placed', 's', '{}', 'k')"""
    )
    (found,) = [each for each in (await examine(conn)).findings if each.code == "event-unrouted"]
    assert r"--route $'*/order\u200b.placed'" in found.remedy
