"""What an operator sees (OPS-1, OBX-4), without ever counting what is settled (OBS-4); and the schema's bell."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import asyncpg
import pytest

from holdfast.cli.output import print_json
from holdfast.cli.status import as_data, warnings
from holdfast.cli.workers import heartbeat
from holdfast.errors import MigrationError
from holdfast.postgres.operations import status
from holdfast.postgres.queries import Queries
from holdfast.postgres.schema import ddl
from holdfast.postgres.wakeup import mode as wakeup_mode
from tests.outbox import Lane, Outbox
from tests.worker.support import until

pytestmark = pytest.mark.both_postgres

PUBLISH = """
INSERT INTO core.outbox (event_type, source, payload, channel, target, created_at, available_at)
SELECT $1, 'shop', '{}', $2, $3, least(now(), due.at), due.at
FROM (SELECT now() + make_interval(secs => $4) AS at) due, generate_series(1, $5)
"""


async def publish(
    conn: asyncpg.Connection,
    event_type: str = "order.placed",
    *,
    channel: str = "outbox_default",
    target: str | None = None,
    due_in: float = 0,
    count: int = 1,
) -> None:
    await conn.execute(PUBLISH, event_type, channel, target, due_in, count)


async def subscribe(conn: asyncpg.Connection, handler: str, *event_types: str) -> None:
    await conn.execute("SELECT core.subscribe($1, $2, $3)", handler.partition(".")[0], handler, list(event_types))


async def beat(
    conn: asyncpg.Connection, name: str, *handlers: str, channels: tuple[str, ...] = ("outbox_default",)
) -> None:
    statement = "SELECT core.worker_beat($1, $2, 'host', 1, '1.0', 0, $3, $4)"
    await conn.execute(statement, uuid.uuid5(uuid.NAMESPACE_DNS, name), name, list(channels), list(handlers))


def on_route(found: status.Status, route: str, channel: str = "outbox_default") -> status.RouteStatus:
    (only,) = [each for each in found.routes if (each.route, each.channel) == (route, channel)]
    return only


async def test_an_empty_outbox(conn: asyncpg.Connection) -> None:
    """Zeros, and nothing to warn about (OPS-1)."""
    found = await status.read(conn)
    assert (found.pending, found.in_flight, found.delayed, found.failed, found.oldest) == (0, 0, 0, 0, None)
    assert (found.routes, found.unserved, found.workers, found.wakeup_mode) == ([], [], [], "when_idle")
    assert warnings(found) == []


async def test_counts_by_state(conn: asyncpg.Connection) -> None:
    """Pending, in flight, delayed and failed, of which a cancelled event is none (OPS-1)."""
    outbox = Outbox(conn)
    await subscribe(conn, "billing.charge_card", "order.placed")
    await publish(conn, count=5)
    await publish(conn, due_in=3600, count=2)
    held = await outbox.hold(Lane(limit=3))
    assert await outbox.fail(held[0]) == []
    pending = await conn.fetchval("SELECT id FROM core.outbox WHERE status = 'pending' ORDER BY available_at LIMIT 1")
    await conn.execute("SELECT core.outbox_cancel_event($1, 'test')", pending)
    found = await status.read(conn)
    assert (found.pending, found.in_flight, found.delayed, found.failed) == (1, 2, 2, 1)
    assert found.expired_leases == 0
    await conn.execute("UPDATE core.outbox SET lease_expires_at = now() - interval '1 s' WHERE status = 'in_flight'")
    found = await status.read(conn)
    assert found.expired_leases == 2
    assert any("have an expired lease" in warning for warning in warnings(found))
    await conn.execute("SELECT core.outbox_cancel_event(id, 'test') FROM core.outbox WHERE status = 'in_flight'")


async def test_lanes_name_the_handlers_and_the_age(conn: asyncpg.Connection) -> None:
    """The backlog per handler, since when it is due, and who is missing (OPS-1)."""
    await subscribe(conn, "billing.charge_card", "order.*")
    await subscribe(conn, "mail.confirm", "order.placed")
    await publish(conn, due_in=-60, count=3)
    await publish(conn, "order.paid", due_in=600)
    await beat(conn, "one", "billing.charge_card")
    found = await status.read(conn)
    placed = on_route(found, "*/order.placed")
    assert (placed.open, placed.handlers) == (3, ["billing.charge_card", "mail.confirm"])
    assert placed.oldest is not None and 59 < placed.oldest < 90
    assert placed.unserved == ["mail.confirm"]
    paid = on_route(found, "*/order.paid")
    assert (paid.handlers, paid.oldest, paid.unserved) == (["billing.charge_card"], None, [])
    assert found.oldest == placed.oldest
    assert [warning for warning in warnings(found) if "mail.confirm" in warning]
    version = await conn.fetchval("SELECT version FROM core.subscriptions_version")
    split = """
        SELECT n FROM core.outbox_split($1, 'outbox_default', 0, '{*/order.placed}', '{1}', '{10}', '{-infinity}',
                                        '{00000000-0000-0000-0000-000000000000}')
    """
    assert await conn.fetchval(split, version) == 3
    found = await status.read(conn)
    assert {each.route: each.open for each in found.routes} == {
        "*/order.paid": 1,
        "billing.charge_card": 3,
        "mail.confirm": 3,
    }
    assert on_route(found, "mail.confirm").unserved == ["mail.confirm"]


async def test_events_that_nobody_wants_are_named(conn: asyncpg.Connection) -> None:
    """Unrouted, by type and by target; a retired handler wants nothing (LSN-7, D6)."""
    await subscribe(conn, "billing.charge_card", "order.placed")
    await publish(conn, "order.lost")
    await publish(conn, "order.placed", target="shipping")
    await publish(conn, "order.placed", target="billing")
    found = await status.read(conn)
    assert {each.route for each in found.unrouted} == {"*/order.lost", "shipping/order.placed"}
    assert as_data("core", found, {})["unrouted"] == ["order.lost", "order.placed"]
    await conn.execute("SELECT core.retire('billing.charge_card')")
    assert len((await status.read(conn)).unrouted) == 3


async def test_channels_that_nobody_serves_are_named(conn: asyncpg.Connection) -> None:
    """By a living worker of the same generation; one that stopped or fell silent does not count (OBX-4)."""
    await subscribe(conn, "billing.charge_card", "order.placed")
    await publish(conn)
    await publish(conn, channel="hot")
    assert (await status.read(conn)).unserved == [("hot", 0), ("outbox_default", 0)]
    await beat(conn, "one", "billing.charge_card")
    assert (await status.read(conn)).unserved == [("hot", 0)]
    await beat(conn, "two", "billing.charge_card", channels=("hot",))
    assert (await status.read(conn)).unserved == []
    await conn.execute("UPDATE core.workers SET heartbeat_at = now() - interval '61 s' WHERE name = 'two'")
    found = await status.read(conn)
    assert found.unserved == [("hot", 0)]
    assert {worker.name: worker.living for worker in found.workers} == {"one": True, "two": False}
    assert any("two is silent" in warning for warning in warnings(found))
    assert any("--channel hot" in warning for warning in warnings(found))
    await conn.execute("SELECT core.worker_stopped(id) FROM core.workers WHERE name = 'one'")
    found = await status.read(conn)
    assert found.unserved == [("hot", 0), ("outbox_default", 0)]
    assert [worker.name for worker in found.workers] == ["two"]


async def test_a_worker_that_was_killed_is_not_shown_as_alive(dsn: str, conn: asyncpg.Connection) -> None:
    """It counts as living for a minute, but its sessions are gone at once, and then its heartbeats are late (OPS-1)."""
    await subscribe(conn, "billing.charge_card", "order.placed")
    await beat(conn, "one", "billing.charge_card")
    worker = uuid.uuid5(uuid.NAMESPACE_DNS, "one")
    named = {"application_name": f"holdfast claim {worker}"}
    session = await asyncpg.connect(dsn, server_settings=named)

    async def seen(seconds: int) -> tuple[str, list[str]]:
        change = "UPDATE core.workers SET heartbeat_at = now() - $1 * interval '1 s'"
        await conn.execute(change, seconds)
        found = await status.read(conn)
        assert found.unserved == [], "another worker may need its minute"
        return heartbeat(found.workers[0]), warnings(found)

    assert await seen(3) == ("3 s ago", [])
    shown, (warning,) = await seen(25)
    assert shown == "LATE, heard of 25 s ago" and "one has missed heartbeats" in warning
    await session.close()

    async def ended() -> bool:
        return not await conn.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1", *named.values()
        )

    await until(ended, what="the session has ended")
    assert await seen(3) == ("3 s ago, no session", [])
    shown, (warning,) = await seen(25)
    assert shown == "GONE, heard of 25 s ago"
    assert warning.endswith(f"if its process is gone: holdfast workers release {worker} --force")


async def test_counts_end_at_their_limit(conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a huge backlog stays cheap, and says that there is more (S9)."""
    monkeypatch.setattr(status, "MOST", 4)
    monkeypatch.setattr(status, "MOST_IN_ROUTE", 3)
    await publish(conn, count=6)
    found = await status.read(conn)
    assert (found.pending, found.open_is_more) == (4, True)
    assert on_route(found, "*/order.placed").open == 3


async def test_an_operator_may_look(conn: asyncpg.Connection) -> None:
    """With the rights of holdfast_operator and no others (OBX-2)."""
    await publish(conn)
    await conn.execute("SET ROLE holdfast_operator")
    assert (await status.read(conn)).pending == 1
    await conn.execute("RESET ROLE")


async def test_the_answer_is_json(conn: asyncpg.Connection, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is in it (OPS-1)."""
    await publish(conn)
    await beat(conn, "one", "billing.charge_card")
    print_json(as_data("core", await status.read(conn), {}))
    found = json.loads(capsys.readouterr().out)
    assert found["pending"] == 1
    assert found["workers"][0]["name"] == "one"


async def test_settled_rows_are_never_read(conn: asyncpg.Connection) -> None:
    """The plans use the partial indexes even where statistics speak for reading everything (OBS-4)."""
    queries = Queries("core")
    await conn.execute(
        """
        INSERT INTO core.outbox (event_type, source, payload, status, settled_at, delivered_at, handler_name)
        SELECT 'order.placed', 'shop', '{}', 'delivered', now(), now(), 'a.b' FROM generate_series(1, 20000)
        """
    )
    await publish(conn, count=20)
    await conn.execute("ANALYZE core.outbox")
    walk = {"most_channels": status.MOST_CHANNELS, "most_lanes": status.MOST_LANES}
    async with conn.transaction():
        await conn.execute(queries.asyncpg("begin_read").sql)
        for name, values in (
            ("count_open", {"most": status.MOST}),
            ("count_failed", {"most": status.MOST}),
            ("count_archived", {"most": status.MOST}),
            ("list_routes", {"most_routes": 200, "most_in_route": 10_000, "most": status.MOST, **walk}),
            ("list_unserved", {"most_unserved": 20, **walk}),
        ):
            statement = queries.asyncpg(name)
            explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement.sql}"
            plan = json.loads(await conn.fetchval(explain, *statement.bind(values)))[0]["Plan"]
            indexes = ("outbox_lane", "outbox_keyed", "outbox_dlq")
            assert all(node.get("Index Name", "outbox_lane") in indexes for node in _outbox(plan))
            assert not [node for node in _outbox(plan) if node["Node Type"] == "Seq Scan"]
            assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 400, name


def _outbox(node: dict[str, Any]) -> list[dict[str, Any]]:
    below = [each for child in node.get("Plans", []) for each in _outbox(child)]
    return [*below, node] if node.get("Relation Name") == "outbox" else below


# --- the bell ---


async def heard(dsn: str, conn: asyncpg.Connection) -> int:
    """How many notifications two commits of three events each send."""
    listener = await asyncpg.connect(dsn)
    try:
        notes: asyncio.Queue[str] = asyncio.Queue()
        await listener.add_listener("outbox_default", lambda *args: notes.put_nowait(args[-1]))
        for _ in range(2):
            await publish(conn, count=3)
        await conn.execute("SELECT pg_notify('outbox_default', 'end')")
        count = 0
        while await asyncio.wait_for(notes.get(), 20) != "end":
            count += 1
        return count
    finally:
        await listener.close()


DEFINITION = "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgname = 'outbox_bell'"


async def test_the_bell_can_be_set(dsn: str, conn: asyncpg.Connection) -> None:
    """When somebody sleeps, with every commit, or never; and set back it is what the migration made (LSN-1)."""
    original = await conn.fetchval(DEFINITION)
    assert await wakeup_mode.mode(dsn) == "when_idle"
    assert await heard(dsn, conn) == 0  # nobody sleeps
    assert await wakeup_mode.set_mode(dsn, "always") == "when_idle"
    assert await heard(dsn, conn) == 2  # once for each commit
    assert await conn.fetchval(DEFINITION) == original.replace("('when_idle')", "('always')") != original
    assert await wakeup_mode.set_mode(dsn, "never") == "always"
    assert await heard(dsn, conn) == 0
    assert (await status.read(conn)).wakeup_mode == "never"
    assert await wakeup_mode.set_mode(dsn, "when_idle") == "never"
    assert await wakeup_mode.mode(dsn) == "when_idle"
    assert await conn.fetchval(DEFINITION) == original
    assert await wakeup_mode.set_mode(dsn, "when_idle") == "when_idle"


async def test_setting_the_bell_gives_way_to_producers(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits two seconds for the table at most, and says who is in the way (B14)."""
    monkeypatch.setattr(ddl, "LOCK_TRIES", 1)
    holder = await asyncpg.connect(dsn, server_settings={"application_name": "the holder"})
    try:
        async with holder.transaction():
            await publish(holder)
            with pytest.raises(MigrationError, match="the holder"):
                await wakeup_mode.set_mode(dsn, "always")
    finally:
        await holder.close()
    assert await wakeup_mode.mode(dsn) == "when_idle"


async def test_a_schema_without_holdfast_is_named(empty_dsn: str) -> None:
    with pytest.raises(MigrationError, match="there is no Holdfast"):
        await wakeup_mode.mode(empty_dsn)
