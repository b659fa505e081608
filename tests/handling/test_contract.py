"""What holds for a handler's transaction in every library: one suite, every kind.

What the handler writes, what it publishes, the inbox row and the settle commit together, or nothing of it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Publisher, Reject, Retry, RetryPolicy, Snooze, Worker
from holdfast.middleware import CallNext
from holdfast.outcome import Outcome
from holdfast.postgres.delivery import Delivery
from holdfast.telemetry import Failed, Retried
from holdfast.worker.dispatcher import Dispatcher
from holdfast.worker.lease_keeper import digest_of
from holdfast.worker.transactions import Transactions
from tests.handling.kinds import ASYNCPG, KINDS, TABLE, Body, Kind, Work
from tests.operator.kept import policy
from tests.outbox import CHANNEL
from tests.worker.support import Facts, drained, publish, publish_many, row, running, settled, until

QUICK = RetryPolicy(max_attempts=5, base_delay=0.02, max_delay=0.05)
PUBLISHER = Publisher("ledger")
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture(autouse=True)
async def entries(conn: asyncpg.Connection) -> None:
    await conn.execute(TABLE)


@contextlib.asynccontextmanager
async def working(
    dsn: str,
    kind: Kind,
    body: Body,
    facts: Facts | None = None,
    *,
    timeout: float = 20.0,
    retry: RetryPolicy = QUICK,
    middleware: Any = (),
    source: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Worker]:
    """A worker whose only handler does what the body does, for `order.booked`."""
    registry = HandlerRegistry(middleware=middleware)
    registry.add("ledger.book", ("order.booked",), kind.handler(body), retry=retry, timeout=timeout)
    async with (
        kind.source(dsn, **(source or {})) as transactions,
        running(dsn, registry, facts, transactions=transactions, **settings) as worker,
    ):
        yield worker


async def written(conn: asyncpg.Connection) -> Counter[UUID]:
    return Counter(each["event_id"] for each in await conn.fetch("SELECT event_id FROM entries"))


async def handled(conn: asyncpg.Connection) -> int:
    return int(await conn.fetchval("SELECT count(*) FROM core.event_handled"))


# --- it commits together, or not at all ---------------------------------------------------------------------------


@every_kind
async def test_writes_inbox_and_delivery_commit_together(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """The handler's row, the event it publishes, the inbox row and the settle are one commit (LSN-13, LSN-5, PUB-4)."""
    seen = []
    outside = _Blocking(dsn)

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event)
        await work.flush()
        await work.publish(PUBLISHER, "entry.booked", {"order": event.payload["n"]})
        seen.append((outside.value("SELECT count(*) FROM entries"), outside.value("SELECT status FROM core.outbox")))

    identity = await publish(conn, "order.booked", {"n": 7})
    async with working(dsn, kind, body) as worker:
        await settled(conn, identity)
        await until(lambda: worker.in_flight == 0, what="the worker let go")
        assert worker.counters.delivered == 1
    outside.close()
    assert seen == [(0, "in_flight")]
    assert await written(conn) == {identity: 1}
    rows = await conn.fetch("SELECT event_type, status, source FROM core.outbox ORDER BY seq")
    assert [tuple(each) for each in rows] == [
        ("order.booked", "delivered", "shop"),
        ("entry.booked", "pending", "ledger"),
    ]
    inbox = await conn.fetch("SELECT handler_name FROM core.event_handled")
    assert [each[0] for each in inbox] == ["ledger.book"]


class _Blocking:
    """A connection of psycopg, for code in a thread."""

    def __init__(self, dsn: str) -> None:
        import psycopg

        self._connection = psycopg.connect(dsn, autocommit=True)

    def value(self, sql: str) -> Any:
        found = self._connection.execute(sql).fetchone()  # type: ignore[call-overload]
        return None if found is None else found[0]

    def close(self) -> None:
        self._connection.close()


@every_kind
async def test_a_handler_that_fails_leaves_nothing(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """What it wrote and published before its error is taken back; the next attempt starts from nothing (LSN-13)."""
    runs: list[int] = []
    facts = Facts()

    async def body(event: EventEnvelope, work: Work) -> None:
        runs.append(1)
        await work.book(event)
        await work.flush()
        await work.publish(PUBLISHER, "entry.booked", {"run": len(runs)})
        if len(runs) < 3:
            raise ConnectionError("the other side is not there")

    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body, facts):
        found = await settled(conn, identity)
        await until(lambda: len(facts.of(Retried)) == 2, what="two retries are reported")
    assert len(runs) == 3 and found["attempts"] == 3
    assert await written(conn) == {identity: 1}
    assert [
        each[0] for each in await conn.fetch("SELECT payload->>'run' FROM core.outbox WHERE source = 'ledger'")
    ] == ["3"]
    assert "the other side is not there" in facts.of(Retried)[0].last_error


@every_kind
async def test_a_retry_that_is_due_at_once_is_counted(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """It may be claimed again before its connection is back in the pool; that is no lost lease (LSN-14)."""
    seen: set[UUID] = set()

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event, event.payload["n"])
        await work.flush()
        if event.event_id not in seen:
            seen.add(event.event_id)
            raise ConnectionError("the other side is not there")

    ids = await publish_many(conn, "order.booked", 100)
    at_once = RetryPolicy(base_delay=0.001, max_delay=0.001)
    async with working(dsn, kind, body, retry=at_once) as worker:
        await drained(conn)
        await until(lambda: worker.in_flight == 0, what="the worker let go")
    assert (worker.counters.retried, worker.counters.lost_leases, worker.counters.snoozed) == (100, 0, 0)
    assert await written(conn) == Counter(ids)


@every_kind
async def test_a_look_at_leases_stops_no_retry_that_is_committed(
    dsn: str, conn: asyncpg.Connection, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database finds no lease once the retry is committed; whose answer is on its way was not lost (LSN-14)."""
    settle, cancel, looked = Transactions._settle, Dispatcher.cancel, threading.Event()
    outside = _Blocking(dsn)

    async def settle_with_a_late_answer(self: Transactions, *values: Any) -> bool:
        committed = await settle(self, *values)
        while not looked.is_set():
            outside.value(f"SELECT pg_notify('{CHANNEL}', 'cancel {digest_of(identity)}')")
            await asyncio.sleep(0.02) if kind.asynchronous else time.sleep(0.02)
        return committed

    def cancel_what_has_no_lease(self: Dispatcher, lost: Iterable[Delivery]) -> None:
        cancel(self, lost)
        looked.set()

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event)
        raise ConnectionError("the other side is not there")

    monkeypatch.setattr(Transactions, "_settle", settle_with_a_late_answer)
    monkeypatch.setattr(Dispatcher, "cancel", cancel_what_has_no_lease)
    identity = await publish(conn, "order.booked")
    later = RetryPolicy(base_delay=60.0, max_delay=60.0)
    with contextlib.closing(outside):
        async with working(dsn, kind, body, retry=later) as worker:
            await until(lambda: worker.in_flight == 0 and looked.is_set(), what="the worker let go")
            assert (worker.counters.retried, worker.counters.lost_leases) == (1, 0)
    assert (await row(conn, identity))["attempts"] == 1


@pytest.mark.matrix("kind", "outcome")
@every_kind
@pytest.mark.parametrize("outcome", [Retry(0.01, "not yet"), Snooze(0.01), Reject("never")], ids=repr)
async def test_an_outcome_takes_the_writes_back(
    dsn: str, conn: asyncpg.Connection, kind: Kind, outcome: Outcome
) -> None:
    """Retry, Snooze and Reject settle the delivery as they say, without anything of the handler's (LSN-13, LSN-14)."""
    runs: list[int] = []

    async def body(event: EventEnvelope, work: Work) -> Outcome | None:
        runs.append(1)
        await work.book(event)
        return outcome if len(runs) == 1 else None

    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body):
        rejected = isinstance(outcome, Reject)
        found = await settled(conn, identity, "failed" if rejected else "delivered")
    assert await written(conn) == ({} if rejected else {identity: 1})
    assert await handled(conn) == (0 if rejected else 1)
    assert found["attempts"] == (2 if isinstance(outcome, Retry) else 1)


@every_kind
async def test_a_second_copy_is_not_run(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Two events with one idempotency key have one effect (LSN-5)."""
    runs: list[int] = []

    async def body(event: EventEnvelope, work: Work) -> None:
        runs.append(1)
        await work.book(event)

    for _ in range(2):
        await conn.execute(
            "INSERT INTO core.outbox (event_type, source, payload, idempotency_key)"
            " VALUES ('order.booked', 'shop', '{}', 'order-17')"
        )
    async with working(dsn, kind, body):
        await drained(conn)
    assert len(runs) == 1 and (await written(conn)).total() == 1
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 2


@every_kind
async def test_many_events_through_a_small_pool(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """More handlers than connections; each event has its one effect (LSN-13, LSN-17)."""

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event, event.payload["n"])

    ids = await publish_many(conn, "order.booked", 300)
    async with working(dsn, kind, body, connections=10):
        await drained(conn)
    assert await written(conn) == Counter(ids)
    assert await handled(conn) == 300


# --- the transaction is not the handler's to end -------------------------------------------------------------------


@pytest.mark.matrix("kind", "way")
@every_kind
@pytest.mark.parametrize("way", ["commit", "rollback"])
async def test_commit_and_rollback_are_refused(dsn: str, conn: asyncpg.Connection, kind: Kind, way: str) -> None:
    """The event is a dead letter that says what to do instead, and nothing is half done (LSN-13)."""

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event)
        await getattr(work, way)()

    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body):
        found = await settled(conn, identity, "failed")
    assert await written(conn) == {} and await handled(conn) == 0
    assert "the handler ended its transaction by hand" in found["last_error"] and found["attempts"] == 1


@pytest.mark.matrix("kind", "way")
@every_kind
@pytest.mark.parametrize("way", ["commit", "rollback"])
async def test_a_refusal_that_the_handler_catches(dsn: str, conn: asyncpg.Connection, kind: Kind, way: str) -> None:
    """Code that rolls back what went wrong, and goes on, must not commit what it wanted to take back (LSN-13)."""

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event)
        await work.flush()
        with contextlib.suppress(Exception):
            await getattr(work, way)()

    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body):
        found = await settled(conn, identity, "failed")
    assert await written(conn) == {} and await handled(conn) == 0
    assert "the handler ended its transaction by hand" in found["last_error"] and found["attempts"] == 1


@pytest.mark.matrix("kind", "sql")
@every_kind
@pytest.mark.parametrize("sql", ["COMMIT", "COMMIT; BEGIN", "ROLLBACK", "ROLLBACK; BEGIN"])
async def test_an_end_in_sql_is_noticed(dsn: str, conn: asyncpg.Connection, kind: Kind, sql: str) -> None:
    """A COMMIT that went through has committed the delivery too; after a ROLLBACK nothing counts as handled
    (LSN-13).
    """
    if kind is ASYNCPG and ";" not in sql:
        pytest.skip("refused before it is sent")
    if kind is ASYNCPG or (kind.name in ("AsyncSession", "AsyncConnection") and ";" in sql):
        pytest.skip("asyncpg sends no two statements at once" if kind is not ASYNCPG else "not noticed")

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event, 1)
        await work.flush()
        await work.execute(sql)

    facts = Facts()
    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body, facts) as worker:
        found = await settled(conn, identity, "delivered" if sql.startswith("COMMIT") else "failed")
        await until(lambda: worker.in_flight == 0, what="the worker let go")
    committed = sql.startswith("COMMIT")
    assert worker.counters.delivered == committed and worker.counters.lost_leases == 0
    assert await written(conn) == ({identity: 1} if committed else {})
    assert await handled(conn) == (1 if committed else 0)
    if not committed:
        assert "by hand" in found["last_error"]


@every_kind
async def test_a_savepoint_of_the_handlers(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """A part that fails is taken back alone, and the rest commits (LSN-13)."""

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event, 1)
        await work.flush()
        for _ in range(2):
            with contextlib.suppress(Exception):
                async with work.savepoint():
                    await work.book(event, 2)
                    await work.flush()

    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body):
        found = await settled(conn, identity)
    assert found["attempts"] == 1
    assert [each[0] for each in await conn.fetch("SELECT n FROM entries")] == [1]


@every_kind
async def test_going_on_after_a_failed_statement(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Postgres answers the COMMIT of a failed transaction with a silent rollback; that is no success (LSN-13)."""
    runs: list[int] = []

    async def body(event: EventEnvelope, work: Work) -> None:
        runs.append(1)
        await work.book(event)
        await work.flush()
        if len(runs) == 1:
            with contextlib.suppress(Exception):
                await work.execute("SELECT 1 / 0")

    identity = await publish(conn, "order.booked")
    facts = Facts()
    async with working(dsn, kind, body, facts):
        found = await settled(conn, identity)
        await until(lambda: facts.of(Retried), what="the retry is reported")
    assert found["attempts"] == 2 and await written(conn) == {identity: 1}
    assert "went on after a statement had failed" in facts.of(Retried)[0].last_error


@every_kind
async def test_a_failed_flush_that_is_swallowed(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """A session that a failed flush has broken is no success either; the next attempt has a new one (LSN-13)."""
    runs: list[int] = []

    async def body(event: EventEnvelope, work: Work) -> None:
        runs.append(1)
        await work.book(event, 1)
        if len(runs) == 1:
            with contextlib.suppress(Exception):
                await work.book(event, 2)
                await work.flush()

    identity = await publish(conn, "order.booked")
    facts = Facts()
    async with working(dsn, kind, body, facts):
        found = await settled(conn, identity)
        await until(lambda: facts.of(Retried), what="the retry is reported")
    assert found["attempts"] == 2 and await written(conn) == {identity: 1}
    assert "went on after a statement had failed" in facts.of(Retried)[0].last_error


@every_kind
async def test_what_is_left_to_write_is_written_and_may_fail(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """A flush that fails with the commit is the handler's failure, and nothing of it stays (LSN-13)."""

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event, 1)
        await work.book(event, 2)

    identity = await publish(conn, "order.booked")
    facts = Facts()
    async with working(dsn, kind, body, facts):
        await settled(conn, identity, "failed")
        await until(lambda: facts.of(Failed), what="the failure is reported")
    assert await written(conn) == {} and await handled(conn) == 0
    assert "once" in str(facts.of(Failed)[0].last_error)


@every_kind
async def test_a_constraint_that_fails_at_the_commit(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """The server refuses the COMMIT, and says so: nothing is asked, and the event has failed (LSN-13)."""
    await conn.execute("INSERT INTO entries (event_id, n) VALUES (gen_random_uuid(), 1)")

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event, 1)

    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body):
        found = await settled(conn, identity, "failed")
    assert identity not in await written(conn) and await handled(conn) == 0
    assert "at_commit" in found["last_error"]


# --- other transactions ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_kind
async def test_a_row_that_another_session_has_locked(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """The delivery waits without an attempt counted until the other session has ended (LSN-5)."""

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event)

    identity = await publish(conn, "order.booked")
    other = await asyncpg.connect(dsn)
    async with other.transaction():
        await other.execute(
            "INSERT INTO core.event_handled (handler_name, idempotency_key, source)"
            " SELECT 'ledger.book', idempotency_key, source FROM core.outbox"
        )
        async with working(dsn, kind, body) as worker:
            await until(lambda: worker.counters.snoozed or worker.counters.claimed > 1, what="the delivery is put off")
            assert await written(conn) == {}
            await other.execute("DELETE FROM core.event_handled")
            await other.execute("COMMIT; BEGIN")
            found = await settled(conn, identity)
    await other.close()
    assert found["attempts"] == 1 and await written(conn) == {identity: 1}


@every_kind
async def test_serialization_failures_are_run_again(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """40001 of the handler's own work is retried until it passes; no increment is lost (LSN-14)."""
    await conn.execute("CREATE TABLE counter (n int); INSERT INTO counter VALUES (0)")
    source: dict[str, Any] = {}
    if kind.package == "sqlalchemy":
        source = {"isolation_level": "REPEATABLE READ"}
    elif kind.package == "psycopg":
        source = {"kwargs": {"options": "-c default_transaction_isolation=repeatable\\ read"}}
    elif kind.package == "django":
        source = {"options": "-c default_transaction_isolation=repeatable\\ read"}

    async def body(event: EventEnvelope, work: Work) -> None:
        if kind is ASYNCPG:
            await work.execute("SELECT 1 FROM counter FOR UPDATE")
        await work.execute("UPDATE counter SET n = n + 1")

    await publish_many(conn, "order.booked", 12)
    patient = RetryPolicy(max_attempts=50, base_delay=0.01, max_delay=0.05)
    async with working(dsn, kind, body, source=source, retry=patient):
        await drained(conn)
    assert await conn.fetchval("SELECT n FROM counter") == 12
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 12


@every_kind
async def test_deadlocks_are_run_again(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """40P01: the one that lost is run again (LSN-14)."""
    await conn.execute("CREATE TABLE pair (id int PRIMARY KEY, n int); INSERT INTO pair VALUES (0, 0), (1, 0)")
    met = threading.Barrier(2)
    runs: list[int] = []

    async def meet() -> None:
        if kind.asynchronous:
            await until(lambda: len(runs) >= 2, what="both handlers have one row")
        else:
            met.wait(10)

    async def body(event: EventEnvelope, work: Work) -> None:
        first = event.payload["n"] % 2
        await work.execute(f"UPDATE pair SET n = n + 1 WHERE id = {first}")
        runs.append(first)
        if len(runs) <= 2:
            await meet()
        await work.execute(f"UPDATE pair SET n = n + 1 WHERE id = {1 - first}")

    await publish_many(conn, "order.booked", 2)
    async with working(dsn, kind, body):
        await drained(conn)
    assert [each[0] for each in await conn.fetch("SELECT n FROM pair")] == [2, 2]
    assert len(runs) == 3


@every_kind
async def test_the_connection_is_ended_in_the_middle(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """An administrator ends the session while the handler runs: run again, with one effect (LSN-13)."""
    runs: list[int] = []

    async def body(event: EventEnvelope, work: Work) -> None:
        runs.append(1)
        await work.book(event)
        await work.flush()
        if len(runs) == 1:
            await work.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body):
        await settled(conn, identity)
    assert len(runs) == 2 and await written(conn) == {identity: 1}


# --- leases and limits ------------------------------------------------------------------------------------------------


@every_kind
async def test_a_lease_that_is_lost_before_the_transaction(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """The handler is not run for a row that another worker has by now (LSN-3)."""
    runs: list[int] = []

    async def body(event: EventEnvelope, work: Work) -> None:
        runs.append(1)
        await work.book(event)

    async def first_claimed(event: EventEnvelope, call_next: CallNext) -> Outcome:
        return await call_next(event)

    async with working(dsn, kind, body, middleware=[first_claimed]) as worker:
        deliveries = worker._parts.shared.deliveries
        claim = deliveries.claim

        async def late(*arguments: Any, **options: Any) -> Any:
            claimed, keyed = await claim(*arguments, **options)
            for each in claimed if not worker.counters.lost_leases else ():
                await conn.execute("UPDATE core.outbox SET lease_token = gen_random_uuid() WHERE id = $1", each.id)
            return claimed, keyed

        deliveries.claim = late  # type: ignore[method-assign]
        identity = await publish(conn, "order.booked")
        await until(lambda: worker.counters.lost_leases == 1, what="the lease is found to be lost")
        assert runs == [] and await handled(conn) == 0
        deliveries.claim = claim  # type: ignore[method-assign]
        await conn.execute("UPDATE core.outbox SET status = 'pending', lease_token = NULL, lease_expires_at = NULL")
        await conn.execute("SELECT pg_notify('outbox_default', 'rescan')")
        await settled(conn, identity)
    assert runs == [1] and await written(conn) == {identity: 1}


@every_kind
async def test_an_event_that_is_cancelled_while_it_runs(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """What the handler wrote is not committed, in a thread either (LSN-11, LSN-13)."""
    started, let_go = threading.Event(), threading.Event()

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event)
        await work.flush()
        started.set()
        if kind.asynchronous:
            await asyncio.sleep(30)
        else:
            let_go.wait(30)

    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body, lease=1.5, poll_interval=0.3) as worker:
        await until(started.is_set, what="the handler runs")
        await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann@example.com')", identity)
        await until(lambda: worker.in_flight == 0, what="the worker let go")
        let_go.set()
        await settled(conn, identity, "failed")
    assert await written(conn) == {} and await handled(conn) == 0


@every_kind
async def test_a_statement_past_the_time_limit(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """The statement is cut off, also in a thread, which cannot be stopped; the next attempt succeeds (LSN-14)."""
    runs: list[int] = []
    facts = Facts()

    async def body(event: EventEnvelope, work: Work) -> None:
        runs.append(1)
        await work.book(event)
        await work.flush()
        if len(runs) == 1:
            await work.execute("SELECT pg_sleep(30)")

    identity = await publish(conn, "order.booked")
    started = time.monotonic()
    async with working(dsn, kind, body, facts, timeout=1.0):
        await settled(conn, identity)
        await until(lambda: facts.of(Retried), what="the retry is reported")
    assert time.monotonic() - started < 15
    assert len(runs) == 2 and await written(conn) == {identity: 1}
    assert "longer than its limit of 1 s" in facts.of(Retried)[0].last_error


@pytest.mark.slow
@pytest.mark.matrix("kind", "lease")
@pytest.mark.parametrize(("timeout", "lease"), [(0.3, 1.0), (1.5, 1.0)], ids=["lease", "limit"])
@pytest.mark.parametrize("kind", [each for each in KINDS if not each.asynchronous], ids=str)
async def test_a_thread_past_the_time_limit_keeps_its_lease(
    dsn: str, conn: asyncpg.Connection, kind: Kind, timeout: float, lease: float
) -> None:
    """No second attempt runs beside a thread that hangs, whichever is longer, its limit or the lease.

    It cannot commit, and is not reported as delivered (LSN-14).
    """
    running_now: list[int] = []
    most: list[int] = []
    let_go = threading.Event()

    async def body(event: EventEnvelope, work: Work) -> None:
        running_now.append(1)
        most.append(len(running_now))
        await work.book(event)
        await work.flush()
        if len(most) == 1:
            let_go.wait(30)
        running_now.pop()

    identity = await publish(conn, "order.booked")
    facts = Facts()
    async with working(dsn, kind, body, facts, timeout=timeout, lease=lease) as worker:
        await until(lambda: most, what="the handler runs")
        await until(lambda: facts.notices("handler_overran"), what="the limit has passed")
        await asyncio.sleep(2.5)  # more than two leases
        assert most == [1] and worker.in_flight == 1
        let_go.set()
        found = await settled(conn, identity)
        await until(lambda: worker.in_flight == 0, what="the worker let go")
    assert most == [1, 1] and found["attempts"] == 2
    assert (worker.counters.delivered, worker.counters.retried, worker.counters.lost_leases) == (1, 1, 0)
    assert await written(conn) == {identity: 1}


@every_kind
async def test_a_worker_that_stops_in_the_middle(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """What has not finished within the grace leaves nothing, and is there for the next worker (LSN-8)."""
    started, let_go = threading.Event(), threading.Event()
    runs: list[int] = []

    async def body(event: EventEnvelope, work: Work) -> None:
        runs.append(1)
        await work.book(event)
        await work.flush()
        started.set()
        if len(runs) == 1:
            if kind.asynchronous:
                await asyncio.sleep(30)
            else:
                let_go.wait(30)

    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body, grace=0.2):
        await until(started.is_set, what="the handler runs")
    let_go.set()
    found = await row(conn, identity)
    assert found["status"] == "pending" and found["attempts"] == 0
    assert await written(conn) == {}
    await conn.execute("UPDATE core.outbox SET available_at = now()")
    async with working(dsn, kind, body):
        await settled(conn, identity)
    assert await written(conn) == {identity: 1}


# --- around it ----------------------------------------------------------------------------------------------------


@every_kind
async def test_middleware_runs_within_the_transaction(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Around the handler, on the event loop; an error that it raises afterwards takes the writes back (LSN-13)."""
    steps: list[str] = []
    loop = asyncio.get_running_loop()

    async def around(event: EventEnvelope, call_next: CallNext) -> Outcome:
        assert asyncio.get_running_loop() is loop
        steps.append("before")
        outcome = await call_next(event)
        steps.append("after")
        if len(steps) == 3:
            raise ConnectionError("not yet")
        return outcome

    async def body(event: EventEnvelope, work: Work) -> None:
        steps.append("handler")
        await work.book(event)
        await work.flush()

    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body, middleware=[around]):
        found = await settled(conn, identity)
    assert steps == ["before", "handler", "after"] * 2
    assert found["attempts"] == 2 and await written(conn) == {identity: 1}


@every_kind
async def test_rows_that_are_not_kept_are_deleted(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Where the retention policy keeps no delivered rows, the row goes with the same commit (LSN-13)."""
    await policy(conn, "outbox_row", 0, 0)

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event)

    identity = await publish(conn, "order.booked")
    async with working(dsn, kind, body):
        await until(lambda: conn.fetchval("SELECT NOT EXISTS (SELECT FROM core.outbox)"), what="the row is deleted")
    assert await written(conn) == {identity: 1} and await handled(conn) == 1
