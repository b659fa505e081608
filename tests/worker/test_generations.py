"""Deployment generations and channels: who takes what, and who leaves it alone."""

from __future__ import annotations

import time

import asyncpg

from holdfast import EventEnvelope, HandlerRegistry, Publisher
from tests.worker.support import drained, insert, publish, row, running, settled, until


def noting(seen: list[str], label: str) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(f"{label}:{event.payload['n']}")

    return registry


async def test_worker_takes_its_own_generation_only(dsn: str, conn: asyncpg.Connection) -> None:
    """Rows of other generations are left as they are, whatever channel they are on (GEN-1, E9)."""
    seen: list[str] = []
    identities = {}
    for generation in (0, 2, 3):
        async with conn.transaction():
            publisher = Publisher("shop", generation=generation)
            envelope = await publisher.publish(conn, "order.placed", {"n": generation})
            astray = await publisher.publish(conn, "order.placed", {"n": generation + 10}, channel="outbox_gen_2")
        identities[generation] = (envelope.event_id, astray.event_id)
    async with running(dsn, noting(seen, "two"), generation=2, poll_interval=0.2) as worker:
        for identity in identities[2]:
            await settled(conn, identity)
        await until(lambda: worker.counters.polls >= 2, what="it has looked everywhere twice")
    assert sorted(seen) == ["two:12", "two:2"]
    for generation in (0, 3):
        for identity in identities[generation]:
            found = await row(conn, identity)
            assert (found["status"], found["attempts"], found["claimed_by"]) == ("pending", 0, None)


async def test_generation_has_a_channel_of_its_own(dsn: str, conn: asyncpg.Connection) -> None:
    """A plain INSERT is stamped with the current deployment, and wakes its workers only (GEN-1, PUB-1)."""
    await conn.execute("INSERT INTO core.deployments (generation) VALUES (1), (2)")
    seen: list[str] = []
    async with (
        running(dsn, noting(seen, "one"), generation=1, poll_interval=3600) as one,
        running(dsn, noting(seen, "two"), generation=2, poll_interval=3600) as two,
    ):
        await until(lambda: one.listening and two.listening, what="both listen")
        sleeping = "SELECT count(*) = 4 FROM pg_locks WHERE locktype = 'advisory' AND granted"
        await until(lambda: conn.fetchval(sleeping), what="both sleep")
        heard = one.counters.wakeups
        started = time.monotonic()
        identity = await insert(conn, "order.placed", '{"n": 1}')
        await until(lambda: seen, within=5, what="the event")
        assert time.monotonic() - started < 0.5
        found = await settled(conn, identity)
        assert (found["generation"], found["channel"]) == (2, "outbox_gen_2")
        assert one.counters.wakeups == heard
    assert seen == ["two:1"]


async def test_crash_recovery_stays_inside_a_generation(dsn: str, conn: asyncpg.Connection) -> None:
    """A dead worker's rows wait for a worker of the same generation (GEN-1)."""
    seen: list[str] = []
    async with conn.transaction():
        envelope = await Publisher("shop", generation=1).publish(conn, "order.placed", {"n": 1})
    await conn.execute(
        """
        UPDATE core.outbox SET status = 'in_flight', attempts = 1, claimed_by = gen_random_uuid(),
            lease_token = gen_random_uuid(), lease_expires_at = now() - interval '1 second'
        """
    )
    async with running(dsn, noting(seen, "two"), generation=2, channels=("outbox_gen_1",), poll_interval=0.1) as two:
        await until(lambda: two.counters.polls >= 3, what="the new generation has looked")
        assert (await row(conn, envelope.event_id))["attempts"] == 1
        async with running(dsn, noting(seen, "one"), generation=1, poll_interval=0.1):
            await settled(conn, envelope.event_id)
    assert seen == ["one:1"]


async def test_replay_moves_to_another_generation(dsn: str, conn: asyncpg.Connection) -> None:
    """A replay names the generation whose workers handle it, and its channel follows (DLQ-3, GEN-1)."""
    seen: list[str] = []
    broken = HandlerRegistry()

    @broken.handler("order.placed", name="billing.charge", on_error="reject")
    async def charge(event: EventEnvelope) -> None:
        raise ValueError("an old defect")

    async with conn.transaction():
        envelope = await Publisher("shop", generation=1).publish(conn, "order.placed", {"n": 1})
    async with running(dsn, broken, generation=1, poll_interval=3600):
        await settled(conn, envelope.event_id, "failed")
        async with running(dsn, noting(seen, "two"), generation=2, poll_interval=3600):
            await conn.fetchval("SELECT core.outbox_replay($1, 2, 'ann')", envelope.event_id)
            found = await settled(conn, envelope.event_id, within=5)
    assert (found["generation"], found["channel"]) == (2, "outbox_gen_2")
    assert seen == ["two:1"]


async def test_further_channels(dsn: str, conn: asyncpg.Connection) -> None:
    """A channel for cold work is served by the worker that is told to, and by no other (OBX-4)."""
    seen: list[str] = []
    async with running(dsn, noting(seen, "default"), poll_interval=0.1) as default:
        cold = await publish(conn, "order.placed", {"n": 1}, channel="outbox_cold")
        hot = await publish(conn, "order.placed", {"n": 2})
        await settled(conn, hot)
        await until(lambda: default.counters.polls >= 2, what="it has looked again")
        waiting = await row(conn, cold)
        assert (waiting["status"], waiting["attempts"]) == ("pending", 0)
        async with running(dsn, noting(seen, "cold"), channels=("outbox_cold",), poll_interval=3600):
            await settled(conn, cold)
    assert seen == ["default:2", "cold:1"]


async def test_one_worker_on_several_channels(dsn: str, conn: asyncpg.Connection) -> None:
    """A worker that is told to serves several channels, and each of them wakes it (OBX-4, P4)."""
    seen: list[str] = []
    channels = ("outbox_default", "outbox_cold", "outbox_hot")
    async with running(dsn, noting(seen, "all"), channels=channels, poll_interval=3600):
        for round_ in range(3):
            sleeping = "SELECT count(*) = 6 FROM pg_locks WHERE locktype = 'advisory' AND granted"
            await until(lambda: conn.fetchval(sleeping), what="it sleeps on every channel")  # noqa: B023
            for number, channel in enumerate(channels):
                n = 10 * round_ + number
                started = time.monotonic()
                await publish(conn, "order.placed", {"n": n}, channel=channel)
                await until(lambda: f"all:{n}" in seen, within=5, what=f"the event on {channel}")  # noqa: B023
                assert time.monotonic() - started < 1.0
        await drained(conn)
