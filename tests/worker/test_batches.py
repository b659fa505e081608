"""Batch handlers without a transaction: how events are gathered, called and settled."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from holdfast import (
    Done,
    EventEnvelope,
    HandlerRegistry,
    NewEvent,
    Publisher,
    Reject,
    Retry,
    Snooze,
)
from holdfast.telemetry import Failed, Handled, Released
from tests.worker.batches import ONCE, PATIENT, QUICK, SETTINGS, Calls, publish, statuses
from tests.worker.support import Observed, drained, running, until


async def test_events_are_gathered(dsn: str, conn: asyncpg.Connection) -> None:
    """A call has up to `batch` events, and those that are there when `within` has passed (LSN-12)."""
    calls, registry = Calls(), HandlerRegistry()

    @registry.handler("order.placed", name="ledger.book_many", batch=40, within="100ms")
    async def book_many(events: list[EventEnvelope]) -> None:
        calls.note(events)

    await publish(conn, 100)
    async with running(dsn, registry, **SETTINGS):
        await drained(conn)
    assert sorted(number for call in calls for number in call) == list(range(100))
    assert max(map(len, calls)) <= 40
    assert len(calls) <= 6  # the first claim is small, until the size of payloads is known


async def test_ten_poisoned_events_fail_alone(dsn: str, conn: asyncpg.Connection) -> None:
    """Ten of 400 events make a call fail: they are found by halving, and only they count an attempt (LSN-12)."""
    poison, calls, facts = set(range(7, 400, 40)), Calls(), Observed()
    registry, done = HandlerRegistry(), Counter[int]()

    @registry.handler("order.placed", name="ledger.book_many", batch=200, within=0.05, retry=ONCE)
    async def book_many(events: list[EventEnvelope]) -> None:
        numbers = calls.note(events)
        if poison.intersection(numbers):
            raise ValueError("one of them is poisoned")
        done.update(numbers)

    assert len(poison) == 10
    await publish(conn, 400)
    async with running(dsn, registry, facts, **SETTINGS):
        await drained(conn)
    assert await statuses(conn) == {"delivered": 390, "failed": 10}
    assert done == Counter(set(range(400)) - poison)
    failed = await conn.fetch(
        "SELECT (payload->>'n')::int AS n, attempts, traceback FROM core.outbox WHERE status = 'failed'"
    )
    assert {row["n"] for row in failed} == poison
    assert {row["attempts"] for row in failed} == {1}
    assert all("one of them is poisoned" in row["traceback"] or "book_many" in row["traceback"] for row in failed)
    assert await conn.fetchval("SELECT max(attempts) FROM core.outbox WHERE status = 'delivered'") == 1
    closed = Counter(fact.event_id for fact in facts if isinstance(fact, Handled | Failed))
    assert set(closed.values()) == {1}
    assert len(closed) == 400
    assert len(calls) <= 10 * 2 * 8
    assert [notice.details["handler_name"] for notice in facts.notices("batch_halved")] == ["ledger.book_many"]


async def test_an_outcome_for_each_event(dsn: str, conn: asyncpg.Connection) -> None:
    """A list or a mapping says what becomes of each; an exception is judged by the retry policy (LSN-12)."""
    registry, seen = HandlerRegistry(), Counter[int]()

    def result(event: EventEnvelope) -> Any:
        number = event.payload["n"]
        seen[number] += 1
        if seen[number] > 1:
            return Done()
        return [None, Done(), Retry(0.01), Snooze(0.01), Reject("no"), ConnectionError("away"), ValueError("bad")][
            number % 7
        ]

    @registry.handler("order.listed", name="ledger.list", batch=70, within="50ms", retry=QUICK)
    async def listed(events: list[EventEnvelope]) -> list[Any]:
        return [result(event) for event in events]

    @registry.handler("order.mapped", name="ledger.map", batch=70, within="50ms", retry=QUICK)
    def mapped(events: list[EventEnvelope]) -> dict[UUID, Any]:
        found = {event.event_id: result(event) for event in events}
        return {key: value for key, value in found.items() if value is not None}

    for event_type in ("order.listed", "order.mapped"):
        seen.clear()
        await conn.execute("DELETE FROM core.outbox")
        await publish(conn, 70, event_type)
        async with running(dsn, registry, **SETTINGS):
            await drained(conn)
        rows = await conn.fetch(
            "SELECT (payload->>'n')::int % 7 AS n, status, attempts, failure_reason FROM core.outbox"
        )
        found = {row["n"]: (row["status"], row["attempts"], row["failure_reason"]) for row in rows}
        assert found == {
            0: ("delivered", 1, None),
            1: ("delivered", 1, None),
            2: ("delivered", 2, None),
            3: ("delivered", 1, None),
            4: ("failed", 1, "rejected"),
            5: ("delivered", 2, None),
            6: ("delivered", 2, None),
        }


async def test_nothing_succeeds(dsn: str, conn: asyncpg.Connection) -> None:
    """When every call fails, only what was called alone counts an attempt, and calls are bounded (LSN-12)."""
    calls, registry = Calls(), HandlerRegistry()

    @registry.handler("order.placed", name="ledger.book_many", batch=64, within="300ms", retry=PATIENT)
    async def book_many(events: list[EventEnvelope]) -> None:
        calls.note(events)
        raise ConnectionError("the partner is away")

    await publish(conn, 64)
    async with running(dsn, registry, **SETTINGS):
        await until(lambda: any(len(call) == 1 for call in calls), what="an event is alone")
        await until(lambda: conn.fetchval("SELECT count(*) > 0 FROM core.outbox WHERE available_at > created_at"))
    alone = {call[0] for call in calls if len(call) == 1}
    rows = await conn.fetch("SELECT (payload->>'n')::int AS n FROM core.outbox WHERE attempts > 0")
    assert {row["n"] for row in rows} <= alone
    assert await statuses(conn) == {"pending": 64}


async def test_a_cancelled_event_ends_the_call(dsn: str, conn: asyncpg.Connection) -> None:
    """The call is made again without the event that was cancelled; the others count one attempt (LSN-11, LSN-12)."""
    calls, registry, hanging = Calls(), HandlerRegistry(), asyncio.Event()

    @registry.handler("order.placed", name="ledger.book_many", batch=10, within="100ms")
    async def book_many(events: list[EventEnvelope]) -> None:
        if 3 in calls.note(events):
            await hanging.wait()

    ids = await publish(conn, 10)
    async with running(dsn, registry, poll_interval=0.3, lease=1.0):
        await until(lambda: any(3 in call for call in calls), what="the call")
        await conn.fetchval("SELECT core.outbox_cancel_event($1, 'ann')", ids[3])
        await drained(conn)
    rows = await conn.fetch("SELECT id, status, attempts, failure_reason FROM core.outbox")
    assert {row["id"]: row["failure_reason"] for row in rows if row["status"] == "failed"} == {ids[3]: "cancelled"}
    assert {row["attempts"] for row in rows if row["id"] != ids[3]} == {1}


@pytest.mark.parametrize("asynchronous", (True, False), ids=("async", "thread"))
async def test_a_call_past_its_time_limit(dsn: str, conn: asyncpg.Connection, asynchronous: bool) -> None:
    """An event that hangs is found by halving, and fails alone (LSN-11, LSN-12)."""
    calls, registry, done = Calls(), HandlerRegistry(), Counter[int]()

    async def book_many(events: list[EventEnvelope]) -> None:
        numbers = calls.note(events)
        if 2 in numbers:
            await asyncio.sleep(10)
        done.update(numbers)

    def book_in_thread(events: list[EventEnvelope]) -> None:
        numbers = calls.note(events)
        if 2 in numbers:
            time.sleep(0.5)
        else:
            done.update(numbers)

    function = book_many if asynchronous else book_in_thread
    registry.add("ledger.book_many", ("order.placed",), function, batch=4, within=0.2, timeout=0.2, retry=ONCE)
    await publish(conn, 4)
    async with running(dsn, registry, **SETTINGS):
        await drained(conn)
    assert await statuses(conn) == {"delivered": 3, "failed": 1}
    assert done == Counter([0, 1, 3])
    assert "limit of 0.2 s" in await conn.fetchval("SELECT last_error FROM core.outbox WHERE status = 'failed'")


async def test_a_worker_that_stops_gives_batches_back(dsn: str, conn: asyncpg.Connection) -> None:
    """What runs has the grace, what gathers is given back, and nothing counts an attempt (LSN-6, LSN-12)."""
    calls, registry, facts = Calls(), HandlerRegistry(), Observed()

    @registry.handler("order.placed", name="ledger.book_many", batch=5, within="50ms")
    async def book_many(events: list[EventEnvelope]) -> None:
        calls.note(events)
        await asyncio.sleep(60)

    await publish(conn, 20)
    async with running(dsn, registry, facts, grace=0.2, concurrency=5, **SETTINGS):
        await until(lambda: calls, what="a call")
    assert await statuses(conn) == {"pending": 20}
    assert await conn.fetchval("SELECT max(attempts) FROM core.outbox") == 0
    assert len({fact.event_id for fact in facts.of(Released)}) >= 5


async def test_publishing_in_bulk_is_one_statement(dsn: str, conn: asyncpg.Connection) -> None:
    """What a handler publishes for many events is one statement in its transaction (PUB-4, LSN-12)."""
    registry, sent = HandlerRegistry(), Counter[str]()
    publisher = Publisher("ledger")

    @registry.handler("order.placed", name="ledger.book_many", batch=100, within="300ms")
    async def book_many(events: list[EventEnvelope], tx: asyncpg.Connection) -> None:
        def count(query: Any) -> None:
            sent[query.query.split()[0]] += 1

        with tx.query_logger(count):
            receipts = [NewEvent("receipt.due", event.payload) for event in events]
            await publisher.publish_many(tx, receipts)
        if len(events) < 2:
            raise ConnectionError("alone")

    await publish(conn, 100)
    async with running(dsn, registry, **SETTINGS):
        await until(lambda: conn.fetchval("SELECT count(*) = 100 FROM core.outbox WHERE status = 'delivered'"))
    query = "SELECT xmin::text AS x, count(*) AS n FROM core.outbox WHERE event_type = 'receipt.due' GROUP BY 1"
    receipts = await conn.fetch(query)
    assert sum(row["n"] for row in receipts) == 100
    assert sum(sent.values()) == len(receipts)


async def test_an_error_that_is_returned_was_raised_nowhere(dsn: str, conn: asyncpg.Connection) -> None:
    """A dead letter names a line of the user's code or none, and never one of ours (LSN-12)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="ledger.book_many", batch=10, within="10ms", retry=ONCE)
    async def book_many(events: list[EventEnvelope]) -> list[Any]:
        async def book(event: EventEnvelope) -> None:
            raise ValueError("no such account")

        if events[0].payload["n"] == 0:
            return [LookupError("no amount") for _ in events]
        return await asyncio.gather(*map(book, events), return_exceptions=True)

    for number in range(2):  # alone, as one that is retried is
        await conn.execute(
            "INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', $1::text::jsonb)",
            f'{{"n": {number}}}',
        )
        async with running(dsn, registry, **SETTINGS):
            await drained(conn)
    rows = await conn.fetch("SELECT last_error, raised_at FROM core.failed ORDER BY failed_at")
    assert rows[0]["last_error"] == "LookupError: no amount" and rows[0]["raised_at"] is None
    assert rows[1]["raised_at"].startswith("tests/worker/test_batches.py:")
