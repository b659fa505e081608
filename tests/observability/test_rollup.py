"""The roll-up: what became of deliveries, in the database, and that it adds up whatever is killed."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections import Counter
from typing import Any

import asyncpg
import pytest
from rich.console import Console

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Reject, Retry, RetryPolicy
from holdfast.cli import rates
from holdfast.handler_tally import BUCKETS, OUTCOMES, HandlerTally, Histogram
from holdfast.operator import HandlerRates, Operator
from holdfast.postgres.doctor import examine
from holdfast.postgres.queries import Queries
from holdfast.postgres.retention import Sweep
from tests.operator.support import ACTOR, beat, command, subscribe
from tests.worker.support import PUBLISHER, drained, make_tables, process, publish, running, until

COUNTED = "SELECT " + ", ".join(f"coalesce(sum({each}), 0)::int AS {each}" for each in ("begun", *OUTCOMES))


async def counted(conn: asyncpg.Connection, handler: str = "%") -> dict[str, int]:
    row = await conn.fetchrow(f"{COUNTED} FROM core.rollup_counts WHERE handler_name LIKE $1", handler)
    return {name: count for name, count in row.items() if count}


async def test_every_outcome_is_counted_by_its_settle(dsn: str, conn: asyncpg.Connection) -> None:
    """Plain and transactional handlers, an event with several handlers, duplicates, retries and failures (OBS-2)."""
    registry = HandlerRegistry()
    quick = RetryPolicy(max_attempts=2, base_delay=0.001)

    @registry.handler("order.placed", name="shop.plain")
    async def plain(event: EventEnvelope) -> None: ...

    @registry.handler("order.placed", name="shop.with_tx", retry=quick)
    async def with_tx(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        if event.payload["n"] == 0:
            raise ValueError("not this one")

    @registry.handler("order.lost", name="shop.rejects")
    async def rejects(event: EventEnvelope) -> Reject:
        return Reject("no")

    @registry.handler("order.again", name="shop.retries", retry=quick)
    async def retries(event: EventEnvelope) -> Retry | None:
        return Retry(0.001) if event.payload["n"] == 0 else None

    async with running(dsn, registry) as worker:
        for n in range(5):
            await publish(conn, "order.placed", {"n": n})
        await publish(conn, "order.lost", {"n": 0})
        await publish(conn, "order.again", {"n": 1})
        await drained(conn)
        async with conn.transaction():
            for _ in range(2):
                await PUBLISHER.publish(conn, "order.again", {"n": 2}, idempotency_key="twice")
        await drained(conn)
        await until(lambda: not worker.in_flight)
        tally = worker.tally()
    assert await counted(conn, "shop.plain") == {"begun": 5, "delivered": 5}
    assert await counted(conn, "shop.with\\_tx") == {"begun": 5, "delivered": 4, "retried": 1, "failed": 1}
    assert await counted(conn, "shop.rejects") == {"begun": 1, "failed": 1}
    again = await counted(conn, "shop.retries")
    again.pop("snoozed", None)  # a copy that waits for the other
    assert again == {"begun": 3, "delivered": 2, "duplicate": 1}
    # The worker has counted the same, and has written its histograms as it stopped.
    for name, each in tally.items():
        row = await conn.fetchrow(f"{COUNTED} FROM core.rollup_counts WHERE handler_name = $1", name)
        assert {outcome: row[outcome] for outcome in OUTCOMES} == each.counts, name
    row = await conn.fetchrow(
        "SELECT handler_buckets, outbox_buckets, handler_seconds FROM core.rollup WHERE handler_name = 'shop.with_tx'"
    )
    assert len(row["handler_buckets"]) == len(row["outbox_buckets"]) == BUCKETS
    assert sum(row["handler_buckets"]) == sum(row["outbox_buckets"]) == 6 and row["handler_seconds"] > 0
    assert await conn.fetchval("SELECT count(*) FROM core.rollup_journal") == 0
    await require_balance(dsn, 14)


async def test_a_worker_closes_each_claim_by_one_outcome(dsn: str, conn: asyncpg.Connection) -> None:
    """Also what it releases as it stops, what it cannot cancel, and what an operator has cancelled (OBS-2)."""
    registry = HandlerRegistry()
    begun = asyncio.Event()

    @registry.handler("order.placed", name="shop.slow")
    async def slow(event: EventEnvelope) -> None:
        begun.set()
        await asyncio.sleep(60 if event.payload["n"] % 2 else 0)

    @registry.handler("order.placed", name="shop.with_tx")
    async def with_tx(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await asyncio.sleep(60 if event.payload["n"] % 2 else 0)

    async with conn.transaction():
        ids = await PUBLISHER.publish_many(conn, [NewEvent("order.placed", {"n": n}) for n in range(20)])
    async with running(dsn, registry, grace=0.2, concurrency=3, connections=3) as worker:
        await begun.wait()
        await until(lambda: worker.counters.claimed >= 6, what=f"six claims of {worker.counters}")
        async with Operator(dsn, actor=ACTOR) as operator:
            for each in ids[:4]:
                await operator.events.cancel(each)
    tallies = worker.tally().values()
    assert worker.in_flight == 0
    assert worker.counters.claimed == sum(sum(each.counts.values()) for each in tallies)
    assert sum(each.counts["released"] for each in tallies) > 0
    open = await conn.fetchval("SELECT count(*) FROM core.outbox WHERE settled_at IS NULL AND attempts > 0")
    await require_balance(dsn, open=open)


async def require_balance(dsn: str, begun: int | None = None, *, open: int = 0) -> None:
    async with Operator(dsn, actor=ACTOR) as operator:
        found = await operator.balance()
    assert (found.difference, found.open) == (0, open), found
    assert begun is None or found.begun == begun


@pytest.mark.slow
async def test_counts_add_up_after_kills(dsn: str, conn: asyncpg.Connection) -> None:
    """Begun = delivered + duplicates + failed + open, while workers are killed and when all is done (OBS-2)."""
    await make_tables(conn)
    settings: dict[str, Any] = {"lease": 1.0, "poll_interval": 0.5, "concurrency": 10, "connections": 5}
    total = 120
    async with conn.transaction():
        await PUBLISHER.publish_many(conn, [NewEvent("order.placed", {"n": n, "seconds": 0.02}) for n in range(total)])
    for kill in range(3):
        async with process(dsn, "ledger", **settings) as victim:
            query = "SELECT count(*) >= 3 FROM outside WHERE worker = $1"
            await until(lambda: conn.fetchval(query, victim.pid), what="the victim is at work")  # noqa: B023
            victim.signal(signal.SIGKILL)
            assert await victim.end() == -signal.SIGKILL
        # What it held keeps its attempt, and stays open. Its server processes end a moment later.
        async with Operator(dsn, actor=ACTOR) as operator:
            await until(lambda: _balanced(operator), what=f"the counts add up after kill {kill + 1}")
    async with process(dsn, "ledger", **settings):
        await drained(conn, within=30)
    await require_balance(dsn)
    # From the counts alone, and as the rows say it.
    settled = Counter(row[0] for row in await conn.fetch("SELECT status FROM core.outbox WHERE handler_name <> '*'"))
    sums = await counted(conn)
    assert sums["delivered"] + sums.get("duplicate", 0) == settled["delivered"]
    assert sums.get("failed", 0) == settled["failed"] and sums["begun"] == settled.total()


async def _balanced(operator: Operator) -> bool:
    return (await operator.balance()).difference == 0


async def test_minutes_become_hours_and_go(dsn: str, conn: asyncpg.Connection) -> None:
    """After a day and after fourteen, in batches that wait for no lock (OBX-5)."""
    await conn.execute(
        """INSERT INTO core.rollup
               (period_start, handler_name, generation, delivered, handler_buckets, handler_seconds)
           SELECT date_trunc('hour', now() - interval '3 days') + n * interval '1 minute', 'shop.one', 0, 1,
                  '{1,2}'::bigint[], 0.5
           FROM generate_series(0, 59) n
           UNION ALL SELECT now() - interval '15 days', 'shop.old', 0, 1, '{}', 0
           UNION ALL SELECT date_trunc('minute', now()), 'shop.one', 0, 1, '{}', 0"""
    )
    sweep = Sweep(Queries("core"))
    while await sweep.next(conn) is not None:
        pass
    assert sweep.counts["rollup"] == 1
    rows = await conn.fetch("SELECT * FROM core.rollup ORDER BY period_start")
    assert [(row["hourly"], row["handler_name"], row["delivered"]) for row in rows] == [
        (True, "shop.one", 60), (False, "shop.one", 1),
    ]  # fmt: skip
    assert (rows[0]["handler_buckets"], rows[0]["handler_seconds"]) == ([60, 120], 30.0)


async def test_two_folds_at_once_count_nothing_twice(dsn: str, conn: asyncpg.Connection) -> None:
    """OBS-2."""
    insert = """INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
                SELECT 'shop.' || (n % 7), 0, 'delivered', 1 FROM generate_series(1, 5000) n"""
    await conn.execute(insert)

    async def fold() -> None:
        connection = await asyncpg.connect(dsn)
        while await connection.fetchval("SELECT EXISTS (SELECT FROM core.rollup_journal)"):
            await connection.fetchval("SELECT core.rollup_fold(500)")  # passes over what another one has locked
        await connection.close()

    await asyncio.gather(*(fold() for _ in range(4)))
    assert await conn.fetchval("SELECT sum(delivered) FROM core.rollup") == 5000
    assert await conn.fetchval("SELECT count(*) FROM core.rollup_journal") == 0


async def test_rates_and_series(dsn: str, conn: asyncpg.Connection) -> None:
    """What charts read is bounded, and argument errors name the field (OBS-2)."""
    buckets = [0] * BUCKETS
    buckets[4] = 60
    await conn.execute(
        """INSERT INTO core.rollup (period_start, handler_name, generation, delivered, retried, handler_buckets,
                                    outbox_buckets, handler_seconds, outbox_seconds)
           SELECT date_trunc('minute', now()) - n * interval '1 minute', 'shop.h' || g, 0, 60 + g, 2, $1, $1, 1, 1
           FROM generate_series(1, 90) n, generate_series(1, 60) g""",
        buckets,
    )
    async with Operator(dsn, actor=ACTOR) as operator:
        found = await operator.rates(5, limit=10)
        assert [each.handler_name for each in found][:2] == ["shop.h60", "shop.h59"] and found.left_out == 50
        first = found[0]
        assert 300 <= first.seconds <= 361 and first.tally.counts["delivered"] == 5 * 120
        assert 0.01 < (first.tally.outbox_time.quantile(0.99) or 0) <= 0.025
        (one,) = await operator.rates(60, handler="shop.h1")
        assert one.tally.counts["retried"] == 120
        periods = await operator.series("shop.h1", hours=1)
        assert len(periods) in (59, 60) and {each.seconds for each in periods} == {60}
        assert periods == sorted(periods, key=lambda each: each.start)
        assert await operator.series("shop.unknown") == []
        with pytest.raises(Exception, match="minutes"):
            await operator.rates(0)
        with pytest.raises(Exception, match="handler"):
            await operator.series("no handler")


async def test_status_shows_rates(dsn: str, conn: asyncpg.Connection) -> None:
    """OBS-2."""
    buckets = [0] * BUCKETS
    buckets[8] = 100
    await conn.execute(
        """INSERT INTO core.rollup (period_start, handler_name, generation, delivered, failed, handler_buckets,
                                    outbox_buckets)
           SELECT date_trunc('minute', now()), 'shop.' || repeat('h', g), 0, 120, 1, $1, $1
           FROM generate_series(1, 30) g""",
        buckets,
    )
    said = await shown(dsn)
    assert "delivered per s in" in said and "… and 20 more" in said
    found = json.loads(await shown(dsn, "--json"))["rates"]
    assert {each["minutes"] for each in found} == {1, 5, 60} and len(found) == 90
    assert found[0]["failed"] == 1 and 0.25 < found[0]["outbox_p99_s"] <= 0.5


def test_a_line_of_rates_fits_into_eighty_columns() -> None:
    """A handler with a usual name, in a table; others as records (OBS-2, OPS-1)."""
    buckets = [0] * BUCKETS
    buckets[11] = 100
    histogram = Histogram(tuple(buckets), 1.0)
    tally = HandlerTally({each: 123_456 for each in OUTCOMES}, 0, histogram, histogram)
    idle = HandlerTally({**dict.fromkeys(OUTCOMES, 0), "delivered": 3}, 0, histogram, histogram)
    for name in ("shop.confirm", "billing.charge_the_card_of_a_customer"):
        found = {minutes: [HandlerRates(name, 60.0 * minutes, tally)] for minutes in rates.WINDOWS}
        found[60] += [HandlerRates(f"shop.idle_{n}", 3600.0, idle) for n in range(30)]
        lines = drawn(found)
        assert [line.split()[0] for line in lines] == ["handlers:", "handler", name, "idle"]
        assert max(map(len, lines)) <= 80 and lines[-1] == "idle for 5 min and without failures: 30"
        assert "p99 of 5 min" in lines[0], "the periods are on the screen"


def test_a_percentile_is_no_more_precise_than_its_bucket() -> None:
    """Two digits, marked as an estimate (OBS-2)."""
    buckets = [0] * BUCKETS
    buckets[15] = 3  # a minute to two
    histogram = Histogram(tuple(buckets), 225.0)
    tally = HandlerTally({**dict.fromkeys(OUTCOMES, 0), "delivered": 3}, 0, histogram, histogram)
    *_, line = drawn({minutes: [HandlerRates("shop.slow", 60.0 * minutes, tally)] for minutes in rates.WINDOWS})
    assert line.split()[-4:] == ["~90s", "~2min"] * 2


def drawn(found: rates.Rates) -> list[str]:
    console = Console(width=80, file=io.StringIO())
    console.print(rates.table(found))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


async def test_signals_of_growth(conn: asyncpg.Connection) -> None:
    """Rows by the statistics and never counted, failures and times of a week (OBS-3, DLQ-6)."""
    quiet = ("outbox-large", "failures-weekly", "outbox-slow-weekly")
    assert not [each for each in (await examine(conn)).findings if each.code in quiet]
    slow = [0] * BUCKETS
    slow[8], slow[10] = 98, 2
    await conn.execute(
        """INSERT INTO core.rollup (period_start, hourly, handler_name, generation, failed, outbox_buckets)
           SELECT date_trunc('hour', now()) - n * interval '1 hour', true, 'shop.one', 0, 1, $1
           FROM generate_series(30, 190) n""",
        slow,
    )
    await conn.execute("UPDATE pg_class SET reltuples = 21e6 WHERE oid = 'core.outbox'::regclass")
    found = {each.code: each for each in (await examine(conn)).findings if each.code in quiet}
    assert set(found) == set(quiet) and "21,000,000" in found["outbox-large"].evidence
    assert found["outbox-large"].severity == "warning"


async def shown(dsn: str, *options: str) -> str:
    process = await command(dsn, "status", *options)
    printed, errors = await process.communicate()
    assert process.returncode == 0, errors
    return printed.decode()


async def test_what_is_taken_back_is_counted_where_it_was_begun(dsn: str, conn: asyncpg.Connection) -> None:
    """Release and cancel of what a killed worker holds, and an event that is split after it was claimed (OBS-2)."""
    await subscribe(conn, "shop.poisoned", "order.poison")
    killed = await beat(conn, "killed", "shop.poisoned")
    released, cancelled = [await publish(conn, "order.poison", {}) for _ in range(2)]
    claim = """SELECT count(*) FROM core.outbox_claim($1, gen_random_uuid(), '1 minute',
                   (SELECT version FROM core.subscriptions_version), 'outbox_default', 0, '{*/order.poison}', '{1}',
                   '{shop.poisoned}', '{1000}', '{-infinity}', '{00000000-0000-0000-0000-000000000000}')"""
    assert await conn.fetchval(claim, killed) == 2
    async with Operator(dsn, actor=ACTOR) as operator:
        await operator.events.cancel(cancelled)
        assert (await operator.workers.release(killed, force=True)).released == 1
        assert await counted(conn, "shop.poisoned") == {"begun": 1, "cancelled": 1}
        # Claimed, and then another handler wants it too.
        assert await conn.fetchval(claim, killed) == 1
        await subscribe(conn, "other.poisoned", "order.poison")
        await conn.execute(
            "UPDATE core.outbox SET lease_expires_at = now() - interval '1 minute' WHERE id = $1", released
        )
        split = """SELECT n FROM core.outbox_split(
                       (SELECT version FROM core.subscriptions_version), 'outbox_default', 0,
                       '{*/order.poison}', '{1}', '{10}', '{-infinity}', '{00000000-0000-0000-0000-000000000000}')"""
        assert await conn.fetchval(split) == 1
        assert await counted(conn, "shop.poisoned") == {"begun": 1, "cancelled": 1}
        assert await counted(conn, "%/%") == {}, "a route is no handler"
        # As core.begun_for counts it where no handler is known any longer.
        await conn.execute("SELECT core.rollup_count('*/order.poison', 0, 'cancelled', 1)")
        assert [each.handler_name for each in await operator.rates(5)] == ["shop.poisoned"]
