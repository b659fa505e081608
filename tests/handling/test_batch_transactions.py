"""Batch handlers in a transaction, in every library: one COMMIT, an outcome for each event, effects exactly once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Reject, Retry, Snooze
from holdfast.telemetry import Failed, Handled, Retried
from tests.handling.kinds import ASYNC_SESSION, ASYNCPG, DJANGO, KINDS, PSYCOPG, SESSION, TABLE, Kind, Work
from tests.worker.batches import ONCE, QUICK, SETTINGS, BatchBody, Calls, batch_handler, publish, statuses, written
from tests.worker.support import Observed, drained, running, until

every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
some_kinds = pytest.mark.parametrize("kind", (ASYNCPG, ASYNC_SESSION, SESSION, PSYCOPG, DJANGO), ids=str)


@pytest.fixture(autouse=True)
async def entries(conn: asyncpg.Connection) -> None:
    await conn.execute(TABLE)


@contextlib.asynccontextmanager
async def working(
    dsn: str, kind: Kind, body: BatchBody, facts: Observed | None = None, *, batch: int = 60, retry: Any = QUICK
) -> AsyncIterator[None]:
    registry = HandlerRegistry()
    registry.add("ledger.book_many", ("order.placed",), batch_handler(kind, body), batch=batch, within=0.1, retry=retry)
    async with kind.source(dsn) as transactions, running(dsn, registry, facts, transactions=transactions, **SETTINGS):
        yield


@every_kind
async def test_a_batch_commits_once(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """What a call writes, its inbox rows and its deliveries are one transaction (LSN-12, LSN-5)."""
    calls, facts = Calls(), Observed()

    async def body(events: list[EventEnvelope], work: Work) -> None:
        for number, event in zip(calls.note(events), events, strict=True):
            await work.book(event, number)

    ids = await publish(conn, 120)
    async with working(dsn, kind, body, facts):
        await drained(conn)
    assert await written(conn) == Counter(ids)
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 120
    same = """SELECT count(DISTINCT (o.xmin::text, h.xmin::text)) AS commits, count(DISTINCT o.delivered_at) AS times
              FROM core.outbox o JOIN core.event_handled h ON h.idempotency_key = o.idempotency_key"""
    row = await conn.fetchrow(same)
    assert row["commits"] == row["times"] == len(calls)
    assert len(calls) <= 5
    assert Counter(fact.event_id for fact in facts.of(Handled)) == Counter(ids)


@every_kind
async def test_poisoned_events_fail_alone(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Statements that fail, and the COMMIT: the events behind them fail, the others are booked once (LSN-12, LSN-5)."""
    await conn.execute("INSERT INTO entries (n) VALUES (1001)")
    facts = Observed()

    async def body(events: list[EventEnvelope], work: Work) -> None:
        for event in events:
            number = event.payload["n"]
            if number == 20:
                await work.execute("SELECT 1 / 0")
            await work.book(event, 1001 if number == 41 else number)  # which is refused at the COMMIT

    ids = await publish(conn, 60)
    async with working(dsn, kind, body, facts, retry=ONCE):
        await drained(conn)
    assert await statuses(conn) == {"delivered": 58, "failed": 2}
    failed = await conn.fetch("SELECT (payload->>'n')::int AS n, attempts FROM core.outbox WHERE status = 'failed'")
    assert {(row["n"], row["attempts"]) for row in failed} == {(20, 1), (41, 1)}
    poisoned = {ids[20], ids[41]}
    assert {key: n for key, n in (await written(conn)).items() if key} == {key: 1 for key in ids if key not in poisoned}
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 58
    assert {fact.event_id for fact in facts.of(Failed)} == poisoned


@every_kind
async def test_an_outcome_does_not_undo_the_others(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """Events that are not done are settled in the transaction of the others, with their own attempts (LSN-12)."""
    seen, facts = Counter[int](), Observed()

    async def body(events: list[EventEnvelope], work: Work) -> list[Any]:
        results: list[Any] = []
        for event in events:
            number = event.payload["n"]
            seen[number] += 1
            outcome = None
            if seen[number] == 1:
                outcome = {3: Retry(0.01), 4: Snooze(0.01), 5: Reject("no"), 6: ValueError("bad")}.get(number % 10)
            if outcome is None:
                await work.book(event, number)
            results.append(outcome)
        return results

    ids = await publish(conn, 60)
    async with working(dsn, kind, body, facts):
        await drained(conn)
    assert await statuses(conn) == {"delivered": 54, "failed": 6}
    assert await written(conn) == Counter(key for number, key in enumerate(ids) if number % 10 != 5)
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 54
    rows = await conn.fetch("SELECT (payload->>'n')::int % 10 AS n, attempts FROM core.outbox ORDER BY 1")
    assert {(row["n"], row["attempts"]) for row in rows} == {(n, 2 if n in (3, 6) else 1) for n in range(10)}
    assert len(facts.of(Retried)) == 12


@some_kinds
async def test_when_none_is_done_nothing_is_written(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """A call that has an outcome for every event, and none of them done, leaves nothing behind (LSN-12)."""
    calls = Calls()

    async def body(events: list[EventEnvelope], work: Work) -> list[Any] | None:
        for event, number in zip(events, calls.note(events), strict=True):
            await work.book(event, number)
        return [Snooze(0.01)] * len(events) if len(calls) == 1 else None

    ids = await publish(conn, 9)
    async with working(dsn, kind, body):
        await drained(conn)
    assert await written(conn) == Counter(ids)


@some_kinds
async def test_duplicates_are_left_out(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """An event whose key was handled before is not in the list, and is settled with the others (LSN-4, LSN-12)."""
    calls, facts = Calls(), Observed()

    async def body(events: list[EventEnvelope], work: Work) -> None:
        for event, number in zip(events, calls.note(events), strict=True):
            await work.book(event, number)

    ids = await publish(conn, 30)
    hidden = [str(each) for each in ids[10:13]]
    # Written while the worker holds its claims, so that only the transaction finds them.
    await conn.execute(
        """CREATE FUNCTION handled_meanwhile() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               IF new.status = 'in_flight' AND new.id = ANY (TG_ARGV[0]::uuid[]) THEN
                   INSERT INTO core.event_handled (handler_name, idempotency_key, source)
                   VALUES ('ledger.book_many', new.idempotency_key, new.source) ON CONFLICT DO NOTHING;
               END IF; RETURN new; END $$"""
    )
    await conn.execute(
        "CREATE TRIGGER meanwhile BEFORE UPDATE ON core.outbox FOR EACH ROW "
        f"EXECUTE FUNCTION handled_meanwhile('{{{','.join(hidden)}}}')"
    )
    async with working(dsn, kind, body, facts):
        await drained(conn)
    assert await written(conn) == Counter(ids[:10] + ids[13:])
    assert await statuses(conn) == {"delivered": 30}
    results = Counter(fact.result for fact in facts.of(Handled))
    assert results == {"delivered": 27, "duplicate": 3}


@some_kinds
async def test_a_lost_lease_is_left_out(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """A row that another worker has by now is not in the list, and keeps its lease (LSN-3, LSN-12)."""
    calls = Calls()

    async def body(events: list[EventEnvelope], work: Work) -> None:
        for event, number in zip(events, calls.note(events), strict=True):
            await work.book(event, number)

    ids = await publish(conn, 20)
    # With the claim itself: the worker is told of tokens that are the rows' no longer.
    await conn.execute(
        """CREATE FUNCTION stolen() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               IF old.status = 'pending' AND new.id = TG_ARGV[0]::uuid AND new.attempts = 1 THEN
                   new.lease_token := gen_random_uuid();
                   new.lease_expires_at := clock_timestamp() + interval '1 second';
               END IF; RETURN new; END $$"""
    )
    await conn.execute(
        f"CREATE TRIGGER stolen BEFORE UPDATE ON core.outbox FOR EACH ROW EXECUTE FUNCTION stolen('{ids[7]}')"
    )
    async with working(dsn, kind, body):
        await until(lambda: len(calls) >= 1, what="a call")
        await drained(conn)
    assert await written(conn) == Counter(ids)
    assert 7 not in calls[0]
    assert await conn.fetchval("SELECT attempts FROM core.outbox WHERE id = $1", ids[7]) == 2


@pytest.mark.slow
@some_kinds
async def test_a_row_that_another_session_blocks(dsn: str, conn: asyncpg.Connection, kind: Kind) -> None:
    """The others do not wait for a row whose inbox row another session has written (LSN-17, LSN-12)."""

    async def body(events: list[EventEnvelope], work: Work) -> None:
        for event in events:
            await work.book(event, event.payload["n"])

    other = await asyncpg.connect(dsn)
    try:
        ids = await publish(conn, 20)
        blocking = other.transaction()
        await blocking.start()
        await other.execute(
            "INSERT INTO core.event_handled (handler_name, idempotency_key, source) VALUES ($1, $2, 'shop')",
            "ledger.book_many",
            str(ids[5]),
        )
        async with working(dsn, kind, body):
            await until(lambda: _is(conn, {"delivered": 19}, without=ids[5]), what="the others are delivered")
            await blocking.rollback()
            await drained(conn)
    finally:
        await other.close()
    assert await written(conn) == Counter(ids)
    assert await conn.fetchval("SELECT max(attempts) FROM core.outbox") == 1


async def _is(conn: asyncpg.Connection, wanted: dict[str, int], without: UUID) -> bool:
    rows = await conn.fetch("SELECT status, count(*) AS n FROM core.outbox WHERE id <> $1 GROUP BY 1", without)
    return {row["status"]: row["n"] for row in rows} == wanted
