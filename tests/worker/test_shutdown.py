"""Signals: what runs may finish, what waits is given back, and the process ends in time, with the right status."""

from __future__ import annotations

import asyncio
import signal
import time

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, NewEvent
from holdfast.embedded import EmbeddedPostgres
from tests.worker.support import (
    PUBLISHER,
    Facts,
    drained,
    make_tables,
    process,
    publish,
    publish_many,
    row,
    running,
    settled,
    until,
)


@pytest.mark.slow
async def test_running_finish_and_waiting_are_given_back(dsn: str, conn: asyncpg.Connection) -> None:
    """Five running events finish, those in the buffer are back within a second with no attempt burned (LSN-4, A9)."""
    await make_tables(conn)
    # Quick ones first: a worker claims as far ahead as it has been fast.
    events = [NewEvent("order.placed", {"n": n, "seconds": 2.0 if n >= 2000 else 0}) for n in range(2060)]
    async with conn.transaction():
        identities = await PUBLISHER.publish_many(conn, events)
    slow = identities[2000:]
    async with process(dsn, "slow", concurrency=5, grace=10) as worker:
        await worker.wait_told("handler_started", times=5)
        held = "SELECT count(*) FROM core.outbox WHERE status = 'in_flight' AND id = ANY($1)"
        await until(lambda: conn.fetchval(held.replace("count(*)", "count(*) >= 30"), slow), what="a full buffer")
        worker.signal(signal.SIGTERM)
        signalled = time.monotonic()
        await until(lambda: conn.fetchval(held.replace("count(*)", "count(*) = 5"), slow), what="the rest given back")
        assert time.monotonic() - signalled < 1.0
        waiting = "SELECT count(*), max(attempts) FROM core.outbox WHERE status = 'pending' AND id = ANY($1)"
        assert tuple(await conn.fetchrow(waiting, slow)) == (55, 0)
        assert worker.told("handler_finished") == [], "they finished before anything was given back"
        assert await worker.end() == 0
        assert len(worker.told("handler_started")) == len(worker.told("handler_finished")) == 5
        assert [line["told"] for line in worker.lines][-1] == "worker_stopped"
    assert tuple(await conn.fetchrow(waiting, slow)) == (55, 0)
    delivered = "SELECT count(*) FROM core.outbox WHERE status = 'delivered' AND id = ANY($1)"
    assert await conn.fetchval(delivered, slow) == 5


@pytest.mark.slow
async def test_given_back_events_go_to_another_worker_at_once(dsn: str, conn: asyncpg.Connection) -> None:
    """The worker beside it has them without waiting for its polling interval or a lease (LSN-4)."""
    await make_tables(conn)
    events = [NewEvent("order.placed", {"n": n, "seconds": 0.5 if n >= 1000 else 0}) for n in range(1040)]
    async with conn.transaction():
        await PUBLISHER.publish_many(conn, events)
    async with process(dsn, "slow", concurrency=2, grace=10) as one:
        await one.wait_told("handler_started", times=2)
        async with process(dsn, "slow", concurrency=50, poll_interval=3600) as two:
            one.signal(signal.SIGTERM)
            assert await one.end() == 0
            await drained(conn, within=5)
            assert len(two.told("handler_finished")) == 40 - len(one.told("handler_finished"))


@pytest.mark.slow
@pytest.mark.parametrize("event_type", ["order.placed", "order.threaded"])
async def test_grace_exceeded(dsn: str, conn: asyncpg.Connection, event_type: str) -> None:
    """What does not finish in time is cancelled and given back; the process ends, threads or not (LSN-4, P5)."""
    identity = await publish(conn, event_type, {"seconds": 30})
    async with process(dsn, "slow", grace=0.5) as worker:
        await worker.wait_told("handler_started")
        worker.signal(signal.SIGTERM)
        signalled = time.monotonic()
        assert await worker.end() == 0
        assert time.monotonic() - signalled <= 0.5 + 2.0
        assert worker.told("handler_finished") == []
    found = await row(conn, identity)
    assert (found["status"], found["attempts"], found["lease_token"]) == ("pending", 0, None)


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [(signal.SIGTERM, signal.SIGTERM, 143), (signal.SIGINT, signal.SIGINT, 130), (signal.SIGTERM, signal.SIGINT, 130)],
)
async def test_second_signal_exits_at_once(
    dsn: str, conn: asyncpg.Connection, first: signal.Signals, second: signal.Signals, status: int
) -> None:
    """128 + the signal, at once; the lease gives the event back (LSN-4, A10)."""
    identity = await publish(conn, "order.placed", {"seconds": 30})
    async with process(dsn, "slow", grace=60) as worker:
        await worker.wait_told("handler_started")
        await worker.take_signal(first)
        other = await publish(conn, "order.placed")
        worker.signal(second)
        signalled = time.monotonic()
        assert await worker.end() == status
        assert time.monotonic() - signalled < 2
    assert (await row(conn, identity))["status"] == "in_flight"
    assert (await row(conn, other))["id"] == other


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_idle_worker_stops_promptly(dsn: str, conn: asyncpg.Connection, number: signal.Signals) -> None:
    """At most two seconds, with status 0 and nothing left behind (P5)."""
    async with process(dsn, "slow", poll_interval=3600) as worker:
        await until(
            lambda: conn.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), what="it sleeps"
        )
        worker.signal(number)
        signalled = time.monotonic()
        assert await worker.end() == 0
        assert time.monotonic() - signalled <= 2
    assert await conn.fetchval("SELECT count(*) FROM core.workers WHERE stopped_at IS NULL") == 0


async def test_stop_beside_a_service(dsn: str, conn: asyncpg.Connection) -> None:
    """`async with Worker` stops in the same way; an idle one within two seconds (LSN-4, P5)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        await asyncio.sleep(0.3)

    async with running(dsn, registry, poll_interval=3600):
        identity = await publish(conn, "order.placed")
        await settled(conn, identity, "in_flight")
        ended = time.monotonic()
    assert time.monotonic() - ended <= 2
    assert (await row(conn, identity))["status"] == "delivered"


async def test_stop_during_a_claim_gives_everything_back(dsn: str, conn: asyncpg.Connection) -> None:
    """A stop at any moment leaves nothing in flight, and burns no attempt of what did not run (LSN-4)."""
    for round_ in range(5):
        registry, seen = HandlerRegistry(), []

        @registry.handler("order.placed", name="billing.charge")
        async def charge(event: EventEnvelope, seen: list[int] = seen) -> None:
            seen.append(event.payload["n"])

        await conn.execute("DELETE FROM core.outbox")
        await publish_many(conn, "order.placed", 3000)
        async with running(dsn, registry):
            await until(lambda: len(seen) > 100 * (round_ + 1), what="it is at work")  # noqa: B023
        states = await conn.fetch("SELECT status, attempts, count(*) AS n FROM core.outbox GROUP BY 1, 2")
        found = {(each["status"], each["attempts"]): each["n"] for each in states}
        assert set(found) <= {("delivered", 1), ("pending", 0)}
        assert found[("delivered", 1)] == len(seen)


@pytest.mark.slow
async def test_sigterm_while_the_database_is_down(own_server: EmbeddedPostgres, own_dsn: str) -> None:
    """An idle worker ends within two seconds, a busy one within its grace and five more (A10, P5)."""
    conn = await asyncpg.connect(own_dsn)
    identity = await publish(conn, "order.placed", {"seconds": 30})
    settings = {"grace": 0.5, "lease": 3.0}
    async with process(own_dsn, "slow", **settings) as busy, process(own_dsn, "slow", **settings) as idle:
        await until(lambda: busy.told("handler_started") or idle.told("handler_started"), what="one is busy")
        busy, idle = (busy, idle) if busy.told("handler_started") else (idle, busy)
        await conn.close()
        await asyncio.to_thread(own_server.kill)
        await busy.wait_told("database_unavailable")
        await idle.wait_told("database_unavailable")
        for worker, limit in ((idle, 2.0), (busy, 0.5 + 5.0)):
            worker.signal(signal.SIGTERM)
            signalled = time.monotonic()
            assert await worker.end() == 0
            assert time.monotonic() - signalled <= limit
    await asyncio.to_thread(own_server.start)
    conn = await asyncpg.connect(own_dsn)
    try:
        # Nobody could be told: the lease gives it back.
        async with process(own_dsn, "slow", poll_interval=0.5) as worker:
            await worker.wait_told("handler_started")
            assert (await row(conn, identity))["attempts"] == 2
    finally:
        await conn.close()


async def test_sigterm_during_start(own_server: EmbeddedPostgres, own_dsn: str) -> None:
    """A worker that has not met its database yet ends within two seconds (A10)."""
    await asyncio.to_thread(own_server.kill)
    async with process(own_dsn, "slow", started=False) as worker:
        await worker.wait_told("database_unavailable")
        worker.signal(signal.SIGTERM)
        signalled = time.monotonic()
        assert await worker.end() == 0
        assert time.monotonic() - signalled <= 2


async def test_facts_of_a_stop(dsn: str) -> None:
    """Start and stop are told once each (LSN-4)."""
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None: ...

    async with running(dsn, registry, facts):
        pass
    assert len(facts.notices("worker_started")) == len(facts.notices("worker_stopped")) == 1
    assert facts.notices("stop_incomplete") == []
