"""Many handlers, many patterns and many foreign event types delay no wanted event."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from tests.worker.support import publish, running, until

pytestmark = pytest.mark.trust


class Stalls:
    """How long the event loop was not free, at most."""

    longest = 0.0

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            before, used = time.monotonic(), time.process_time()
            await asyncio.sleep(0.002)
            # The processor's time: what other processes take of it is not our doing.
            self.longest = max(self.longest, min(time.monotonic() - before, time.process_time() - used))


async def waits(conn: asyncpg.Connection, handled: list[str], event_types: list[str]) -> list[float]:
    """Publish one event of each type, and return how long each took to be handled."""
    taken = []
    for event_type in event_types:
        count, started = len(handled), time.monotonic()
        await publish(conn, event_type)
        await until(lambda count=count: len(handled) > count, what=f"{event_type} handled")
        taken.append(time.monotonic() - started)
    return taken


@pytest.mark.parametrize(("count", "suffix"), [(300, ".*"), (3000, ".placed")])
async def test_wakeup_with_many_handlers(dsn: str, conn: asyncpg.Connection, count: int, suffix: str) -> None:
    """A wake-up does not wait for the poll, and planning lanes does not block the loop (LSN-1, T15)."""
    registry, handled, stalls = HandlerRegistry(), [], Stalls()

    async def note(event: EventEnvelope) -> None:
        handled.append(event.event_type)

    for n in range(count):
        registry.add(f"a.handler_{n}", (f"shop.type_{n:04}{suffix}",), note)
    async with running(dsn, registry, poll_interval=60) as worker:
        await waits(conn, handled, ["shop.type_0000.placed"])
        async with stalls.watched():
            taken = await waits(conn, handled, [f"shop.type_{n:04}.placed" for n in range(0, count, count // 20)])
        await until(lambda: worker.in_flight == 0, what="all is settled")
    # The promise is 50 ms each, on a machine that does nothing else.
    assert statistics.median(taken) < 0.25
    assert stalls.longest < 0.1


@pytest.mark.timeout(300)
async def test_start_with_many_handlers(dsn: str, conn: asyncpg.Connection) -> None:
    """Workers that start together record 3,000 handlers without outlasting each other's time limits (LSN-1, T15)."""
    registry = HandlerRegistry()

    async def note(event: EventEnvelope) -> None: ...

    for n in range(3000):
        registry.add(f"a.handler_{n}", (f"shop.type_{n:04}",), note)
    async with AsyncExitStack() as stack:
        start = (stack.enter_async_context(running(dsn, registry, lease=3.0)) for _ in range(3))
        await asyncio.gather(*start)
        await until(lambda: _started(conn, 3), what="three have started", within=200)
        assert await conn.fetchval("SELECT count(*) FROM core.subscriptions WHERE retired_at IS NULL") == 3000
        version = await conn.fetchval("SELECT version FROM core.subscriptions_version")
        async with running(dsn, registry, lease=3.0):
            await until(lambda: _started(conn, 4), what="the fourth has started", within=60)
            assert await conn.fetchval("SELECT version FROM core.subscriptions_version") == version


async def _started(conn: asyncpg.Connection, count: int) -> bool:
    """Workers that have subscribed; where that takes a while, `async with` does not wait for it."""
    return int(await conn.fetchval("SELECT count(*) FROM core.workers")) == count


async def test_foreign_event_types(dsn: str, conn: asyncpg.Connection) -> None:
    """50,000 event types that nobody wants, before and behind the wanted ones, are never listed (LSN-1, T5)."""
    registry, handled = HandlerRegistry(), []

    @registry.handler("order.*", name="billing.note")
    async def note(event: EventEnvelope) -> None:
        handled.append(event.event_type)

    await conn.execute(
        """
        INSERT INTO core.outbox (event_type, source, payload, idempotency_key)
        SELECT kind || n, 'flood', '{}', kind || n
        FROM generate_series(1, 25000) n CROSS JOIN (VALUES ('noise.'), ('zebra.')) AS t (kind)
        """
    )
    page = await conn.fetch(
        "SELECT * FROM core.outbox_routes_within('outbox_default', 0, '{*/order.}', '{*/order/}', '', 128, 1000)"
    )
    assert page == []
    async with running(dsn, registry, poll_interval=60):
        taken = await waits(conn, handled, [f"order.{name}" for name in ("placed", "paid", "sent", "placed", "back")])
    assert statistics.median(taken) < 0.25


async def test_event_types_that_are_not_due(dsn: str, conn: asyncpg.Connection) -> None:
    """Wanted types whose rows wait for ever are not listed, and those of another priority are (LSN-1, T5)."""
    registry, handled = HandlerRegistry(), []

    @registry.handler("order.*", name="billing.note")
    async def note(event: EventEnvelope) -> None:
        handled.append(event.event_type)

    await conn.execute(
        """
        INSERT INTO core.outbox (event_type, source, payload, idempotency_key, available_at, priority)
        SELECT 'order.a' || n, 'flood', '{}', n || '/' || t.priority, t.at, t.priority
        FROM generate_series(1, 15000) n
        CROSS JOIN (VALUES (0, 'infinity'::timestamptz), (2, now() + interval '1 day')) AS t (priority, at)
        """
    )
    listed, after, pages = [], "", 0
    query = "SELECT * FROM core.outbox_routes_within('outbox_default', 0, '{*/order.}', '{*/order/}', $1, 128, 1000)"
    while True:
        rows = await conn.fetch(query, after)
        listed += [row["route"] for row in rows if row["within"]]
        pages += 1
        if not rows or rows[-1]["within"]:
            break
        after = rows[-1]["route"]
    assert len(listed) <= pages <= 31, "one at the end of each page"
    async with running(dsn, registry, poll_interval=60):
        taken = await waits(conn, handled, [f"order.{name}" for name in ("placed", "paid", "sent", "back", "zero")])
        assert statistics.median(taken) < 1
        # Behind a lane that is not due, and soon due: found in time, and not with the next poll.
        columns = "event_type, source, payload, priority, available_at"
        soon = f"INSERT INTO core.outbox ({columns}) VALUES ($1, 's', '{{}}', $2, $3)"
        due = datetime.now(UTC) + timedelta(seconds=1)
        await conn.execute(soon, "order.a77", 1, due)
        await conn.execute(soon, "order.zz", 0, due)
        await until(lambda: {"order.a77", "order.zz"} <= set(handled), within=20, what="what became due was handled")


@pytest.mark.slow
@pytest.mark.parametrize("count", [40_000])
async def test_event_types_that_are_due_soon(dsn: str, conn: asyncpg.Connection, count: int) -> None:
    """Types in a pattern's range that are due later delay neither a new one nor one known by name (LSN-1, T5)."""
    registry, handled = HandlerRegistry(), list[str]()

    async def note(event: EventEnvelope) -> None:
        handled.append(event.event_type)

    registry.add("billing.note", ("order.*",), note)
    registry.add("billing.charge_card", ("sale.made",), note)
    registry.add("billing.part", ("part.*.sold",), note)
    async with running(dsn, registry, poll_interval=60):
        await waits(conn, handled, ["order.placed", "sale.made"])
        await conn.execute(
            """
            INSERT INTO core.outbox (event_type, source, payload, available_at)
            SELECT 'order.a' || n, 'flood', '{}', now() + interval '110 minutes' FROM generate_series(1, $1) n
            """,
            count,
        )
        assert statistics.median(await waits(conn, handled, [f"order.new{n}" for n in range(3)])) < 2
        assert statistics.median(await waits(conn, handled, ["sale.made"] * 3)) < 2
        # Each is found when it is due, also behind one that no handler wants.
        soon = "INSERT INTO core.outbox (event_type, source, payload, available_at) VALUES ($1, 's', '{}', $2)"
        due = datetime.now(UTC) + timedelta(seconds=2)
        await conn.execute(soon, "part.other", due)
        await conn.execute(soon, "part.one.sold", due + timedelta(seconds=1))
        await conn.execute(soon, "order.zz", due + timedelta(seconds=2))
        await until(
            lambda: {"part.one.sold", "order.zz"} <= set(handled), within=20, what="what became due was handled"
        )


async def test_pages_of_routes(dsn: str, conn: asyncpg.Connection) -> None:
    """Pages end where they say, continue there, and together have every route of the ranges once (LSN-1, T5)."""
    names = [
        f"{target}/{kind}.{n:03}" for target in ("*", "shop") for kind in ("Order", "noise", "order") for n in range(40)
    ]
    await conn.executemany(
        "INSERT INTO core.outbox (event_type, source, target, payload, idempotency_key) VALUES ($2, 's', $1, '{}', $3)",
        [(None if name[0] == "*" else "shop", name.partition("/")[2], name) for name in names],
    )
    query = "SELECT route, within FROM core.outbox_routes_within('outbox_default', 0, $1, $2, $3, $4, $5)"
    for most, steps in ((7, 1000), (1000, 9), (1000, 1000)):
        found, after, pages = [], "", 0
        while True:
            rows = await conn.fetch(query, ["*/order.", "shop/order."], ["*/order/", "shop/order/"], after, most, steps)
            found += [row["route"] for row in rows if row["within"]]
            pages += 1
            if not rows or rows[-1]["within"]:
                break
            after = rows[-1]["route"]
        assert found == [name for name in names if "/order." in name]
        assert pages < 20
    await conn.execute("DELETE FROM core.outbox")
