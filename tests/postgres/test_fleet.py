"""Which channels are served, by whom, and which are not (OBX-4)."""

from __future__ import annotations

import uuid
from uuid import UUID

import asyncpg
import pytest

from holdfast.postgres.fleet import Fleet, Registration
from holdfast.postgres.queries import Queries
from tests.outbox import CHANNEL, Outbox

pytestmark = pytest.mark.both_postgres

FLEET = Fleet(Queries())


async def join(connection: asyncpg.Connection, *channels: str, generation: int = 0) -> UUID:
    worker = Registration(uuid.uuid4(), "w", "h", 1, "0.1", generation, list(channels), [])
    await FLEET.beat(connection, worker)
    return worker.id


async def test_a_channel_with_open_events_and_no_worker_is_unserved(outbox: Outbox) -> None:
    """Per generation; a worker that stopped, or fell silent for a minute, serves nothing (OBX-4)."""
    connection = outbox.connection
    await outbox.connection.execute("TRUNCATE core.workers")
    assert await FLEET.unserved(connection) == []
    await outbox.insert()
    await outbox.insert(channel="hot")
    await outbox.insert(channel="outbox_gen_4", generation=4)
    everything = [("hot", 0), (CHANNEL, 0), ("outbox_gen_4", 4)]
    assert await FLEET.unserved(connection) == everything
    plain = await join(connection, CHANNEL, "hot", "idle")
    await join(connection, "outbox_gen_4", generation=3)
    assert await FLEET.unserved(connection) == [("outbox_gen_4", 4)]
    await join(connection, "outbox_gen_4", generation=4)
    assert await FLEET.unserved(connection) == []

    await FLEET.gone(connection, plain)
    assert await FLEET.unserved(connection) == everything[:2]
    await connection.execute("UPDATE core.workers SET heartbeat_at = now() - interval '61 seconds'")
    assert await FLEET.unserved(connection) == everything


async def test_what_is_settled_needs_no_worker(outbox: Outbox) -> None:
    """Only open events are waited for (OBX-4)."""
    await outbox.connection.execute("TRUNCATE core.workers")
    await outbox.insert()
    assert await FLEET.unserved(outbox.connection) == [(CHANNEL, 0)]
    [held] = await outbox.hold()
    assert await outbox.deliver(held) == []
    assert await FLEET.unserved(outbox.connection) == []
