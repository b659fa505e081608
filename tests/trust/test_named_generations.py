"""A worker that names a generation which was never begun leads nothing there, while others live (SEC-1, GEN-1)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from holdfast.operator import Operator
from tests.operator.support import fail
from tests.outbox import Outbox, connect

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

ROGUE = 987654321
BEAT = "SELECT core.worker_beat(gen_random_uuid(), $1, 'host', 1, '1.0', $2, $3, '{billing.charge_card}')"
DECLARE = """SELECT core.schedule_declare(
    'a.tick', NULL, NULL, $1, 'latest', 'tick', 'holdfast', NULL, 1::smallint, '{}', $2, false)"""


@pytest.fixture(params=[0, 4])
async def outbox(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[Outbox]:
    """An honest worker of a deployment, or of none, and one that names a number and its channels."""
    connection = await connect(dsn)
    if request.param:
        await connection.execute("INSERT INTO core.deployments (generation) VALUES ($1)", request.param)
    channel = await connection.fetchval("SELECT core.channel_of($1)", request.param)
    await connection.execute(BEAT, "honest", request.param, [channel])
    await connection.execute(BEAT, "rogue", ROGUE, ["outbox_default", f"outbox_gen_{ROGUE}"])
    outbox = Outbox(connection)
    outbox.honest = request.param  # type: ignore[attr-defined]
    yield outbox
    await connection.close()


async def test_replays_and_plans_go_where_they_are_handled(dsn: str, outbox: Outbox) -> None:
    """By one rule, of a single row and of a plan (DLQ-4, GEN-1)."""
    single, planned = await fail(outbox.connection, 2)
    async with Operator(dsn, actor="ann@example.org") as operator:
        assert (await operator.failed.replay([single])).generation == outbox.honest  # type: ignore[attr-defined]
        plan = (await operator.plans.create(ids=[planned], canary=0)).plan.id
        token = "00000000-0000-7000-8000-000000000001"
        await outbox.connection.execute("SELECT core.plan_take($1, $2, 'r', 'ann', '1 minute')", plan, token)
        await outbox.connection.execute("SELECT core.plan_step($1, $2, 10, '1 minute')", plan, token)
    rows = await outbox.connection.fetch("SELECT status, generation FROM core.outbox")
    assert [tuple(row) for row in rows] == [("pending", outbox.honest)] * 2  # type: ignore[attr-defined]


async def test_a_schedule_is_fired_where_it_is_handled(outbox: Outbox) -> None:
    """Whoever fires it (IDM-4)."""
    await outbox.value(DECLARE, timedelta(seconds=1), outbox.honest)  # type: ignore[attr-defined]
    await outbox.connection.execute("UPDATE core.schedules SET owed_after = owed_after - interval '1 minute'")
    version = await outbox.value("SELECT version FROM core.schedules")
    slot = datetime.now(UTC) - timedelta(seconds=10)
    fire = "SELECT core.schedule_fire('a.tick', $1, ARRAY[$2::timestamptz], $2, NULL, $3, NULL)"
    assert await outbox.value(fire, version, slot, ROGUE)
    assert await outbox.value("SELECT generation FROM core.outbox") == outbox.honest  # type: ignore[attr-defined]
    assert await outbox.value("SELECT core.schedule_trigger('a.tick', 'ann@example.org')") is not None
    assert await outbox.value("SELECT count(DISTINCT generation) FROM core.outbox") == 1


async def test_a_declaration_locks_no_deployment_out(outbox: Outbox) -> None:
    """Neither one that is made now, nor one that has stood there since no other worker lived (IDM-4)."""
    honest = outbox.honest  # type: ignore[attr-defined]
    assert await outbox.value(DECLARE, timedelta(hours=1), ROGUE) == "declared"
    assert await outbox.value("SELECT generation FROM core.schedules") == honest
    await outbox.connection.execute("UPDATE core.schedules SET generation = $1, next_slot = 'infinity'", ROGUE)
    assert await outbox.value(DECLARE, timedelta(hours=2), honest) == "declared"
    found = await outbox.connection.fetchrow("SELECT generation, every FROM core.schedules")
    assert tuple(found) == (honest, timedelta(hours=2))
