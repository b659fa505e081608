"""The facts of a worker, its schedules and outages, and of idempotent requests, as they come."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import structlog

from holdfast import EventEnvelope, HandlerRegistry, Publisher, Reject, Snooze, Worker, WorkerSettings
from holdfast.idempotency import IdempotencyMiddleware, exchange_of
from holdfast.observability.alike import ALONE
from holdfast.observability.background import MOST
from holdfast.observability.logging import LogObserver
from holdfast.observing import DirectObservers
from holdfast.telemetry import Fact, Fired, Handled, LostLease, Outage, Released, Requested, Snoozed
from holdfast.worker.draining import Drainer
from holdfast.worker.outage import Outages
from tests.worker.support import Facts, Observed, drained, publish, publish_many, running, until


async def test_a_delivery_that_is_snoozed_and_then_released(dsn: str, conn: asyncpg.Connection) -> None:
    """With how long its handler had run, and when it is due again (OBS-1)."""
    registry, observed, began = HandlerRegistry(), Observed(), asyncio.Event()

    @registry.handler("order.placed", name="shop.note")
    async def note(event: EventEnvelope) -> Snooze | None:
        if not observed.of(Snoozed):
            return Snooze(0.05)
        began.set()
        await asyncio.sleep(60)
        return None

    await publish(conn, "order.placed")
    async with running(dsn, registry, observed, grace=0.05, poll_interval=0.1):
        await asyncio.wait_for(began.wait(), 20)
    (snoozed,), (released,) = observed.of(Snoozed), observed.of(Released)
    assert snoozed.due_in == 0.05 and snoozed.result == "snoozed" and snoozed.took is not None
    assert released.result == "released" and released.took is not None and released.took > 0.04
    assert not observed.of(Handled) and not observed.of(LostLease)


async def test_a_lease_that_is_lost(dsn: str, conn: asyncpg.Connection) -> None:
    """What this worker did counts for nothing, and it says so (OBS-1)."""
    registry, observed, taken = HandlerRegistry(), Observed(), asyncio.Event()
    other = await asyncpg.connect(dsn)
    take = "UPDATE core.outbox SET lease_token = gen_random_uuid(), lease_expires_at = now()"

    @registry.handler("order.placed", name="shop.note")
    async def note(event: EventEnvelope) -> None:
        if not taken.is_set():
            await asyncio.wait_for(other.execute(take), 20)
            taken.set()

    await publish(conn, "order.placed")
    async with running(dsn, registry, observed, poll_interval=0.1):
        await drained(conn)
        await until(lambda: len(observed.of(Handled)) == 1, what="the second run is told")
    await other.close()
    (lost,) = observed.of(LostLease)
    assert (lost.result, lost.attempts, lost.handler_name) == ("lost_lease", 1, "shop.note")


async def test_a_drainer_that_ends_tells_what_the_log_has_counted(dsn: str, conn: asyncpg.Connection) -> None:
    """A storm that has ended within a second is in the log to the last failure (OBS-1)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.note")
    async def note(event: EventEnvelope) -> Reject:
        return Reject("no")

    await publish_many(conn, "order.placed", ALONE + 7)
    with structlog.testing.capture_logs() as entries:
        async with Drainer(dsn, registry, WorkerSettings(), observers=(LogObserver(),)) as drainer:
            await drainer.deliver()
    failures = [entry.get("repeated", 1) for entry in entries if entry["event"] == "delivery_failed"]
    assert sum(failures) == ALONE + 7


async def test_slots_of_a_schedule(dsn: str) -> None:
    """OBS-1."""
    registry, observed = HandlerRegistry(), Observed((Fired, Handled))

    @registry.handler("shop.tick", name="shop.note")
    async def note(event: EventEnvelope) -> None: ...

    registry.schedule("shop.tick", name="shop.clock", every=timedelta(seconds=1))
    async with running(dsn, registry, observed):
        await until(lambda: observed.of(Fired), what="a slot is told")
    (fired, *_) = observed.of(Fired)
    assert fired.schedule == "shop.clock" and len(fired.slots) >= 1


def test_an_outage_begins_and_is_over() -> None:
    """Once for all loops, without what the address hides (OBS-1, LSN-2)."""
    observed = Observed()
    outages = Outages(DirectObservers((observed,)))
    claim, settle = outages.of("claim"), outages.of("settle")
    for loop in (claim, settle, claim):
        loop.begin(OSError("cannot reach postgresql://x:canary@db/x"))
    claim.over()
    settle.over()
    first, last = observed.of(Outage)
    assert (first.loop, first.over, first.lasted) == ("claim", False, None) and "canary" not in str(first.error)
    assert (last.loop, last.over) == ("settle", True) and last.lasted is not None and last.lasted >= 0


async def test_an_observer_of_successes_that_blocks(dsn: str, conn: asyncpg.Connection) -> None:
    """More events than its queue has places are delivered meanwhile, and what it misses is counted (OBS-1, T16)."""
    registry, release = HandlerRegistry(), threading.Event()

    @registry.handler("order.placed", name="shop.note")
    async def note(event: EventEnvelope) -> None: ...

    class Blocks:
        facts = frozenset((Handled,))

        def __call__(self, fact: Fact) -> None:
            release.wait()

    await publish_many(conn, "order.placed", MOST + 1_000)
    try:
        async with Worker(dsn, registry, WorkerSettings(), observers=(Blocks(),)) as worker:
            await drained(conn)
            assert worker.counters.delivered == MOST + 1_000
            await until(lambda: worker.facts_dropped >= 1_000, what="what it did not take is counted")
    finally:
        release.set()


# --- requests ---


async def endpoint(scope: Any, receive: Any, send: Any) -> None:
    order = json.loads((await receive())["body"])
    tx = await exchange_of(scope).begin("tenant-1", required=False)
    await Publisher("shop").publish(tx, "order.placed", order)
    if order["n"] == 3:
        raise ZeroDivisionError
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
async def requests(dsn: str) -> AsyncIterator[tuple[Observed, Any]]:
    observed = Observed((Requested,))
    async with asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool:
        app = IdempotencyMiddleware(endpoint, pool.acquire, {1: "x" * 32}, observe=observed)

        async def post(number: int, *keys: str) -> None:
            body = json.dumps({"n": number}).encode()
            scope = {"type": "http", "method": "POST", "path": "/orders", "query_string": b""}
            scope["headers"] = [(b"idempotency-key", key.encode()) for key in keys]  # type: ignore[assignment]

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(_message: Any) -> None: ...

            await app(scope, receive, send)

        yield observed, post


async def test_each_idempotent_request_is_a_fact(requests: tuple[Observed, Any]) -> None:
    """What became of it, once, and nothing of the key (OBS-1)."""
    observed, post = requests
    await post(1, "k-1")
    await post(1, "k-1")
    await post(2, "k-1")
    await post(2, "k-2", "k-3")
    await post(2)
    with pytest.raises(ZeroDivisionError):
        await post(3, "k-4")
    facts = observed.of(Requested)
    assert [(fact.result, fact.status, fact.keyed) for fact in facts] == [
        ("completed", 201, True),
        ("replayed", 201, True),
        ("refused", 409, True),
        ("refused", 400, False),
        ("completed", 201, False),
        ("failed", None, True),
    ]
    assert all(fact.operation == "POST /orders" and fact.attempts == 1 and 0 < fact.took < 60 for fact in facts)


async def test_a_request_that_cannot_be_carried_out(requests: tuple[Observed, Any], conn: asyncpg.Connection) -> None:
    """The database refuses the record, and the request is answered with 503 (OBS-1)."""
    observed, post = requests
    await conn.execute("ALTER TABLE core.idempotency_records RENAME TO gone")
    try:
        await post(1, "k-1")
    finally:
        await conn.execute("ALTER TABLE core.gone RENAME TO idempotency_records")
    assert [(fact.result, fact.status) for fact in observed.of(Requested)] == [("unavailable", 503)]


async def test_an_endpoint_that_takes_no_part_is_no_fact(dsn: str) -> None:
    """OBS-1."""
    facts = Facts()

    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def nothing(*_: Any) -> Any: ...

    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        app = IdempotencyMiddleware(other, pool.acquire, {1: "x" * 32}, observe=facts.append)
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
        await app(scope, nothing, nothing)
    assert facts == []
