"""Workers that die, hang or stall: nothing is lost, nothing happens twice in the database, and others take over."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, NewEvent
from holdfast.postgres.deliveries import Deliveries
from tests.worker.support import (
    PUBLISHER,
    Facts,
    Latencies,
    drained,
    effects,
    make_tables,
    missing,
    process,
    publish,
    publish_many,
    row,
    running,
    settled,
    until,
)

KILLS, PER_KILL = 10, 100
# As another worker would, for longer than the test looks.
TAKE = """UPDATE core.outbox SET lease_token = gen_random_uuid(), lease_expires_at = now() + interval '4 s'
          WHERE id = $1"""
LEASE, POLL = 2.0, 1.0


@pytest.mark.slow
async def test_ten_kills_with_a_thousand_events(dsn: str, conn: asyncpg.Connection) -> None:
    """Nothing lost, each effect once, redelivery bounded and in time.

    Both workers have one name: what a worker is called must not matter to what it holds (LSN-3, A1, A6, P1, P2, P3).
    """
    await make_tables(conn)
    settings = {"lease": LEASE, "poll_interval": POLL, "concurrency": 10, "connections": 10, "name": "same"}
    in_flight, killed = 0, []
    async with process(dsn, "ledger", **settings):
        for kill in range(KILLS):
            async with process(dsn, "ledger", **settings) as victim:
                async with conn.transaction():
                    numbers = range(kill * PER_KILL, (kill + 1) * PER_KILL)
                    events = [NewEvent("order.placed", {"n": n, "seconds": 0.03}) for n in numbers]
                    await PUBLISHER.publish_many(conn, events)
                query = "SELECT count(*) >= 3 FROM outside WHERE worker = $1"
                await until(lambda: conn.fetchval(query, victim.pid), what="the victim is at work")  # noqa: B023
                victim.signal(signal.SIGKILL)
                assert await victim.end() == -signal.SIGKILL
            moment = await conn.fetchval("SELECT clock_timestamp()")
            left = "SELECT o.id FROM core.outbox o JOIN core.workers w ON w.id = o.claimed_by "
            left += "WHERE o.status = 'in_flight' AND w.pid = $1"
            orphans = [each["id"] for each in await conn.fetch(left, victim.pid)]
            in_flight += len(orphans)
            killed.append((moment, orphans))
        await drained(conn, within=30)
    assert in_flight > 0, "every kill came between two events"
    runs = Counter(await effects(conn, "outside"))
    assert missing(range(KILLS * PER_KILL), list(runs)) == []
    lost = missing(range(KILLS * PER_KILL), await effects(conn))
    query = "SELECT payload, status, attempts, failure_reason FROM core.outbox WHERE (payload->>'n')::int = ANY($1)"
    assert lost == [], [tuple(each) for each in await conn.fetch(query, lost)]
    assert await effects(conn) == list(range(KILLS * PER_KILL))
    assert sum(runs.values()) - len(runs) <= in_flight
    recovered = Latencies()
    for number, (moment, orphans) in enumerate(killed):
        # What the next victim had claimed again by then was recovered, and counts from that one's death.
        later = {each for _, others in killed[number + 1 :] for each in others}
        orphans = [each for each in orphans if each not in later]
        query = "SELECT event_id, min(at) AS at FROM outside WHERE event_id = ANY($1) AND at > $2 GROUP BY event_id"
        again = await conn.fetch(query, orphans, moment)
        recovered.extend((each["at"] - moment).total_seconds() for each in again)
    print(f"recovery after a kill, lease {LEASE:g} s, poll {POLL:g} s: {recovered}")
    assert max(recovered) <= LEASE + POLL + 1
    assert await conn.fetchval("SELECT max(attempts) FROM core.outbox") <= KILLS + 1
    assert await conn.fetchval("SELECT count(*) FROM core.failed") == 0


async def test_killed_between_effect_and_settle(dsn: str, conn: asyncpg.Connection) -> None:
    """What a plain handler did outside its delivery happens again, and the second attempt is settled (A2)."""
    await make_tables(conn)
    events = await publish_many(conn, "order.placed", 5)
    settings = {"lease": 1.0, "poll_interval": 0.5}
    async with process(dsn, "settles_late", started=False, **settings) as victim:
        assert await victim.end() == 137
    async with process(dsn, "settles_late", **settings):
        await drained(conn)
    assert (await row(conn, events[0]))["attempts"] == 2
    assert Counter(await effects(conn, "outside"))[0] == 2
    assert set(await effects(conn, "outside")) == set(range(5))
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 5


async def test_killed_right_after_the_commit(dsn: str, conn: asyncpg.Connection) -> None:
    """A transactional delivery is settled by its own commit: nothing is run again (A2, P2)."""
    await make_tables(conn)
    identity = await publish(conn, "order.placed", {"n": 0})
    settings = {"lease": 1.0, "poll_interval": 0.5}
    async with process(dsn, "dies_after_commit", started=False, **settings) as victim:
        assert await victim.end() == 137
    async with process(dsn, "dies_after_commit", **settings):
        await settled(conn, identity)
        after = await publish(conn, "order.placed", {"n": 1})
        await until(lambda: conn.fetchval("SELECT count(*) = 2 FROM ledger"), what="the next event")
        await settled(conn, after)
    assert await effects(conn) == [0, 1]
    assert (await row(conn, identity))["attempts"] == 1


async def test_inbox_decides_about_a_redelivery(dsn: str, conn: asyncpg.Connection) -> None:
    """A delivery whose key is in the inbox is settled without a run (A2, LSN-6)."""
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.event_id)

    identity = await publish(conn, "order.placed", idempotency_key="order-1")
    await conn.execute("INSERT INTO core.event_handled VALUES ('billing.charge', 'order-1', now(), 'shop')")
    async with running(dsn, registry) as worker:
        await settled(conn, identity)
        await until(lambda: worker.counters.duplicates == 1, what="counted as a duplicate")
    assert seen == []


@pytest.mark.slow
async def test_handler_that_always_kills_its_worker(dsn: str, conn: asyncpg.Connection) -> None:
    """After its attempts it fails with max_deliveries, not run again, and every other event is delivered (A3, P6)."""
    await make_tables(conn)
    deadly = await publish(conn, "order.deadly", {"n": -1})
    others = await publish_many(conn, "order.placed", 30)
    settings = {"lease": 0.5, "poll_interval": 0.2}
    deaths = 0
    async with asyncio.timeout(60):
        while (await row(conn, deadly))["status"] != "failed":
            async with process(dsn, "crashing", started=False, **settings) as worker:
                ended = asyncio.create_task(worker.end(within=60))

                async def over(ended: asyncio.Task[int] = ended) -> bool:
                    return ended.done() or (await row(conn, deadly))["status"] == "failed"

                await until(over, what="the worker died, or the event failed")
                if (await row(conn, deadly))["status"] == "failed":
                    await drained(conn)
                    worker.signal(signal.SIGTERM)
                    assert await ended == 0
                else:
                    assert await ended == 137
                    deaths += 1
    failed = await row(conn, deadly)
    assert (failed["failure_reason"], deaths) == ("max_deliveries", 3)
    assert [n for n in await effects(conn, "outside") if n == -1] == [-1] * 3
    statuses = {(await row(conn, identity))["status"] for identity in others}
    assert statuses == {"delivered"}
    assert set(await effects(conn, "outside")) == {-1, *range(30)}


@pytest.mark.slow
async def test_handler_that_blocks_the_loop_keeps_its_lease(dsn: str, conn: asyncpg.Connection) -> None:
    """Blocked for three leases it is not run by the idle worker beside it, and a notice names it (A4, LSN-3)."""
    await make_tables(conn)
    lease = 1.0
    settings = {"lease": lease, "poll_interval": 0.2}
    async with process(dsn, "blocking", **settings) as one, process(dsn, "blocking", **settings) as two:
        identity = await publish(conn, "order.placed", {"seconds": 3 * lease, "n": 1})
        delivered = await settled(conn, identity)
        notices = one.told("loop_blocked") + two.told("loop_blocked")
    assert delivered["attempts"] == 1
    assert await effects(conn, "outside") == [1]
    assert len(notices) == 1
    assert notices[0]["handlers"] == ["billing.blocking"]
    assert notices[0]["level"] == "warning"


@pytest.mark.slow
async def test_an_answer_that_waited_longer_than_the_lease(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim is answered while the loop is blocked. What others took meanwhile is theirs (A4, LSN-3)."""
    seen: list[int] = []
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.payload["n"])

    claim, lease = Deliveries.claim, 1.0
    taken = await publish(conn, "order.placed", {"n": 1})
    await publish(conn, "order.placed", {"n": 2})

    async def late(self: Deliveries, *arguments: Any) -> Any:
        claimed, keyed = await claim(self, *arguments)
        if len(claimed) == 2:
            await conn.execute(TAKE, taken)
            time.sleep(lease)  # the loop is what must stand still
        return claimed, keyed

    monkeypatch.setattr(Deliveries, "claim", late)
    async with running(dsn, registry, lease=lease, poll_interval=0.2) as worker:
        await until(lambda: worker.counters.lost_leases == 1, what="the lost lease is noticed")
        await until(lambda: 2 in seen, what="the other event")
        assert 1 not in seen
        await drained(conn)
    assert sorted(seen) == [1, 2]


@pytest.mark.slow
async def test_slow_batch_with_a_short_lease(dsn: str, conn: asyncpg.Connection) -> None:
    """What waits in a slow worker's buffer is renewed: no event is run twice, with two workers at it (A5, LSN-3)."""
    runs: Counter[int] = Counter()

    def registry() -> HandlerRegistry:
        made = HandlerRegistry()

        @made.handler("order.placed", name="billing.charge")
        async def charge(event: EventEnvelope) -> None:
            runs[event.payload["n"]] += 1
            if event.payload["n"] >= 500:
                await asyncio.sleep(0.3)

        return made

    await publish_many(conn, "order.placed", 512)  # fast ones first, so that the buffers are large
    settings = {"lease": 0.9, "poll_interval": 0.1, "concurrency": 1}
    async with running(dsn, registry(), **settings) as one, running(dsn, registry(), **settings) as two:
        await drained(conn)
        assert one.counters.lost_leases == two.counters.lost_leases == 0
    assert set(runs.values()) == {1}
    assert len(runs) == 512
    assert await conn.fetchval("SELECT max(attempts) FROM core.outbox") == 1


@pytest.mark.slow
async def test_recovery_beside_a_backlog(dsn: str, conn: asyncpg.Connection) -> None:
    """Rows of a dead worker do not wait until the survivor has drained everything that came later (P3)."""
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append((event.payload["n"], time.monotonic()))
        await asyncio.sleep(0.01)

    await conn.execute(
        """
        INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{"n": -1}');
        UPDATE core.outbox SET status = 'in_flight', attempts = 1, claimed_by = gen_random_uuid(),
            lease_token = gen_random_uuid(), lease_expires_at = now() + interval '1.5 s';
        """
    )
    published = time.monotonic()
    await publish_many(conn, "order.placed", 4000)
    async with running(dsn, registry, poll_interval=POLL, concurrency=8):
        await until(lambda: any(n == -1 for n, _ in seen), what="the dead worker's event")
    (recovered,) = (at for n, at in seen if n == -1)
    assert len(seen) < 4000, "the backlog was too short to hide anything"
    assert recovered - published <= 1.5 + POLL + 1


async def test_the_lease_keeper_survives_everything(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong in one beat, the next one extends the leases (LSN-3)."""
    registry, runs, calls = HandlerRegistry(), [], []
    errors = [asyncpg.DeadlockDetectedError("40P01"), RuntimeError("a defect")]

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        runs.append(context.attempt)
        await asyncio.sleep(2.2)

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, lease=1.5, poll_interval=0.1) as one:
        extend = one._parts.shared.deliveries.extend

        async def failing(*arguments: object) -> object:
            calls.append(arguments)
            if errors:
                raise errors.pop()
            return await extend(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(one._parts.shared.deliveries, "extend", failing)
        async with running(dsn, registry, lease=1.5, poll_interval=0.1):
            await settled(conn, identity)
    assert errors == []
    assert len(calls) > 2
    assert runs == [1], "an attempt of the other worker's"


async def test_frozen_worker_is_fenced(dsn: str, conn: asyncpg.Connection) -> None:
    """A worker that was stopped for longer than its lease settles nothing when it wakes (LSN-3)."""
    await make_tables(conn)
    settings = {"lease": 1.0, "poll_interval": 0.3}
    async with process(dsn, "ledger", **settings) as frozen:
        identity = await publish(conn, "order.placed", {"n": 1, "seconds": 1.0})
        await until(lambda: conn.fetchval("SELECT count(*) FROM outside"), what="the handler runs")
        frozen.signal(signal.SIGSTOP)
        facts = Facts()
        registry = HandlerRegistry()

        @registry.handler("order.placed", name="billing.charge")
        async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            await tx.execute("INSERT INTO ledger (handler, n) VALUES ('other', $1)", event.payload["n"])

        async with running(dsn, registry, facts, poll_interval=0.2):
            expired = "SELECT lease_expires_at < clock_timestamp() FROM core.outbox WHERE id = $1"
            await until(lambda: conn.fetchval(expired, identity), what="the lease has run out")
            # Its transaction holds the row's lock: end it, as the server does some time after the handler's limit.
            await conn.execute(
                """
                SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE application_name LIKE 'holdfast handler%' AND state = 'idle in transaction'
                """
            )
            delivered = await settled(conn, identity)
            frozen.signal(signal.SIGCONT)
            after = await publish(conn, "order.placed", {"n": 2, "seconds": 0})
            await settled(conn, after)
        frozen.signal(signal.SIGTERM)
        assert await frozen.end() == 0
    assert delivered["attempts"] == 2
    assert [each["handler"] for each in await conn.fetch("SELECT handler FROM ledger WHERE n = 1")] == ["other"]
