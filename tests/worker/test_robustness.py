"""What must not stop a worker: connections that fall silent, handlers that hang, answers that never arrive."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Reject, Retry, RetryPolicy, Snooze, Worker, WorkerSettings
from holdfast.handling.threads import NoThread, Threads
from holdfast.telemetry import Failed, Retried
from holdfast.worker.lifecycle import Lifecycle
from tests.worker.proxies import proxied
from tests.worker.support import (
    Facts,
    drained,
    effects,
    make_tables,
    publish,
    publish_many,
    running,
    settled,
    until,
)

ONCE = RetryPolicy(strategy="none")


# --- transactional handlers -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reject", "error", "retry", "snooze"])
async def test_outcome_of_a_transaction_longer_than_the_lease(dsn: str, conn: asyncpg.Connection, how: str) -> None:
    """What became of it is settled before the row is unlocked, so no other worker runs it again (LSN-3, LSN-5)."""
    await make_tables(conn)
    runs: list[int] = []
    facts = Facts()

    def registry() -> HandlerRegistry:
        made = HandlerRegistry()

        @made.handler("order.placed", name="billing.charge", retry=RetryPolicy(max_attempts=2, base_delay=60))
        async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> Any:
            runs.append(event.payload["n"])
            await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])
            await asyncio.sleep(2.4)
            if how == "error":
                raise ConnectionError("the bank is closed")
            return {"reject": Reject("no"), "retry": Retry(60), "snooze": Snooze(60)}[how]

        return made

    count = 6
    settings = {"lease": 1.0, "poll_interval": 0.02, "connections": count}
    async with (
        running(dsn, registry(), facts, **settings) as one,
        running(dsn, registry(), facts, **settings) as two,
    ):
        await publish_many(conn, "order.placed", count)
        query = "SELECT count(*) = 0 FROM core.outbox WHERE status = 'in_flight'"
        await until(lambda: len(runs) >= count, what="each ran")
        await until(lambda: conn.fetchval(query), what="each is settled")
        await until(lambda: one.in_flight == two.in_flight == 0, what="both know it")
        assert sorted(runs) == list(range(count))
        counters = (one.counters, two.counters)
        found = await conn.fetch(
            "SELECT status, attempts, available_at > now() + interval '55 s' AS later FROM core.outbox"
        )
        told = {"reject": Failed, "error": Retried, "retry": Retried}.get(how)
        if told is not None:
            assert len(facts.of(told)) == count
        match how:
            case "reject":
                assert {(each["status"], each["attempts"]) for each in found} == {("failed", 1)}
                assert sum(each.failed for each in counters) == count
            case "snooze":
                assert {tuple(each) for each in found} == {("pending", 0, True)}
                assert sum(each.snoozed for each in counters) == count
            case _:
                assert {(each["status"], each["attempts"]) for each in found} == {("pending", 1)}
                assert sum(each.retried for each in counters) == count
    assert await effects(conn) == []
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 0


@pytest.mark.slow
async def test_half_open_connections_of_transactions(dsn: str, conn: asyncpg.Connection) -> None:
    """The runners come free, new connections are opened, every effect happens once, and it stops (LSN-2, P5)."""
    await make_tables(conn)
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge", timeout=2)
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("SELECT pg_sleep(0.2)")
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])

    async def more(before: int) -> bool:
        return len(await effects(conn)) > before + 4

    settings = WorkerSettings(lease=3.0, poll_interval=0.5, connections=4, concurrency=20, grace=1)
    async with proxied(dsn) as (proxy, through):
        worker = Worker(through, registry, settings, observers=(facts.append,))
        async with worker:
            await publish_many(conn, "order.placed", 40)
            await until(lambda: effects(conn), what="it is at work")
            frozen_at = await conn.fetchval("SELECT clock_timestamp()")
            proxy.freeze()
            before = len(await effects(conn))
            await until(lambda: more(before), what="it is at work again")
            # As the server's keepalives would if the other end were really gone, and not a proxy.
            await conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name LIKE 'holdfast handler%' AND backend_start < $1 "
                "AND datname = current_database()",
                frozen_at,
            )
            await drained(conn)
            assert await effects(conn) == list(range(40))
            ending = time.monotonic()
        assert time.monotonic() - ending <= 1 + 5
    assert facts.notices("loop_failed") == []


@pytest.mark.slow
async def test_silent_transaction_at_stop(dsn: str, conn: asyncpg.Connection) -> None:
    """A handler that waits on a half-open connection does not keep the worker from stopping (P5)."""
    await make_tables(conn)
    registry, inside = HandlerRegistry(), asyncio.Event()

    @registry.handler("order.placed", name="billing.charge", timeout=3)
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        inside.set()
        await tx.execute("SELECT pg_sleep(1)")

    async with proxied(dsn) as (proxy, through):
        worker = Worker(through, registry, WorkerSettings(grace=0.5), observers=())
        async with worker:
            identity = await publish(conn, "order.placed")
            await inside.wait()
            proxy.freeze()
            ending = time.monotonic()
        assert time.monotonic() - ending <= 0.5 + 5
    query = "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name LIKE 'holdfast handler%'"
    await until(lambda: conn.fetchval(query), what="the server has noticed")
    await conn.execute("UPDATE core.outbox SET lease_expires_at = now() WHERE id = $1", identity)
    async with running(dsn, registry, poll_interval=0.1):
        await settled(conn, identity)


@pytest.mark.parametrize(
    "command", ["ROLLBACK", "COMMIT", "  end", "rollback work", "PREPARE TRANSACTION 'x'", "close"]
)
async def test_transaction_ended_by_hand(dsn: str, conn: asyncpg.Connection, command: str) -> None:
    """It fails at once and says what to do; the connection serves the next event (LSN-5)."""
    await make_tables(conn)
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        if event.payload["n"] == 0:
            await (tx.close() if command == "close" else tx.execute(command))
        else:
            await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])

    async with running(dsn, registry, connections=1):
        first, second = await publish_many(conn, "order.placed", 2)
        failed = await settled(conn, first, "failed")
        assert failed["failure_reason"] == "retry_terminal"
        assert "ended its transaction by hand" in failed["last_error"]
        assert "tx.transaction()" in failed["last_error"]
        await settled(conn, second)
    assert await effects(conn) == [1]


@pytest.mark.parametrize(("command", "end"), [("COMMIT", "delivered"), ("ROLLBACK", "failed")])
async def test_transaction_ended_unseen(dsn: str, conn: asyncpg.Connection, command: str, end: str) -> None:
    """Effect and delivery end together all the same, and somebody is told (LSN-5)."""
    await make_tables(conn)
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])
        await tx.fetch(command)

    identity = await publish(conn, "order.placed", {"n": 1})
    async with running(dsn, registry, facts, connections=1):
        await settled(conn, identity, end)
        await until(lambda: facts.notices("transaction_ended_by_hand"), what="it is told")
    assert await effects(conn) == ([1] if end == "delivered" else [])


async def test_sessions_are_clean(dsn: str, conn: asyncpg.Connection) -> None:
    """What a handler sets or locks for its session reaches neither the next handler nor anybody else (LSN-5)."""
    await make_tables(conn)
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        seen.append(await tx.fetchval("SHOW search_path"))
        await tx.execute("SET search_path TO elsewhere; SELECT pg_advisory_lock(4711)")

    async with running(dsn, registry, connections=1):
        for _ in range(3):
            await settled(conn, await publish(conn, "order.placed"))
        await until(lambda: conn.fetchval("SELECT pg_try_advisory_lock(4711)"), within=10, what="nobody locks it")
    assert seen == [seen[0]] * 3 and "elsewhere" not in seen[0]


# --- waiting for a thread or a connection -----------------------------------------------------------------


async def test_thread_that_hangs_costs_no_thread(dsn: str, conn: asyncpg.Connection) -> None:
    """Past its limit it is replaced; the events behind it run here (LSN-11)."""
    registry, ran, release = HandlerRegistry(), [], threading.Event()

    @registry.handler("order.placed", name="billing.charge", timeout=0.3, retry=ONCE)
    def charge(event: EventEnvelope) -> None:
        ran.append(event.payload["n"])
        if event.payload["n"] == 0:
            release.wait(60)

    try:
        async with running(dsn, registry, threads=1, lease=5.0):
            identities = await publish_many(conn, "order.placed", 4)
            for identity in identities[1:]:
                await settled(conn, identity)
            release.set()
            assert (await settled(conn, identities[0], "failed"))["failure_reason"] == "retry_terminal"
            assert ran == [0, 1, 2, 3]
    finally:
        release.set()


@pytest.mark.parametrize("scarce", ["threads", "connections"])
async def test_what_hangs_holds_nothing_else(dsn: str, conn: asyncpg.Connection, scarce: str) -> None:
    """Events for which there is no thread or connection are left to a worker that has one (LSN-3)."""
    busy, free, facts, ran = HandlerRegistry(), HandlerRegistry(), Facts(), []
    release, released = threading.Event(), asyncio.Event()

    if scarce == "threads":

        @busy.handler("order.placed", name="billing.charge")
        def block(event: EventEnvelope) -> None:
            release.wait(60)

        @free.handler("order.placed", name="billing.charge")
        def charge(event: EventEnvelope) -> None:
            ran.append(event.payload["n"])

    else:

        @busy.handler("order.placed", name="billing.charge")
        async def wait(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            await released.wait()

        @free.handler("order.placed", name="billing.charge")
        async def write(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            ran.append(event.payload["n"])

    settings: dict[str, Any] = {"lease": 0.5, "poll_interval": 0.1, "threads": 1, "connections": 1}
    try:
        async with running(dsn, busy, facts, **settings) as stuck:
            identities = await publish_many(conn, "order.placed", 4)
            await until(lambda: stuck.counters.claimed, what="one is held by the one that hangs")
            async with running(dsn, free, **settings):
                for identity in identities[1:]:
                    assert (await settled(conn, identity))["attempts"] == 1
            assert sorted(ran) == [1, 2, 3]
            assert stuck.counters.claimed == 1
            await until(lambda: len(facts.notices(f"{scarce}_exhausted")) == 1, what="it says so")
            release.set()
            released.set()
            await drained(conn)
    finally:
        release.set()


async def test_what_no_runner_takes_is_released(dsn: str, conn: asyncpg.Connection) -> None:
    """Events behind busy runners are not kept from other workers for longer than about a lease (LSN-3)."""
    registry, released = HandlerRegistry(), asyncio.Event()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        if event.payload["n"] >= 300:
            await released.wait()

    async with running(dsn, registry, concurrency=2, lease=0.5, poll_interval=0.1) as worker:
        await publish_many(conn, "order.placed", 330)
        query = "SELECT count(*) = 2 FROM core.outbox WHERE status = 'in_flight'"
        await until(
            lambda: len(worker._parts.dispatcher.running()) == 2 and worker.in_flight == 2, what="the rest released"
        )
        assert await conn.fetchval(query)
        assert await conn.fetchval("SELECT max(attempts) FROM core.outbox WHERE status = 'pending'") == 0
        released.set()
        await drained(conn)


async def test_threads_that_hang_are_bounded() -> None:
    """As many again as there are threads take the place of those that hang, and end when they come back (LSN-11)."""
    threads, release, started = Threads(2), threading.Event(), []

    def hang() -> None:
        release.wait(60)

    async def abandoned() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await threads.call(hang, lambda: started.append(1), patience=60)

    await asyncio.gather(*(abandoned() for _ in range(2)))
    await asyncio.gather(*(abandoned() for _ in range(2)))
    assert len(started) == 4
    with pytest.raises(NoThread):
        await threads.call(hang, lambda: started.append(1), patience=0.1)
    release.set()
    assert await threads.call(lambda: 7, lambda: None, patience=5) == 7
    await until(lambda: threads._threads == 2, what="the others ended")
    threads.close()


async def test_handlers_in_threads_after_a_restart_of_the_dispatcher(dsn: str, conn: asyncpg.Connection) -> None:
    """A defect that ends the dispatcher's loop does not leave it without threads (LSN-5)."""
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge")
    def charge(event: EventEnvelope) -> None: ...

    worker = Worker(dsn, registry, WorkerSettings(threads=1), observers=(facts.append,))
    async with worker:
        await settled(conn, await publish(conn, "order.placed"))
        original, worker._parts.dispatcher._give_up_waiting = worker._parts.dispatcher._give_up_waiting, None  # type: ignore[assignment, method-assign]
        await until(lambda: facts.notices("loop_failed"), what="the loop has ended")
        worker._parts.dispatcher._give_up_waiting = original  # type: ignore[method-assign]
        await settled(conn, await publish(conn, "order.placed"))


# --- stopping and draining --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_stop_with_a_half_open_database(dsn: str, conn: asyncpg.Connection) -> None:
    """At most the grace and five seconds, whatever the lease (P5)."""
    registry, facts, seen = HandlerRegistry(), Facts(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.payload["n"])
        await asyncio.sleep(0.01)

    async with proxied(dsn) as (proxy, through):
        worker = Worker(through, registry, WorkerSettings(lease=30, grace=1), observers=(facts.append,))
        async with worker:
            await publish_many(conn, "order.placed", 2000)
            await until(lambda: len(seen) > 100, what="it is at work")
            proxy.freeze()
            await asyncio.sleep(0.2)
            ending = time.monotonic()
        assert time.monotonic() - ending <= 1 + 5
    assert facts.notices("worker_stopped")
    await conn.execute("DELETE FROM core.outbox")


async def test_stop_during_a_drain(dsn: str, conn: asyncpg.Connection) -> None:
    """`drain` returns when the worker is stopped, though work is left (LSN-4)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        await asyncio.sleep(0.2)

    await publish_many(conn, "order.placed", 50)
    worker = Worker(dsn, registry, WorkerSettings(concurrency=2, grace=1), observers=())
    draining = asyncio.create_task(worker.drain())
    await until(lambda: worker.counters.delivered, what="it is at work")
    worker.stop()
    async with asyncio.timeout(5):
        await draining
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'in_flight'") == 0


async def test_drain_of_a_worker_that_ends_by_itself(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends the worker is raised by `drain` (LSN-4)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        await asyncio.sleep(0.3)

    await publish_many(conn, "order.placed", 50)
    worker = Worker(dsn, registry, WorkerSettings(concurrency=1, grace=0.5), observers=())

    async def fail(seconds: float) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(worker._parts.dispatcher, "stop", fail)
    draining = asyncio.create_task(worker.drain())
    await until(lambda: worker.counters.delivered, what="it is at work")
    worker.stop()
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(10):
            await draining
    await conn.execute("DELETE FROM core.outbox")


# --- settling ---------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_outage_longer_than_a_lease(dsn: str, conn: asyncpg.Connection) -> None:
    """What was finished when the database went is settled when it is back, and does not run again (LSN-3)."""
    registry, seen, facts = HandlerRegistry(), [], Facts()
    go = asyncio.Event()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.payload["n"])
        await go.wait()

    async with proxied(dsn) as (proxy, through), running(through, registry, facts, lease=1.0) as worker:
        await publish_many(conn, "order.placed", 5)
        await until(lambda: len(seen) == 5, what="all run")
        proxy.refusing = True
        proxy.freeze()
        go.set()
        query = "SELECT bool_and(lease_expires_at < now() - interval '2 s') FROM core.outbox"
        await until(lambda: conn.fetchval(query), what="the leases have ended long ago")
        worker._parts.claimer.stopped.set()  # whoever claims first when the database is back is not the point
        proxy.refusing = False
        await drained(conn)
        await until(lambda: worker.counters.delivered == 5, what="the answers are counted")
    assert sorted(seen) == list(range(5))
    assert facts.notices("settle_abandoned") == []


async def test_row_that_cannot_be_sent(dsn: str, conn: asyncpg.Connection) -> None:
    """A value that the driver refuses costs its own row, and is no outage (LSN-3)."""
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> Reject:
        return Reject("no")

    worker = Worker(dsn, registry, WorkerSettings(lease=30, settle_after=0.2), observers=(facts.append,))
    fail = worker._parts.shared.deliveries.fail

    async def spoiled(
        connection: asyncpg.Connection, held: Sequence[Any], reasons: Any, errors: Any, signatures: Any
    ) -> list[UUID]:
        texts = [7 if each.id == identities[2] else error for each, error in zip(held, errors, strict=True)]
        return await fail(connection, held, reasons, texts, signatures)  # type: ignore[arg-type]

    worker._parts.shared.deliveries.fail = spoiled  # type: ignore[method-assign, assignment]
    identities = await publish_many(conn, "order.placed", 5)
    async with worker:
        for identity in (*identities[:2], *identities[3:]):
            await settled(conn, identity, "failed", within=5)
        await until(lambda: facts.notices("settle_refused"), what="it is told")
        assert worker.in_flight == 0
    refused = facts.notices("settle_refused")
    assert [notice.details["delivery_id"] for notice in refused] == [str(identities[2])]
    assert facts.notices("database_unavailable") == []
    await conn.execute("DELETE FROM core.outbox")


async def test_defect_while_settling_lets_the_leases_run_out(dsn: str, conn: asyncpg.Connection) -> None:
    """Deliveries that nobody will settle are not held for ever (LSN-3)."""
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> Reject | None:
        return Reject("no") if event.payload["n"] == 0 else None

    worker = Worker(dsn, registry, WorkerSettings(lease=1.0, poll_interval=0.1), observers=(facts.append,))
    one_by_one = worker._parts.settler._one_by_one
    deliver, calls = worker._parts.shared.deliveries.deliver, []

    async def broken(connection: asyncpg.Connection, batch: Any, *arguments: Any, **options: Any) -> list[UUID]:
        if not batch:
            return []
        calls.append(1)
        if len(calls) > 1:
            return await deliver(connection, batch, *arguments, **options)
        raise ZeroDivisionError

    async def worse(*_arguments: Any) -> None:
        worker._parts.settler._one_by_one = one_by_one  # type: ignore[method-assign]
        raise ZeroDivisionError

    worker._parts.shared.deliveries.deliver = broken  # type: ignore[method-assign]
    worker._parts.settler._one_by_one = worse  # type: ignore[method-assign]
    await publish_many(conn, "order.placed", 3)
    async with worker:
        await until(lambda: facts.notices("loop_failed"), what="the settling failed")
        await drained(conn)
        assert worker.in_flight == 0


@pytest.mark.parametrize("reject", [True, False])
async def test_answer_to_a_settle_that_never_arrives(dsn: str, conn: asyncpg.Connection, reject: bool) -> None:
    """The failure or the retry is told, though the second try finds the row settled (DLQ-6, RTY-3)."""
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(max_attempts=2))
    async def charge(event: EventEnvelope) -> Reject | Retry:
        return Reject("no") if reject else Retry(3600)

    worker = Worker(dsn, registry, WorkerSettings(), observers=(facts.append,))
    name = "fail" if reject else "retry"
    carried_out, tries = getattr(worker._parts.shared.deliveries, name), []

    async def unanswered(*arguments: Any) -> list[UUID]:
        lost: list[UUID] = await carried_out(*arguments)
        tries.append(lost)
        if len(tries) == 1:
            raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")
        return lost

    setattr(worker._parts.shared.deliveries, name, unanswered)
    async with worker:
        identity = await publish(conn, "order.placed")
        await until(lambda: facts.of(Failed if reject else Retried), what="it is told")
    assert tries == [[], [identity]]
    assert (worker.counters.failed, worker.counters.retried) == ((1, 0) if reject else (0, 1))
    assert worker.counters.lost_leases == 0


@pytest.mark.parametrize("how", ["expired", "snoozed"])
async def test_lost_leases_are_counted_as_nothing_else(dsn: str, conn: asyncpg.Connection, how: str) -> None:
    """Neither as expired nor as snoozed (LSN-3)."""
    registry, inside, go = HandlerRegistry(), asyncio.Event(), asyncio.Event()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> Snooze:
        inside.set()
        await go.wait()
        return Snooze(60)

    options: dict[str, Any] = {"expires_in": 0.001} if how == "expired" else {}
    worker = Worker(dsn, registry, WorkerSettings(), observers=())
    fail = worker._parts.shared.deliveries.fail

    async def late(*arguments: Any) -> list[UUID]:
        await conn.execute("DELETE FROM core.outbox")
        return await fail(*arguments)

    worker._parts.shared.deliveries.fail = late  # type: ignore[method-assign]
    identity = await publish(conn, "order.placed", **options)
    await asyncio.sleep(0.01)
    async with worker:
        if how == "snoozed":
            await inside.wait()
            await conn.execute("DELETE FROM core.outbox WHERE id = $1", identity)
            go.set()
        await until(lambda: worker.counters.lost_leases == 1, what="the lease is lost")
    assert (worker.counters.expired, worker.counters.snoozed, worker.counters.failed) == (0, 0, 0)


async def test_a_start_that_is_cancelled_leaves_no_error_behind(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the start meets after its cancellation, such as a closed connection, is nobody's to see (LSN-4)."""
    registry, entered, told = HandlerRegistry(), asyncio.Event(), list[Any]()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None: ...

    async def introduce(_lifecycle: Lifecycle) -> None:
        entered.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ConnectionError("the connection is closed") from None

    monkeypatch.setattr(Lifecycle, "introduce", introduce)
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    starting = asyncio.create_task(Worker(dsn, registry).run())
    await entered.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    del starting
    gc.collect()
    await asyncio.sleep(0)
    assert told == []
