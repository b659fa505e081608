"""What a producer makes up hides no backlog, no unserved channel and no dead letter of others from the metrics."""

from __future__ import annotations

import json
import time
import uuid

import asyncpg
import pytest

from holdfast.observability.gauges import gauges
from holdfast.postgres.operations.metrics import snapshot
from tests.operator.support import fail_with

pytestmark = pytest.mark.trust

HOT = {"channel": "zz_hot", "generation": "0"}
Samples = dict[str, list[tuple[dict[str, str], float]]]


async def read(conn: asyncpg.Connection) -> Samples:
    found = await snapshot(conn)
    return {each.name: [(dict(labels), value) for labels, value in each.samples] for each in gauges(found)}


async def went_silent(conn: asyncpg.Connection) -> None:
    """The worker of zz_hot went silent ten minutes ago, and 50 of its events have been due for an hour."""
    await conn.execute("SELECT core.subscribe('stock', 'stock.reserve', '{stock.low}')")
    await conn.execute(
        """SELECT core.worker_beat(gen_random_uuid(), 'hot', 'h', 1, '1', 0, '{zz_hot}', '{stock.reserve}');
           UPDATE core.workers SET heartbeat_at = now() - interval '10 min'"""
    )
    await unserved(conn, "zz_hot")


async def unserved(conn: asyncpg.Connection, channel: str) -> None:
    await conn.execute(
        """INSERT INTO core.outbox (event_type, source, payload, channel)
           SELECT 'stock.low', 'shop', '{}', $1 FROM generate_series(1, 50)""",
        channel,
    )
    await conn.execute(
        """UPDATE core.outbox SET created_at = now() - interval '1 hour', available_at = now() - interval '1 hour'
           WHERE channel = $1""",
        channel,
    )


async def flood(conn: asyncpg.Connection, channels: int, rows: int, at: str = "infinity") -> None:
    """Rows of a type that is wanted, in channels that sort before all others."""
    await conn.execute(
        """INSERT INTO core.outbox (event_type, source, payload, channel, available_at)
           SELECT 'stock.low', 'evil', '{}', '!' || n % $1, $3::text::timestamptz FROM generate_series(1, $2) n""",
        channels,
        rows,
        at,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "rows"), [(300, 300), (10_000, 10_000), (300, 101_000)])
@pytest.mark.parametrize("at", ["infinity", "now"])
async def test_a_flood_hides_no_channel_that_a_worker_served(
    conn: asyncpg.Connection, channels: int, rows: int, at: str
) -> None:
    """Its alert, its ages and its counts are those of before (SEC-1, OBS-3)."""
    await went_silent(conn)
    await flood(conn, channels, rows, at)
    began = time.monotonic()
    found = await read(conn)
    assert time.monotonic() - began < 10
    assert (HOT, 1.0) in found["channel_unserved"]
    assert len(found["channel_unserved"]) == 20
    ((_, oldest),) = found["outbox_oldest_seconds"]
    assert 3600 <= oldest < 4000
    handler, route = {**HOT, "handler": "stock.reserve"}, {**HOT, "route": "*/stock.low"}
    assert (handler, 50.0) in found["handler_pending"]
    assert (route, 50.0) in found["route_open"]
    assert (route, 1.0) in found["route_unserved_handlers"]
    assert [value >= 3600 for labels, value in found["handler_oldest_seconds"] if labels == handler] == [True]
    assert found["outbox_pending"][0][1] >= 50
    assert found["routes_left_out"] == [({}, channels + 1 - 200)]


async def test_of_channels_that_no_worker_served_the_oldest_is_named(conn: asyncpg.Connection) -> None:
    """By its age and not by its name, also behind routes that are not due (SEC-1, OBS-3)."""
    await unserved(conn, "zz_cold")
    await flood(conn, 300, 300, "infinity")
    await flood(conn, 300, 300, "now")
    await conn.execute(
        """INSERT INTO core.outbox (event_type, source, payload, channel, available_at)
           SELECT '!' || n, 'evil', '{}', 'zz_cold', 'infinity' FROM generate_series(1, 300) n"""
    )
    found = await read(conn)
    assert ({"channel": "zz_cold", "generation": "0"}, 1.0) in found["channel_unserved"]
    assert found["outbox_oldest_seconds"][0][1] >= 3600
    assert ({"channel": "zz_cold", "generation": "0", "route": "*/stock.low"}, 50.0) in found["route_open"]


async def test_workers_are_told_of_a_channel_that_one_served(conn: asyncpg.Connection) -> None:
    """The hundred channels in the log of a worker begin with it (SEC-1)."""
    await went_silent(conn)
    await flood(conn, 300, 300)
    assert ("zz_hot", 0) in [tuple(row) for row in await conn.fetch("SELECT * FROM core.unserved_channels()")]


async def test_a_flood_of_types_hides_no_route_that_is_wanted(conn: asyncpg.Connection) -> None:
    """A subscription by a pattern as well, in the channel that the flood is in (SEC-1, OBS-3)."""
    await conn.execute("SELECT core.subscribe('stock', 'stock.reserve', '{stock.*}')")
    await conn.execute(
        """INSERT INTO core.outbox (event_type, source, payload)
           SELECT '!' || n, 'evil', '{}' FROM generate_series(1, 1000) n"""
    )
    await conn.execute("INSERT INTO core.outbox (event_type, source, payload) VALUES ('stock.low', 'shop', '{}')")
    found = await read(conn)
    here = {"channel": "outbox_default", "generation": "0"}
    assert ({**here, "route": "*/stock.low"}, 1.0) in found["route_open"]
    assert ({**here, "handler": "stock.reserve"}, 1.0) in found["handler_pending"]
    assert found["routes_left_out"] == [({}, 801.0)]


async def test_planted_dead_letters_hide_none_of_a_handler(conn: asyncpg.Connection) -> None:
    """A producer records failures of handlers that it invents, of events that it invents (SEC-1, OBS-3)."""
    await conn.execute("SELECT core.subscribe('billing', 'billing.charge_card', '{order.placed}')")
    await fail_with(conn, [ValueError("no")] * 5, handler="billing.charge_card")
    event = {"source": "evil", "event_type": "e.t", "idempotency_key": "k", "event_version": 1, "payload": {}}
    handlers = [f"zz{n}.h{n}" for n in range(1000)]
    for _ in range(11):
        await conn.execute(
            "SELECT core.reaction_settle($1, '{}', $2, $3, $4, $4, false)",
            json.dumps({**event, "event_id": str(uuid.uuid4()), "occurred_at": "2026-01-01T00:00:00Z"}),
            handlers,
            ["rejected"] * 1000,
            ["no"] * 1000,
        )
    found = await read(conn)
    real = {"channel": "outbox_default", "generation": "0", "handler": "billing.charge_card"}
    assert (real, 5.0) in found["handler_failed"]
    assert len(found["handler_failed"]) == 201
    assert sum(value for _, value in found["handler_failed"]) == 11_005
