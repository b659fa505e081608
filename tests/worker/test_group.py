"""One process serves several databases, and none of them stands in the way of another (SCL-4)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, Publisher, Worker, WorkerSettings
from holdfast.errors import ConfigurationError, SchemaMismatch
from holdfast.observability.health import Health
from holdfast.observability.prometheus import Collector
from holdfast.postgres import migrate
from holdfast.telemetry import Notice
from holdfast.worker.group import WorkerGroup
from tests.observability.scraping import scrape
from tests.observability.spans import Spans
from tests.worker.proxies import proxied
from tests.worker.support import Facts, drained, effects, make_tables, publish_many, settled, until

SETTINGS = WorkerSettings(lease=3.0, poll_interval=0.5, grace=5.0)


def copying(seen: Counter[str | None]) -> HandlerRegistry:
    """Handlers that write with `tx`, publish with `tx`, and know the name of the database."""
    registry, publisher = HandlerRegistry(), Publisher("shop")

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection, context: HandlerContext) -> None:
        seen[context.database] += 1
        await tx.execute("INSERT INTO ledger (n) VALUES ($1)", event.payload["n"])
        await publisher.publish(tx, "order.charged", {"n": event.payload["n"]})

    @registry.handler("order.charged", name="mail.send")
    def send(event: EventEnvelope, context: HandlerContext) -> None:
        seen[f"{context.database} mail"] += 1

    return registry


def of(group: WorkerGroup, database: str) -> Health:
    return next(each for each in group.health().databases if each.database == database)


@pytest.mark.slow
async def test_each_database_is_on_its_own(
    dsn: str, conn: asyncpg.Connection, other_dsn: str, other: asyncpg.Connection, empty_dsn: str
) -> None:
    """One is away at the start, one has an old schema, one goes away meanwhile: the others deliver (SCL-4)."""
    seen: Counter[str | None] = Counter()
    registry, facts, said = copying(seen), Facts(), Facts()
    await make_tables(conn)
    await make_tables(other)
    async with proxied(other_dsn) as (proxy, through_proxy):
        proxy.refusing = True
        addresses = {"orders": dsn, "billing": through_proxy, "archive": empty_dsn}
        group = WorkerGroup(
            addresses,
            lambda name: Worker(addresses[name], registry, SETTINGS, observers=(facts.append,)),
            observe=said.append,
        )
        assert group.health().state == "new"
        await publish_many(other, "order.placed", 3)
        async with group:
            # At the start one is away and one refuses.
            await publish_many(conn, "order.placed", 200)
            await drained(conn)
            assert await effects(conn) == list(range(200))
            assert seen == {"orders": 200, "orders mail": 200}, "what a handler publishes is in its own database"
            health = group.health()
            assert health.live and health.ready and health.state == "running"
            assert of(group, "orders").ready and not of(group, "billing").ready and not of(group, "archive").ready
            assert "the database has been away" in str(of(group, "billing"))
            assert "it refuses the worker" in str(of(group, "archive"))
            assert "1 of 3 databases ready" in str(health) and "billing: the database has been" in str(health)
            refusal = said.notices("database_refused")[0]
            assert refusal.details["database"] == "archive"

            # Both come: the one that is reached, and the one that is migrated.
            proxy.refusing = False
            await drained(other)
            assert await effects(other) == [0, 1, 2] and seen["billing mail"] == 3
            await migrate.apply(empty_dsn)
            await until(lambda: of(group, "archive").ready, what="the migrated database is served")

            # One goes away meanwhile. The other is as quick as before.
            before = await throughput(conn)
            proxy.refusing = True
            proxy.freeze()
            await until(lambda: not of(group, "billing").ready, what="it is noticed that the database is away")
            await publish_many(other, "order.placed", 3)
            assert await throughput(conn) > before / 4, "a busy machine is not a database that waits for another"
            proxy.refusing = False
            await drained(other)
            assert seen["billing"] >= 6 and len(await effects(other)) == 6

            measured = scrape(Collector(group))
            assert measured.of("holdfast_worker_processes") == 3
            handled = measured.by("database", "holdfast_deliveries_total", handler="mail.send", outcome="delivered")
            assert handled["billing"] == 6 and handled["orders"] == seen["orders mail"] and "archive" not in handled

            # It stops within the grace although one does not answer.
            proxy.refusing = True
            proxy.freeze()
            began = time.monotonic()
        assert time.monotonic() - began < SETTINGS.grace + 5
    assert group.health().state == "stopped" and not group.health().live
    assert not facts.notices("loop_failed")


async def test_spans_say_which_database(dsn: str, conn: asyncpg.Connection) -> None:
    """Those of handlers have its name (SCL-4, OBS-2)."""
    spans = Spans()
    group = WorkerGroup(
        ["orders"], lambda _: Worker(dsn, copying(Counter()), SETTINGS, observers=(), tracing=spans.tracing)
    )
    await make_tables(conn)
    async with group:
        await publish_many(conn, "order.placed", 1)
        await drained(conn)
    (span,) = spans.named("process billing.charge")
    assert span.attributes is not None and span.attributes["messaging.outbox.database"] == "orders"


async def throughput(conn: asyncpg.Connection) -> float:
    """Events per second, of 300 that are published at once."""
    began = time.monotonic()
    await publish_many(conn, "order.placed", 300)
    await drained(conn)
    return 300 / (time.monotonic() - began)


async def test_a_group_that_every_database_refuses_ends(empty_dsn: str) -> None:
    """Where none can be served, the error is that of one worker: nobody waits for a configuration to change (SCL-4)."""
    registry, said = copying(Counter()), Facts()
    group = WorkerGroup(("a", "b"), lambda _: Worker(empty_dsn, registry, SETTINGS), observe=said.append)
    with pytest.raises(SchemaMismatch):
        async with group:
            pytest.fail("it started")
    assert [notice.details["database"] for notice in said.of(Notice)] in (["a", "b"], ["b", "a"])


async def test_a_group_that_is_cancelled_stops_its_workers(dsn: str, conn: asyncpg.Connection) -> None:
    """Nothing is left behind, and leases are released (SCL-4)."""
    group = WorkerGroup(["a"], lambda _: Worker(dsn, copying(Counter()), SETTINGS))
    running = asyncio.create_task(group.run())
    await make_tables(conn)
    await settled(conn, (await publish_many(conn, "order.placed", 1))[0])
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert group.health().state == "stopped"


@pytest.mark.parametrize("names", [[], ["a", "a"], ["A b"], [""]])
def test_names_are_checked(names: list[str]) -> None:
    """A group has a name for each database (SCL-4)."""
    with pytest.raises(ConfigurationError, match="databases"):
        WorkerGroup(names, lambda _: pytest.fail("not reached"))
