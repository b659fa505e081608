"""Reactions in the producer's process with each kind of transaction: what they write, and the inbox, is one commit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Publisher, Reactions, Reject
from holdfast.telemetry import Failed
from tests.handling.kinds import ASYNCPG, KINDS, TABLE, Body, Kind, Work
from tests.worker.support import Facts

PUBLISHER = Publisher("ledger")
BACKENDS = """SELECT pid FROM pg_stat_activity WHERE datname = current_database()
    AND (application_name = 'application' OR application_name LIKE 'holdfast%handle%')"""
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture(autouse=True)
async def entries(conn: asyncpg.Connection) -> None:
    await conn.execute(TABLE)


@contextlib.asynccontextmanager
async def reacting(
    dsn: str, kind: Kind, body: Body, facts: Facts | None = None, *, timeout: float = 20.0
) -> AsyncIterator[Reactions]:
    """Reactions whose only handler does what the body does, for `order.booked`."""
    registry = HandlerRegistry()
    registry.add("ledger.book", ("order.booked",), kind.handler(body), timeout=timeout, via="in_process")
    facts = Facts() if facts is None else facts
    async with (
        kind.source(dsn) as transactions,
        Reactions(dsn, registry, observers=(facts.append,), transactions=transactions) as reactions,
    ):
        yield reactions


async def booked(conn: asyncpg.Connection, **options: Any) -> EventEnvelope:
    async with conn.transaction():
        return await PUBLISHER.publish(conn, "order.booked", {"n": 7}, **options)


async def found(conn: asyncpg.Connection) -> tuple[int, int, int]:
    """How many rows the handler has written, how many events it has published, and how many it has handled."""
    statement = """SELECT (SELECT count(*) FROM entries),
        (SELECT count(*) FROM core.outbox WHERE event_type = 'entry.booked'),
        (SELECT count(*) FROM core.event_handled)"""
    entries, published, handled = await conn.fetchrow(statement)
    return entries, published, handled


async def book(event: EventEnvelope, work: Work) -> None:
    await work.book(event)
    await work.flush()
    await work.publish(PUBLISHER, "entry.booked", {})


@every_kind
async def test_a_reaction_commits_once(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Its row, the event that it publishes and the inbox row; another copy of the key is a duplicate (LSN-13,
    IDM-3).
    """
    async with reacting(dsn, kind, book) as reactions:
        event = await booked(conn, idempotency_key="k-1")
        for _ in range(2):
            reactions.react(event)
            await reactions.drain()
        await asyncio.gather(*(_react(reactions, event) for _ in range(5)))
        assert (reactions.counters.delivered, reactions.counters.duplicates, reactions.counters.failed) == (1, 6, 0)
    assert await found(conn) == (1, 1, 1)


async def _react(reactions: Reactions, event: EventEnvelope) -> None:
    reactions.react(event)
    await reactions.drain()


@every_kind
async def test_copies_that_react_at_once_commit_once(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """The inbox row keeps the second one waiting until the first has committed (LSN-13, IDM-3)."""
    async with reacting(dsn, kind, book) as reactions:
        event = await booked(conn)
        for _ in range(5):
            reactions.react(event)
        await reactions.drain()
        assert (reactions.counters.delivered, reactions.counters.duplicates, reactions.counters.failed) == (1, 4, 0)
    assert await found(conn) == (1, 1, 1)


async def _raise() -> None:
    raise ConnectionError("the other side is not there")


async def _reject() -> Reject:
    return Reject("never")


@pytest.mark.matrix("kind", "end")
@every_kind
@pytest.mark.parametrize("end", [_raise, _reject], ids=["error", "outcome"])
async def test_a_reaction_that_fails_leaves_nothing(dsn: str, conn: asyncpg.Connection, kind: Kind, end: Any) -> None:
    """What it wrote and published is taken back, and the event is a dead letter of the handler (LSN-13, IDM-3)."""
    facts = Facts()

    async def body(event: EventEnvelope, work: Work) -> Any:
        await book(event, work)
        return await end()

    async with reacting(dsn, kind, body, facts) as reactions:
        await _react(reactions, await booked(conn))
        before = set(await conn.fetch(BACKENDS))
        for _ in range(6):
            reactions.react(await booked(conn))
        await reactions.drain()
        assert reactions.counters.failed == 7
        assert before and before <= set(await conn.fetch(BACKENDS))  # no connection is lost with a reaction
    assert await found(conn) == (0, 0, 0)
    assert {each.handler_name for each in facts.of(Failed)} == {"ledger.book"}
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'failed'") == 7


@every_kind
async def test_a_reaction_that_fails_at_the_commit(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """A constraint that is checked then; nothing is half done (LSN-13)."""
    await conn.execute("INSERT INTO entries (n) VALUES (3)")

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event, 3)

    async with reacting(dsn, kind, body) as reactions:
        reactions.react(await booked(conn))
        await reactions.drain()
        assert reactions.counters.failed == 1
    assert await found(conn) == (1, 0, 0)
    assert "at_commit" in await conn.fetchval("SELECT last_error FROM core.outbox WHERE status = 'failed'")


@pytest.mark.parametrize("kind", [each for each in KINDS if each is not ASYNCPG], ids=str)
async def test_a_reaction_may_not_commit(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Refused, and nothing of it is there (LSN-13)."""

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event)
        await work.commit()

    async with reacting(dsn, kind, body) as reactions:
        reactions.react(await booked(conn))
        await reactions.drain()
        assert reactions.counters.failed == 1
    assert await found(conn) == (0, 0, 0)


@every_kind
async def test_a_reaction_past_its_time_limit(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Cancelled, or cut off in its thread: nothing of it commits (LSN-13)."""

    async def body(event: EventEnvelope, work: Work) -> None:
        await work.book(event)
        await work.flush()
        if kind.asynchronous:
            await asyncio.sleep(60)
        else:
            time.sleep(1.0)

    async with reacting(dsn, kind, body, timeout=0.3) as reactions:
        reactions.react(await booked(conn))
        await reactions.drain()
        assert reactions.counters.failed == 1
    assert await found(conn) == (0, 0, 0)
    assert "longer than its limit" in await conn.fetchval("SELECT last_error FROM core.outbox WHERE status = 'failed'")
