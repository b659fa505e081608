"""Limits, pauses and breakers with whole workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy
from holdfast.errors import ConfigurationError, TerminalHandlerError
from holdfast.flow import Pause
from holdfast.operator import Operator
from holdfast.telemetry import Retried
from tests.worker.support import Facts, drained, publish_many, running, until

EVENT, HANDLER = "order.placed", "billing.charge_card"
QUICK = Pause(after=3, first_probe=0.1, longest_wait=0.4)


class Meter:
    """A handler that counts how many of it run at the same time."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds = seconds
        self.now = self.most = self.ended = 0

    async def __call__(self, event: EventEnvelope) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.now -= 1
            self.ended += 1


class Partner:
    """Somebody whom a handler calls, and who is down now and then."""

    def __init__(self) -> None:
        self.down = True
        self.calls: list[int] = []
        self.poison: set[int] = set()

    async def __call__(self, event: EventEnvelope) -> None:
        number = event.payload["n"]
        self.calls.append(number)
        await asyncio.sleep(0)
        if self.down or number in self.poison:
            raise ConnectionError("no answer")


def registry_of(handler: Any, **options: Any) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER, **options)
    async def handle(event: EventEnvelope) -> None:
        await handler(event)

    return registry


@contextlib.asynccontextmanager
async def fleet(dsn: str, registry: HandlerRegistry, count: int, facts: Facts | None = None, **settings: Any) -> Any:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running(dsn, registry, facts, **settings)) for _ in range(count)]


async def test_a_fleet_shares_one_concurrency(dsn: str, conn: asyncpg.Connection) -> None:
    """Three workers with ten places each run five at a time together, and all five places are used (LSN-10)."""
    meter = Meter()
    await publish_many(conn, EVENT, 120)
    async with fleet(dsn, registry_of(meter, fleet_concurrency=5), 3, concurrency=10) as workers:
        await drained(conn, within=40)
        claims = sum(worker.counters.claims for worker in workers)
    assert meter.ended == 120
    assert meter.most == 5
    # A claim for each place that becomes free, and few in vain.
    assert claims <= 120 * 3


async def test_concurrency_in_one_worker(dsn: str, conn: asyncpg.Connection) -> None:
    """`concurrency` bounds one worker, and writes nothing to the database (LSN-10)."""
    meter = Meter()
    await publish_many(conn, EVENT, 30)
    async with running(dsn, registry_of(meter, concurrency=2)):
        await drained(conn)
    assert meter.most == 2
    assert await conn.fetchval("SELECT count(*) FROM core.handler_flow") == 0


async def test_a_rate_holds_across_the_fleet(dsn: str, conn: asyncpg.Connection) -> None:
    """What two workers have claimed, by the database's clock, is at most the rate and one bucket (LSN-10)."""
    await publish_many(conn, EVENT, 150)
    async with fleet(dsn, registry_of(Meter(0), rate="100/s"), 2):
        await until(lambda: conn.fetchval("SELECT count(*) > 0 FROM core.outbox WHERE settled_at IS NOT NULL"))
        began = await conn.fetchval("SELECT clock_timestamp()")
        before = await conn.fetchval("SELECT count(*) FROM core.outbox WHERE attempts > 0")
        await drained(conn, within=40)
        took = await conn.fetchval("SELECT extract(epoch FROM max(settled_at) - $1)::float8 FROM core.outbox", began)
    # The bucket may have been full when the clock was read.
    assert 150 - before <= 25 + 100 * (took + 0.05)


async def test_a_limit_is_changed_while_workers_run(dsn: str, conn: asyncpg.Connection) -> None:
    """The operator's limit counts from the next claim on; cleared, the handler is free again (LSN-10)."""
    meter = Meter()
    async with fleet(dsn, registry_of(meter), 2, concurrency=20), Operator(dsn, actor="ann") as operator:
        await operator.handlers.limit(HANDLER, fleet_concurrency=2, reason="partner is slow")
        await publish_many(conn, EVENT, 40)
        await drained(conn, within=40)
        assert meter.most == 2
        await operator.handlers.limit(HANDLER, clear=["fleet_concurrency"])
        await publish_many(conn, EVENT, 40)
        await drained(conn)
    assert meter.most > 2


async def test_a_pause_lets_running_events_finish(dsn: str, conn: asyncpg.Connection) -> None:
    """None is claimed after it is committed; a resume wakes workers that would sleep for a minute (LSN-10)."""
    gate = asyncio.Event()
    started: list[int] = []

    async def handle(event: EventEnvelope) -> None:
        started.append(event.payload["n"])
        await gate.wait()

    registry = registry_of(handle)
    async with running(dsn, registry, poll_interval=60, concurrency=5), Operator(dsn, actor="ann") as operator:
        await publish_many(conn, EVENT, 5)
        await until(lambda: len(started) == 5)
        await operator.handlers.pause(HANDLER, reason="deploying the partner")
        await publish_many(conn, EVENT, 10)
        gate.set()
        await until(lambda: conn.fetchval("SELECT count(*) = 5 FROM core.outbox WHERE status = 'delivered'"))
        assert await conn.fetchval("SELECT sum(attempts) FROM core.outbox WHERE status = 'pending'") == 0
        assert len(started) == 5
        await operator.handlers.resume(HANDLER)
        await drained(conn)
    assert len(started) == 15


async def test_a_neighbour_does_not_wait_for_a_limited_handler(dsn: str, conn: asyncpg.Connection) -> None:
    """While one handler is paused, events of another in the same worker are handled at once (LSN-10, LSN-17)."""
    registry = registry_of(Meter())
    heard = asyncio.Event()

    @registry.handler("mail.wanted", name="mail.send")
    async def send(event: EventEnvelope) -> None:
        heard.set()

    async with running(dsn, registry, poll_interval=60), Operator(dsn, actor="ann") as operator:
        await operator.handlers.pause(HANDLER)
        await publish_many(conn, EVENT, 20)
        await publish_many(conn, "mail.wanted", 1)
        async with asyncio.timeout(10):
            await heard.wait()
        assert (
            await conn.fetchval("SELECT count(*) FROM core.outbox WHERE event_type = $1 AND attempts > 0", EVENT) == 0
        )


@pytest.mark.slow
async def test_an_outage_becomes_a_pause(dsn: str, conn: asyncpg.Connection) -> None:
    """No dead letter, no attempt lost, few calls; everything is handled after the partner's return (LSN-17)."""
    partner, facts = Partner(), Facts()
    registry = registry_of(partner, on_outage=QUICK, retry=RetryPolicy(max_attempts=2, base_delay=0.01))
    await publish_many(conn, EVENT, 200)
    async with fleet(dsn, registry, 3, facts):
        opened = "SELECT count(*) FROM core.audit WHERE action = 'breaker.open' AND actor = 'system'"
        await until(lambda: conn.fetchval(opened))
        await until(lambda: conn.fetchval("SELECT failed_probes >= 3 FROM core.handler_flow"))
        assert await conn.fetchval("SELECT max(attempts) FROM core.outbox WHERE status = 'pending'") <= 1
        # However many places they have, three workers begin with three each; and the probes.
        assert len(partner.calls) <= 3 * 3 + 10
        partner.down = False
        await drained(conn, within=40)
    assert Counter(row[0] for row in await conn.fetch("SELECT status FROM core.outbox")) == {"delivered": 200}
    assert len(facts.notices("breaker_opened")) == len(facts.notices("breaker_closed")) == await conn.fetchval(opened)
    assert await conn.fetchval("SELECT count(*) FROM core.audit WHERE action = 'breaker.close'") >= 1


@pytest.mark.slow
async def test_every_failure_behind_a_breaker_is_told(dsn: str, conn: asyncpg.Connection) -> None:
    """Whether the breaker is open or not, a failed call is reported and counted as one, with its error (OBS-1)."""
    partner, facts = Partner(), Facts()
    registry = registry_of(partner, on_outage=QUICK, retry=RetryPolicy(max_attempts=2, base_delay=0.01))
    await publish_many(conn, EVENT, 10)
    async with running(dsn, registry, facts) as worker:
        await until(lambda: conn.fetchval("SELECT failed_probes >= 3 FROM core.handler_flow"))
        partner.down = False
        await drained(conn, within=40)
    failures = len(partner.calls) - 10
    retried = facts.of(Retried)
    assert (len(retried), worker.counters.retried, worker.counters.snoozed) == (failures, failures, 0)
    assert {fact.last_error.partition(" at ")[0] for fact in retried} == {"ConnectionError: no answer"}
    assert sum(fact.held for fact in retried) >= 3
    opened = facts.notices("breaker_opened")
    assert opened and all("no answer" in str(notice.details["last_error"]) for notice in opened)
    counted = await conn.fetchrow("SELECT sum(retried), sum(snoozed) FROM core.rollup_counts")
    assert tuple(counted) == (failures, 0)


async def test_an_event_that_fails_alone_opens_nothing(dsn: str, conn: asyncpg.Connection) -> None:
    """Poisoned events among good ones become dead letters, and the breaker stays closed (LSN-17)."""
    partner = Partner()
    partner.down = False
    partner.poison = {3, 50}
    registry = registry_of(partner, on_outage=QUICK, retry=RetryPolicy(max_attempts=3, base_delay=0.01))
    await publish_many(conn, EVENT, 60)

    async def more() -> bool:
        await publish_many(conn, EVENT, 1)
        return bool(await conn.fetchval("SELECT count(*) = 2 FROM core.outbox WHERE status = 'failed'"))

    async with running(dsn, registry, concurrency=2):
        await until(more)
        await drained(conn)
    assert await conn.fetchval("SELECT count(*) FROM core.audit WHERE action LIKE 'breaker%'") == 0


async def test_terminal_errors_open_nothing(dsn: str, conn: asyncpg.Connection) -> None:
    """What no retry would heal says nothing about the partner (LSN-17)."""

    async def handle(event: EventEnvelope) -> None:
        raise TerminalHandlerError("no such card")

    await publish_many(conn, EVENT, 20)
    async with running(dsn, registry_of(handle, on_outage="pause"), dead_letters="in_place"):
        await drained(conn)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'failed'") == 20
    assert await conn.fetchval("SELECT count(*) FROM core.audit") == 0


@pytest.mark.slow
async def test_a_breaker_works_for_handlers_in_transactions(dsn: str, conn: asyncpg.Connection) -> None:
    """A handler that takes tx, whose failures are settled where it ran (LSN-17, LSN-5)."""
    down, calls, registry = True, 0, HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER, on_outage=QUICK, retry=RetryPolicy(max_attempts=2, base_delay=0.01))
    async def handle(event: EventEnvelope, tx: Any) -> None:
        nonlocal calls
        calls += 1
        if down:
            raise ConnectionError("no answer")

    await publish_many(conn, EVENT, 30)
    async with running(dsn, registry, connections=3):
        await until(lambda: conn.fetchval("SELECT failed_probes >= 2 FROM core.handler_flow"))
        assert calls <= 20
        down = False
        await drained(conn, within=40)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 30


@pytest.mark.slow
async def test_a_breaker_works_for_batches(dsn: str, conn: asyncpg.Connection) -> None:
    """The partner's outage is no fault of the events of a call; they are not taken apart for it (LSN-17, LSN-12)."""
    down, sizes, registry = True, list[int](), HandlerRegistry()

    @registry.handler(EVENT, name=HANDLER, batch=20, within="5ms", on_outage=QUICK, retry=RetryPolicy(max_attempts=2))
    async def handle(events: list[EventEnvelope]) -> None:
        sizes.append(len(events))
        if down:
            raise ConnectionError("no answer")

    await publish_many(conn, EVENT, 200)
    async with running(dsn, registry):
        await until(lambda: conn.fetchval("SELECT failed_probes >= 2 FROM core.handler_flow"))
        assert len(sizes) <= 60
        down = False
        await drained(conn, within=40)
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'delivered'") == 200


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"fleet_concurrency": 0}, "fleet_concurrency"),
        ({"fleet_concurrency": 1.5}, "fleet_concurrency"),
        ({"rate": "0/s"}, "rate"),
        ({"rate": "100 per second"}, "rate"),
        ({"rate": 0}, "rate"),
        ({"on_outage": "stop"}, "on_outage"),
        ({"on_outage": "pause", "on_error": "reject"}, "on_outage"),
        ({"rate": "1/s", "via": "in_process"}, "rate"),
        ({"on_outage": "pause", "via": "in_process"}, "on_outage"),
        ({"per_key_concurrency": 2, "via": "in_process"}, "per_key_concurrency"),
        ({"on_failed_head": "skip", "via": "in_process"}, "on_failed_head"),
    ],
)
def test_bad_options_name_field_and_remedy(options: dict[str, Any], field: str) -> None:
    """When the handler is registered, not when the worker runs (LSN-10, R5)."""
    with pytest.raises(ConfigurationError) as refused:
        registry_of(Meter(), **options)
    assert refused.value.field == f"{HANDLER}.{field}"
    assert refused.value.remedy
