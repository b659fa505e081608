"""The retry schedule as the database records it, and what is logged on the way."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise

import asyncpg
import pytest
import structlog

from holdfast import (
    EventEnvelope,
    HandlerContext,
    HandlerRegistry,
    RetryPolicy,
    TerminalHandlerError,
    TransientHandlerError,
    Worker,
)
from holdfast.telemetry import Failed, Retried
from tests.worker.support import Facts, drained, publish, publish_many, row, running, settled, until

CANARY = "canary-3141592653"


async def test_schedule_is_recorded_on_the_databases_clock(dsn: str, conn: asyncpg.Connection) -> None:
    """Each wait is above zero and within its ceiling, counted from the database's clock; then the row fails (RTY-1)."""
    registry, runs = HandlerRegistry(), []
    policy = RetryPolicy(base_delay=0.1, multiplier=2, max_delay=0.4)

    @registry.handler("order.placed", name="billing.charge", retry=policy)
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        runs.append((await other.fetchval("SELECT clock_timestamp()"), await row(other, event.event_id)))
        raise ConnectionError("no line")

    other = await asyncpg.connect(dsn)
    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, poll_interval=3600):
        failed = await settled(conn, identity, "failed")
    await other.close()
    assert [found["attempts"] for _, found in runs] == [1, 2, 3, 4, 5]
    assert (failed["attempts"], failed["failure_reason"]) == (5, "retry_terminal")
    for attempt, (before, after) in enumerate(pairwise(runs), start=1):
        (started, _), (again, found) = before, after
        waited = found["available_at"] - started  # from the run to when it was made due again
        # A little more than the delay itself: the handler's end and the settle lie in between.
        assert timedelta(0) < waited < timedelta(seconds=policy.ceiling(attempt) + 1)
        assert again >= found["available_at"]
        assert found["first_failed_at"] == failed["first_failed_at"]
        assert found["last_error"] == "ConnectionError: no line"


async def test_delays_are_spread(dsn: str, conn: asyncpg.Connection) -> None:
    """Events that failed together come back apart, over at least half of the window (RTY-1, C4)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(base_delay=100, max_delay=100))
    async def charge(event: EventEnvelope) -> None:
        raise ConnectionError

    await publish_many(conn, "order.placed", 200)
    async with running(dsn, registry) as worker:
        await until(lambda: worker.counters.retried >= 200, what="all are postponed")
    delays = await conn.fetch(
        "SELECT extract(epoch FROM available_at - first_failed_at)::float8 AS delay FROM core.outbox ORDER BY 1"
    )
    waits = [each["delay"] for each in delays]
    assert 0 < waits[0] < 10
    assert 90 < waits[-1] <= 100
    assert 35 < waits[100] < 65


async def test_total_delay_is_bounded(dsn: str, conn: asyncpg.Connection) -> None:
    """max_total_delay ends the attempts early, however many are left (RTY-1)."""
    registry = HandlerRegistry()
    policy = RetryPolicy(max_attempts=10_000, strategy="constant", base_delay=0.05, max_total_delay=0.5)

    @registry.handler("order.placed", name="billing.charge", retry=policy)
    async def charge(event: EventEnvelope) -> None:
        raise ConnectionError

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry):
        failed = await settled(conn, identity, "failed")
    spent = failed["failed_at"] - failed["first_failed_at"]
    assert timedelta(seconds=0.5) <= spent < timedelta(seconds=5)
    assert 2 < failed["attempts"] < 1000
    assert failed["failure_reason"] == "retry_terminal"


async def test_terminal_errors_fail_at_once(dsn: str, conn: asyncpg.Connection) -> None:
    """The library's terminal errors and the policy's own; another error of the same handler is retried (RTY-2)."""
    registry = HandlerRegistry()
    policy = RetryPolicy(max_attempts=2, base_delay=0.001, max_delay=0.001, terminal_errors=(LookupError,))
    errors = {"library": TerminalHandlerError("no card"), "policy": KeyError("no order"), "other": ValueError("busy")}

    @registry.handler("order.placed", name="billing.charge", retry=policy)
    async def charge(event: EventEnvelope) -> None:
        raise errors[event.payload["error"]]

    identities = {name: await publish(conn, "order.placed", {"error": name}) for name in errors}
    async with running(dsn, registry):
        attempts = {name: (await settled(conn, each, "failed"))["attempts"] for name, each in identities.items()}
    assert attempts == {"library": 1, "policy": 1, "other": 2}


class Response:
    status_code = 429

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers


class TooManyRequests(Exception):
    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__("429")
        self.response = Response(headers)


@pytest.mark.parametrize("kind", ["header", "attribute"])
async def test_retry_after_is_honoured(dsn: str, conn: asyncpg.Connection, kind: str) -> None:
    """The other side's wish is the least wait, whatever the policy would have drawn (RTY-2)."""
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(base_delay=0.01))
    async def charge(event: EventEnvelope) -> None:
        if kind == "header":
            raise TooManyRequests({"Retry-After": "30"})
        raise TransientHandlerError("later", retry_after=30)

    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, facts):
        await until(lambda: facts.of(Retried), what="the retry")
    found = await row(conn, identity)
    waits = (found["available_at"] - found["first_failed_at"]).total_seconds()
    assert 30 <= waits <= 30.1
    assert 30 <= facts.of(Retried)[0].retry_in <= 30.1


async def test_log_entries(dsn: str, conn: asyncpg.Connection) -> None:
    """Retry and failure say what they must, and the payload is nowhere (RTY-3, DLQ-6, S7)."""
    registry = HandlerRegistry()
    policy = RetryPolicy(max_attempts=2, base_delay=0.01, max_delay=0.01)

    @registry.handler("order.placed", name="billing.charge", retry=policy)
    async def charge(event: EventEnvelope) -> None:
        raise ConnectionError("no line to the bank")

    identity = await publish(
        conn, "order.placed", {"secret": CANARY, CANARY: 1}, target="billing", correlation_id="c-42"
    )
    with structlog.testing.capture_logs() as logs:
        async with Worker(dsn, registry):
            await settled(conn, identity, "failed")
    entries = {entry["event"]: entry for entry in logs}
    retried, failed = entries["delivery_retried"], entries["delivery_failed"]
    assert (retried["log_level"], failed["log_level"]) == ("warning", "error")
    assert retried["operation"] == "billing.charge"
    assert retried["attempts"] == 1
    assert retried["correlation_id"] == "c-42"
    assert datetime.fromisoformat(retried["next_attempt_at"]).tzinfo is not None
    assert 0 < retried["retry_in_s"] <= 0.01
    wanted = {
        "event_id": str(identity),
        "event_type": "order.placed",
        "source": "shop",
        "target": "billing",
        "handler_name": "billing.charge",
        "last_error": "ConnectionError: no line to the bank",
        "attempts": 2,
    }
    assert {name: failed[name] for name in wanted} == wanted
    assert CANARY not in repr(logs)
    assert dsn.split(":")[2].split("@")[0] not in repr(logs)  # the password
    assert not set(logs[0]) & {"dsn", "payload"}


async def test_a_lost_lease_is_not_told_as_a_failure(dsn: str, conn: asyncpg.Connection) -> None:
    """When the row is no longer ours, nothing is settled and nobody is alarmed (DLQ-6, LSN-3)."""
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge", retry=RetryPolicy(strategy="none"))
    async def charge(event: EventEnvelope) -> None:
        await other.execute(
            "UPDATE core.outbox SET lease_token = gen_random_uuid(), lease_expires_at = now() + interval '1 hour'"
        )
        raise ValueError("too late")

    other = await asyncpg.connect(dsn)
    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, facts) as worker:
        await until(lambda: worker.counters.lost_leases, what="the lease is known to be lost")
        await until(lambda: worker.in_flight == 0, what="nothing is held")
    await other.close()
    assert facts.of(Failed) == []
    assert (await row(conn, identity))["status"] == "in_flight"
    await conn.execute("DELETE FROM core.outbox")


@pytest.mark.slow
async def test_retried_rows_do_not_wait_for_the_poll(dsn: str, conn: asyncpg.Connection) -> None:
    """A worker that sleeps knows when its own retries are due (RTY-1, P4)."""
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        if context.attempt == 1:
            raise TransientHandlerError("soon", retry_after=0.3)
        now = await other.fetchval("SELECT clock_timestamp()")
        seen.append((now - (await row(other, event.event_id))["available_at"]).total_seconds())

    other = await asyncpg.connect(dsn)
    async with running(dsn, registry, poll_interval=3600, lease=3600):
        for _ in range(3):
            await publish(conn, "order.placed")
            await drained(conn)
    await other.close()
    assert max(seen) < 0.5
    assert sorted(seen)[1] < 0.05
