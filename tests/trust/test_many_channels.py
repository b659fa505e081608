"""No number of channels or content classes that a producer makes up hides those of others (OPS-6, GEN-2, OBX-4)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from holdfast.cli.status import warnings
from holdfast.operator import Operator
from holdfast.postgres.doctor import examine
from tests.operator.support import beat
from tests.outbox import Outbox, connect

pytestmark = [pytest.mark.trust, pytest.mark.both_postgres]

FLOOD = 10_001


@pytest.fixture
async def outbox(dsn: str) -> AsyncIterator[Outbox]:
    """Three events of generation 1, and a flood of channels that sort before theirs."""
    connection = await connect(dsn)
    outbox = Outbox(connection)
    await connection.execute("INSERT INTO core.deployments (generation) VALUES (1), (2)")
    await outbox.insert_many(3, channel="'outbox_gen_1'", generation="1")
    await outbox.insert_many(FLOOD, "flood", channel="'AAA' || n", generation="0", available_at="'infinity'")
    yield outbox
    await connection.close()


async def test_a_generation_with_open_events_is_known(dsn: str, outbox: Outbox) -> None:
    """It is not retired, and its events are moved (GEN-2)."""
    async with Operator(dsn, actor="ann@example.org") as operator:
        found = {each.generation: each for each in await operator.generations.all()}
        assert (found[1].open, found[1].channels) == (3, ["outbox_gen_1"])
        assert (found[0].open, len(found[0].unserved)) == (FLOOD, FLOOD)
        assert [tuple(row) for row in await outbox.connection.fetch("SELECT * FROM core.generation_open(1, 9)")] == [
            ("outbox_gen_1", 3)
        ]
        (retired,) = await outbox.connection.fetch("SELECT * FROM core.generation_retire(1, false, 'ann')")
        assert (retired["open"], retired["retired"]) == (3, False)
        assert (await operator.generations.move(1, 2)).moved == 3


async def test_status_and_doctor_say_it_in_one_line(dsn: str, outbox: Outbox) -> None:
    """The channels of deployments are named, and the flood is counted (OPS-6)."""
    await beat(outbox.connection, "w", "a.b")
    async with Operator(dsn, actor="ann@example.org") as operator:
        status = await operator.status()
        metrics = await operator.metrics()
    assert status.unserved_channels == FLOOD + 1
    assert ("outbox_gen_1", 1) in status.unserved
    assert "outbox_gen_1" in {route.channel for route in status.routes}
    said = warnings(status)
    assert len(said) < 50
    assert f"{FLOOD + 1 - 20} more channels have open events and no living worker" in said
    assert metrics.count("holdfast_channel_unserved{") == 20
    findings = (await examine(outbox.connection)).findings
    assert len([each for each in findings if each.code in ("channel-unserved", "event-unrouted")]) < 50
    (flood,) = [each for each in findings if each.code == "channel-flood"]
    assert flood.object == f"{FLOOD + 1 - 20} more channels"
    assert [each.object for each in findings if each.code == "generation-unserved"] == ["generation 1"]


async def test_workers_are_told_of_some(outbox: Outbox) -> None:
    """Those of deployments first (OPS-6)."""
    found = await outbox.connection.fetch("SELECT * FROM core.unserved_channels()")
    assert len(found) == 100
    assert ("outbox_gen_1", 1) in [tuple(row) for row in found]


async def test_a_step_of_the_clock_is_repaired_behind_the_flood(outbox: Outbox) -> None:
    """Events that were due at once, in a channel and a route that come last (LSN-17)."""
    await outbox.connection.execute(
        f"""INSERT INTO core.outbox (event_type, source, payload, available_at)
            SELECT 'a' || n, 'shop', '{{}}', 'infinity' FROM generate_series(1, {FLOOD}) n"""
    )
    late = await outbox.insert_many(
        2, "z.last", channel="'zzz'", available_at="now() + interval '1 hour'", created_at="now() + interval '2 hours'"
    )
    late += await outbox.insert_many(
        2, "z.last", available_at="now() + interval '1 hour'", created_at="now() + interval '2 hours'"
    )
    assert await outbox.value("SELECT core.clock_repair(1000)") == len(late)


@pytest.mark.timeout(300)
async def test_retention_reaches_the_last_class(dsn: str, conn: asyncpg.Connection) -> None:
    """With more classes before it than a list of them has (OBX-4)."""
    settled = "status, settled_at, delivered_at, created_at, handler_name"
    ago = "'delivered', now() - interval '90 days', now() - interval '90 days', now() - interval '90 days', 'a.b'"
    await conn.execute(
        f"""INSERT INTO core.outbox (event_type, source, payload, content_class, {settled})
            SELECT 'flood', 'evil', '{{}}', 'AAA' || lpad(n::text, 6, '0'), {ago} FROM generate_series(1, {FLOOD}) n;
            INSERT INTO core.outbox (event_type, source, payload, {settled}) VALUES ('old', 'shop', '{{}}', {ago})"""
    )
    names, after = [], ""
    while page := await conn.fetch("SELECT core.retention_classes('delivered', $1)", after):
        names += [name for (name,) in page]
        after = names[-1]
    assert (len(names), names[-1]) == (FLOOD + 1, "operations")
    await conn.execute("DELETE FROM core.outbox WHERE content_class BETWEEN 'AAA001020' AND 'AAA999999'")
    async with Operator(dsn, actor="ann@example.org") as operator:
        await operator.retention.sweep()
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE deleted_at IS NULL") == 0
