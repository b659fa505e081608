"""Every kind of handler on a whole worker: what it is given, and what becomes of what it publishes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic import BaseModel

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, Publisher, RetryPolicy, TerminalHandlerError
from tests.worker.support import (
    Facts,
    backends,
    drained,
    effects,
    insert,
    make_tables,
    publish,
    publish_many,
    row,
    running,
    settled,
    until,
)


async def test_async_handler_gets_the_envelope(dsn: str, conn: asyncpg.Connection) -> None:
    """All ten fields arrive as they were published (LSN-5, ENV-1)."""
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event)

    domain, occurred = uuid4(), datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    payload = {"text": "naïve 漢字 😀", "deep": {"list": [1, 2.5, None, True]}, "big": 2**60}
    identity = await publish(
        conn,
        "order.placed",
        payload,
        event_version=3,
        occurred_at=occurred,
        domain_id=domain,
        idempotency_key="order-1",
        trace_context="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )
    async with running(dsn, registry):
        delivered = await settled(conn, identity)
    assert seen == [
        EventEnvelope(
            event_id=identity,
            event_type="order.placed",
            event_version=3,
            occurred_at=occurred,
            source="shop",
            target=None,
            domain_id=domain,
            payload=payload,
            idempotency_key="order-1",
            trace_context="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        )
    ]
    assert delivered["attempts"] == 1
    assert delivered["handler_name"] == "billing.charge"
    assert delivered["delivered_at"] is not None
    assert delivered["lease_token"] is None
    inbox = await conn.fetch("SELECT handler_name, idempotency_key FROM core.event_handled")
    assert [tuple(each) for each in inbox] == [("billing.charge", "order-1")]


async def test_sync_handlers_run_in_threads_side_by_side(dsn: str, conn: asyncpg.Connection) -> None:
    """Plain functions neither block the loop nor each other (LSN-5)."""
    registry, meeting, names = HandlerRegistry(), threading.Barrier(3, timeout=10), []

    @registry.handler("order.placed", name="billing.charge")
    def charge(event: EventEnvelope) -> None:
        meeting.wait()  # passes only when three of them run at once
        names.append(threading.current_thread().name)

    await publish_many(conn, "order.placed", 3)
    async with running(dsn, registry, threads=3):
        await drained(conn)
    assert len(set(names)) == 3
    assert threading.current_thread().name not in names


class Line(BaseModel):
    sku: str
    count: int


class OrderPlaced(BaseModel):
    order_id: int
    lines: list[Line] = []


@dataclass
class OrderShipped:
    order_id: int
    carrier: str = "post"


async def test_typed_payloads(dsn: str, conn: asyncpg.Connection) -> None:
    """A handler's own model is filled from the payload, and unknown fields are ignored (LSN-5, ENV-3)."""
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, payload: OrderPlaced) -> None:
        seen.append(payload)

    @registry.handler("order.shipped", name="billing.close")
    def close(event: EventEnvelope, payload: OrderShipped) -> None:
        seen.append(payload)

    await publish(conn, "order.placed", {"order_id": 1, "lines": [{"sku": "a", "count": 2, "added": 1}], "added": True})
    await publish(conn, "order.shipped", {"order_id": 2, "added": True})
    async with running(dsn, registry):
        await drained(conn)
    assert OrderPlaced(order_id=1, lines=[Line(sku="a", count=2)]) in seen
    assert OrderShipped(2) in seen


@pytest.mark.parametrize("transactional", [False, True])
async def test_invalid_payload_fails_at_once(dsn: str, conn: asyncpg.Connection, transactional: bool) -> None:
    """A payload that is not what the handler's model says is terminal, and its values stay out of it (ENV-3, RTY-2)."""
    registry, calls = HandlerRegistry(), []

    if transactional:

        @registry.handler("order.placed", name="billing.charge")
        async def charge_in_transaction(event: EventEnvelope, payload: OrderPlaced, tx: asyncpg.Connection) -> None:
            calls.append(event)

    else:

        @registry.handler("order.placed", name="billing.charge")
        async def charge(event: EventEnvelope, payload: OrderPlaced) -> None:
            calls.append(event)

    bad = await publish(conn, "order.placed", {"order_id": "canary-7f"})
    good = await publish(conn, "order.placed", {"order_id": 1})
    async with running(dsn, registry):
        failed = await settled(conn, bad, "failed")
        await settled(conn, good)
    assert [event.event_id for event in calls] == [good]
    assert (failed["failure_reason"], failed["attempts"]) == ("retry_terminal", 1)
    assert "order_id" in failed["last_error"]
    assert "canary-7f" not in failed["last_error"]


async def test_context_object(dsn: str, conn: asyncpg.Connection) -> None:
    """Headers, correlation, causation and the number of the attempt are in the context (LSN-5, PUB-2)."""
    registry, seen = HandlerRegistry(), []
    policy = RetryPolicy(base_delay=0.001, max_delay=0.001)

    @registry.handler("order.placed", name="billing.charge", retry=policy)
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        seen.append(context)
        if context.attempt == 1:
            raise ConnectionError("once")

    identity = await publish(
        conn, "order.placed", {}, headers={"tenant": "acme"}, correlation_id="c-1", causation_id="e-0"
    )
    async with running(dsn, registry):
        await settled(conn, identity)
    first, second = seen
    assert (first.event_id, first.delivery_id, first.handler_name) == (identity, identity, "billing.charge")
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.headers["tenant"] == "acme"
    assert (first.correlation_id, first.causation_id) == ("c-1", "e-0")


async def test_transaction_commits_effect_inbox_and_settle_together(dsn: str, conn: asyncpg.Connection) -> None:
    """Nothing of the three is visible while the handler runs, all of them afterwards (LSN-5)."""
    await make_tables(conn)
    registry, inside, other = HandlerRegistry(), [], await asyncpg.connect(dsn)

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (event_id, n) VALUES ($1, 1)", event.event_id)
        inside.append(await effects(other))
        inside.append(await other.fetchval("SELECT count(*) FROM core.event_handled"))
        inside.append((await row(other, event.event_id))["status"])

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry) as worker:
        await settled(conn, identity)
        await until(lambda: worker.in_flight == 0, what="the worker let go of the delivery")
        assert worker.counters.delivered == 1
    await other.close()
    assert inside == [[], 0, "in_flight"]
    assert await effects(conn) == [1]
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 1


async def test_transaction_of_a_failed_attempt_leaves_nothing(dsn: str, conn: asyncpg.Connection) -> None:
    """The effect and the inbox row of a failed attempt are rolled back, and the retry runs (LSN-5, E2)."""
    await make_tables(conn)
    registry, attempts = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(base_delay=0.001, max_delay=0.001))
    async def charge(event: EventEnvelope, tx: asyncpg.Connection, context: HandlerContext) -> None:
        attempts.append(context.attempt)
        await tx.execute("INSERT INTO ledger (event_id, n) VALUES ($1, $2)", event.event_id, context.attempt)
        if context.attempt < 3:
            raise ConnectionError("after the effect")

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry):
        await settled(conn, identity)
    assert attempts == [1, 2, 3]
    assert await effects(conn) == [3]


async def test_transaction_aborted_by_the_handlers_own_sql(dsn: str, conn: asyncpg.Connection) -> None:
    """A statement that the database refuses fails its own event, and the connection serves the next (LSN-5)."""
    await make_tables(conn)
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (n) VALUES (1 / $1::int)", event.payload["divisor"])

    @registry.handler("order.swallowed", name="billing.swallow", retry=RetryPolicy(strategy="none"))
    async def swallow(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        with contextlib.suppress(asyncpg.DivisionByZeroError):  # the transaction is aborted all the same
            await tx.execute("SELECT 1 / 0")

    bad = await publish(conn, "order.placed", {"divisor": 0})
    swallowed = await publish(conn, "order.swallowed")
    good = await publish(conn, "order.placed", {"divisor": 1})
    async with running(dsn, registry, connections=1):
        failed = await settled(conn, bad, "failed")
        assert (failed["failure_reason"], failed["attempts"]) == ("retry_terminal", 1)  # SQLSTATE class 22
        await settled(conn, good)
        await settled(conn, swallowed, "failed")
    assert await effects(conn) == [1]


@pytest.mark.parametrize("kind", ["tx", "sync"])
async def test_waiting_for_a_connection_or_a_thread_takes_no_time(
    dsn: str, conn: asyncpg.Connection, kind: str
) -> None:
    """The time limit is the handler's own; waiting for one of few connections or threads is not counted (LSN-11,
    B9).
    """
    registry, seen = HandlerRegistry(), []

    if kind == "tx":

        @registry.handler("order.placed", name="billing.charge", timeout=1.0)
        async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            seen.append(event.payload["n"])
            await asyncio.sleep(0.15)

    else:

        @registry.handler("order.placed", name="billing.charge", timeout=1.0)
        def block(event: EventEnvelope) -> None:
            seen.append(event.payload["n"])
            time.sleep(0.15)

    await publish_many(conn, "order.placed", 12)
    async with running(dsn, registry, connections=1, threads=1, lease=1.0) as worker:
        await drained(conn)
        assert len(await backends(conn, "handler")) <= 1
        assert (worker.counters.retried, worker.counters.lost_leases) == (0, 0)
    assert seen == list(range(12))


async def test_what_a_handler_publishes_inherits_correlation(dsn: str, conn: asyncpg.Connection) -> None:
    """Three links of a chain share the first event's id as correlation, each names its cause (PUB-2)."""
    registry, publisher, seen = HandlerRegistry(), Publisher("billing"), {}

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await publisher.publish(tx, "card.charged", {})

    @registry.handler("card.charged", name="shipping.ship")
    async def ship(event: EventEnvelope, tx: asyncpg.Connection, context: HandlerContext) -> None:
        seen["charged"] = context
        await publisher.publish(tx, "parcel.sent", {})

    @registry.handler("parcel.sent", name="mail.tell")
    def tell(event: EventEnvelope, context: HandlerContext) -> None:
        seen["sent"] = context

    first = await publish(conn, "order.placed", headers={"tenant": "acme"})
    async with running(dsn, registry, poll_interval=3600):
        await until(lambda: "sent" in seen, what="the third event of the chain")
        await drained(conn)
    assert seen["charged"].correlation_id == seen["sent"].correlation_id == str(first)
    assert seen["charged"].causation_id == str(first)
    assert seen["sent"].causation_id == str(seen["charged"].event_id)
    assert seen["sent"].headers["tenant"] == "acme"


async def test_publishing_from_a_thread_inherits_too(dsn: str, conn: asyncpg.Connection) -> None:
    """The context reaches handlers in threads, which publish with a synchronous driver (PUB-2)."""
    import psycopg

    registry, publisher, seen = HandlerRegistry(), Publisher("billing"), []

    @registry.handler("order.placed", name="billing.charge")
    def charge(event: EventEnvelope) -> None:
        with psycopg.connect(dsn) as connection:
            publisher.publish(connection, "card.charged", {})

    @registry.handler("card.charged", name="shipping.ship")
    async def ship(event: EventEnvelope, context: HandlerContext) -> None:
        seen.append(context)

    first = await publish(conn, "order.placed", correlation_id="c-9")
    async with running(dsn, registry):
        await until(lambda: seen, what="the published event")
        await drained(conn)
    assert (seen[0].correlation_id, seen[0].causation_id) == ("c-9", str(first))


async def test_what_a_rolled_back_handler_published_never_existed(dsn: str, conn: asyncpg.Connection) -> None:
    """An event published in the handler's transaction goes with it (PUB-1, LSN-5)."""
    registry, publisher = HandlerRegistry(), Publisher("billing")

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await publisher.publish(tx, "card.charged", {})
        raise TerminalHandlerError("no card")

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry):
        await settled(conn, identity, "failed")
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 1


async def test_claims_come_in_batches(dsn: str, conn: asyncpg.Connection) -> None:
    """Two thousand events are claimed and settled in far fewer statements, in order (LSN-1)."""
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None:
        seen.append(event.payload["n"])

    await publish_many(conn, "order.placed", 2000)
    async with running(dsn, registry) as worker:
        await drained(conn)
        assert worker.counters.claims < 200
        assert worker.counters.settles < 400
        await until(lambda: worker.in_flight == 0, what="nothing is held")
    assert seen == list(range(2000))


async def test_worker_needs_only_the_worker_role(dsn: str, conn: asyncpg.Connection) -> None:
    """A login that is a member of holdfast_worker and nothing else runs every kind of handler (OBX-2, S3)."""
    await make_tables(conn)
    login = f"w_{uuid4().hex[:12]}"
    await conn.execute(
        f"CREATE ROLE {login} LOGIN PASSWORD 'only-here' IN ROLE holdfast_worker; GRANT INSERT ON ledger TO {login}"
    )
    registry, seen = HandlerRegistry(), []
    policy = RetryPolicy(max_attempts=2, base_delay=0.001, max_delay=0.001)

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (n) VALUES (1)")

    @registry.handler("order.*", name="audit.write", retry=policy)
    async def write(event: EventEnvelope) -> None:
        seen.append(event.event_type)
        if event.event_type == "order.broken":
            raise ConnectionError

    try:
        await publish(conn, "order.placed")
        await publish(conn, "order.broken")
        host = dsn.rpartition("@")[2]
        async with running(f"postgresql://{login}:only-here@{host}", registry, Facts(), poll_interval=3600):
            await drained(conn)
            await insert(conn, "order.later")
            await until(lambda: "order.later" in seen, within=10, what="a type that appeared later")
            await drained(conn)
        assert await effects(conn) == [1]
        assert sorted(seen) == ["order.broken", "order.broken", "order.later", "order.placed"]
    finally:
        await conn.execute(f"DROP OWNED BY {login}; DROP ROLE {login}")


async def test_worker_appears_in_the_fleet(dsn: str, conn: asyncpg.Connection) -> None:
    """core.workers names the worker while it runs, and says when it stopped (GEN-1)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None: ...

    async with running(dsn, registry, name="shop-1") as worker:
        query = "SELECT name, channels, handlers, stopped_at FROM core.workers WHERE id = $1"
        found = await until(lambda: conn.fetchrow(query, worker.id), what="the worker is registered")
        assert tuple(found) == ("shop-1", ["outbox_default"], ["billing.charge"], None)
        identity: UUID = worker.id
    assert await conn.fetchval("SELECT stopped_at FROM core.workers WHERE id = $1", identity) is not None


async def test_worker_that_stops_at_once_says_goodbye(dsn: str, conn: asyncpg.Connection) -> None:
    """Also when it is stopped in the middle of its first report (GEN-1)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None: ...

    for _ in range(20):
        async with running(dsn, registry):
            pass
    assert await conn.fetchval("SELECT count(*) FROM core.workers WHERE stopped_at IS NULL") == 0
