"""Many at once: rows 12 and 16 of the contract, and fifty first requests with one key (P9)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import timedelta

import asyncpg
import pytest

from tests.http.shop import DRIVERS, EVERY_DRIVER, ISOLATION
from tests.http.support import Open, effects, expire, opened, problem, records, runs, with_every
from tests.worker.support import until

TWO = ("asyncpg", "sqlalchemy")


@pytest.mark.slow
@with_every(EVERY_DRIVER)
async def test_fifty_first_requests_with_one_key(
    conn: asyncpg.Connection, shop: Open, driver: str, isolation: str
) -> None:
    """In two processes, one execution, no 5xx, and the same bytes for everybody (H1, P9, rows 7 and 11)."""
    async with shop(driver, isolation) as http:
        answers = await asyncio.gather(*(http.order(order={"seconds": 0.2}) for _ in range(50)))
    assert Counter(answer.status_code for answer in answers) == {201: 50}
    assert len({answer.content for answer in answers}) == 1
    assert len({answer.headers["x-request-id"] for answer in answers}) == 1
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == 49
    assert (await runs(conn), await effects(conn)) == (["tea"], ["tea"])
    assert len(await records(conn)) == 1


@with_every(TWO)
async def test_fifty_first_requests_with_an_expired_key(
    conn: asyncpg.Connection, shop: Open, driver: str, isolation: str
) -> None:
    """Row 15, H1: by the database's clock; a moment before it is still the old one, then one request is the first."""
    async with shop(driver, isolation) as http:
        first = await http.order()
        await expire(conn, but=timedelta(seconds=60))
        assert (await http.order()).content == first.content
        await expire(conn)
        orders = [{"sku": "milk", "seconds": 0.1}] * 50
        answers = await asyncio.gather(*(http.order(order=order) for order in orders))
        assert Counter(answer.status_code for answer in answers) == {201: 50}
        assert {answer.content for answer in answers} == {answers[0].content}
        assert sum("idempotent-replayed" in answer.headers for answer in answers) == 49
    assert await effects(conn) == ["tea", "milk"]
    assert len(await records(conn)) == 1


async def test_duplicates_leave_the_first_one_its_thread(dsn: str, conn: asyncpg.Connection) -> None:
    """More synchronous ones wait than there are threads, and the one they wait for still comes to its end (H1)."""
    async with opened(dsn, "sqlalchemy-sync") as (_, http):
        answers = await asyncio.gather(*(http.order(order={"seconds": 0.2}) for _ in range(60)))
    assert Counter(answer.status_code for answer in answers) == {201: 60}
    assert (await runs(conn), await effects(conn)) == (["tea"], ["tea"])


@with_every(TWO)
async def test_the_first_one_takes_longer_than_the_wait(
    conn: asyncpg.Connection, shop: Open, driver: str, isolation: str
) -> None:
    """Row 12: 409 with Retry-After after the wait, and the answer when it is there."""
    async with shop(driver, isolation, wait=0.2) as http:
        first = asyncio.create_task(http.order(order={"seconds": 0.8}))
        await until(lambda: runs(conn), what="the first one runs")
        began = time.monotonic()
        waiting = await http.order(order={"seconds": 0.8})
        problem(waiting, 409, "idempotency-in-progress")
        assert waiting.headers["retry-after"] == "1"
        assert 0.2 <= time.monotonic() - began < 0.7
        assert (await first).status_code == 201
        again = await http.order(order={"seconds": 0.8})
        assert again.content == (await first).content
    assert await effects(conn) == ["tea"]


async def test_the_first_one_fails_and_the_second_is_the_first(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 12: whoever waited for a request that rolled back is carried out, once."""
    await conn.execute("CREATE SEQUENCE tries")
    try:
        async with opened(dsn) as (_, http):
            once = "DO $$ BEGIN IF nextval('tries') = 1 THEN RAISE EXCEPTION 'not yet'; END IF; END $$"
            order = {"seconds": 0.3, "sql": once}
            answers = await asyncio.gather(*(http.order(order=order) for _ in range(5)))
    finally:
        await conn.execute("DROP SEQUENCE tries")
    assert Counter(answer.status_code for answer in answers) == {500: 1, 201: 4}
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1
    assert (await runs(conn), await effects(conn)) == (["tea"] * 2, ["tea"])


async def test_the_wait_is_the_records_alone(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 12: the endpoint's own statements wait as long as they ever did."""
    async with opened(dsn, wait=0.05) as (_, http):
        async with conn.transaction():
            await conn.execute("UPDATE counters SET value = value + 1")
            waiting = asyncio.create_task(http.order(order={"count": True}))
            await until(lambda: blocked(conn), what="the endpoint waits")
            await asyncio.sleep(0.2)
        assert (await waiting).status_code == 201
    assert await conn.fetchval("SELECT value FROM counters") == 2


async def blocked(conn: asyncpg.Connection) -> bool:
    return bool(await conn.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"))


@pytest.mark.parametrize("driver", DRIVERS)
async def test_what_passes_is_tried_again(dsn: str, conn: asyncpg.Connection, driver: str) -> None:
    """Row 16: a serialization failure, a deadlock and their like are run again, and the client never hears of them."""
    async with opened(dsn, driver) as (shop, http):
        for code in ("40001", "40P01", "23505", "55P03"):
            await conn.execute("CREATE SEQUENCE tries")
            flaky = f"""DO $$ BEGIN IF nextval('tries') <= 3 THEN
                            RAISE EXCEPTION 'again' USING ERRCODE = '{code}'; END IF; END $$"""
            assert (await http.order(code, {"sku": code, "sql": flaky})).status_code == 201
            await conn.execute("DROP SEQUENCE tries")
        told = [fact.details for fact in shop.facts]  # type: ignore[union-attr]
    assert [details["attempt"] for details in told] == [1, 2, 3] * 4
    assert {details["operation"] for details in told} == {"POST /orders"}
    assert [details["sqlstate"] for details in told][::3] == ["40001", "40P01", "23505", "55P03"]
    assert await effects(conn) == ["40001", "40P01", "23505", "55P03"]


@with_every(EVERY_DRIVER)
async def test_what_does_not_pass_is_given_up(
    conn: asyncpg.Connection, shop: Open, driver: str, isolation: str
) -> None:
    """Row 16: after three retries 503 with Retry-After, or 409 if it is unique, never 500, and nothing is stored."""
    async with shop(driver, isolation) as http:
        taken = await http.order(order={"error": "23505"})
        problem(taken, 409, "request-conflict")
        assert "retry-after" not in taken.headers
        for code in ("40001", "40P01", "55P03"):
            answer = await http.order(order={"error": code})
            problem(answer, 503, "idempotency-unavailable")
            assert answer.headers["retry-after"] == "1"
        assert (await effects(conn), await records(conn)) == ([], [])
        assert (await http.order()).status_code == 201
    assert len(await runs(conn)) == 4 * 4 + 1


@with_every(EVERY_DRIVER)
async def test_requests_that_get_in_each_others_way(
    conn: asyncpg.Connection, shop: Open, driver: str, isolation: str
) -> None:
    """Row 16: real conflicts on one row, at every level: 201 or 503, never 500, and each success counts once."""
    async with shop(driver, isolation) as http:
        answers = await asyncio.gather(*(http.order(f"k-{n}", {"count": True}) for n in range(6)))
        statuses = Counter(answer.status_code for answer in answers)
        assert set(statuses) <= {201, 503}
        assert statuses[201] >= 1
        for n in range(6):
            assert (await http.order(f"k-{n}", {"count": True})).status_code == 201
    assert await conn.fetchval("SELECT value FROM counters") == 6
    assert len(await effects(conn)) == 6


@with_every(TWO, ISOLATION[1:])
async def test_a_conflict_that_is_sure_to_come(
    dsn: str, conn: asyncpg.Connection, shop: Open, driver: str, isolation: str
) -> None:
    """Row 16: somebody else changes the row that the endpoint waits for; it is run again, and answered with 201."""
    other = await asyncpg.connect(dsn)
    try:
        async with shop(driver, isolation) as http:
            async with other.transaction():
                await other.execute("UPDATE counters SET value = value + 1")
                waiting = asyncio.create_task(http.order(order={"count": True}))
                await until(lambda: blocked(conn), what="the endpoint waits for the row")
            assert (await waiting).status_code == 201
    finally:
        await other.close()
    assert (await runs(conn), await effects(conn)) == (["tea"] * 2, ["tea"])
    assert await conn.fetchval("SELECT value FROM counters") == 2


async def test_a_commit_that_fails_is_never_a_success(dsn: str, conn: asyncpg.Connection) -> None:
    """Rows 10 and 16, IDM-1: what the database finds only at the commit."""
    await conn.execute(
        """
        CREATE SEQUENCE tries;
        CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            CASE NEW.name
            WHEN 'again' THEN
                IF nextval('tries') <= 2 THEN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END IF;
            WHEN 'never' THEN RAISE EXCEPTION 'never' USING ERRCODE = '23503';
            WHEN 'gone' THEN PERFORM pg_terminate_backend(pg_backend_pid());
            ELSE NULL;
            END CASE;
            RETURN NULL;
        END $$;
        CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION at_commit();
        """
    )
    try:
        for driver in DRIVERS:
            await conn.execute(
                "TRUNCATE effects, runs, core.outbox, core.idempotency_records; ALTER SEQUENCE tries RESTART"
            )
            async with opened(dsn, driver) as (_, http):
                assert (await http.order("a", {"sku": "again"})).status_code == 201
                assert (await http.order("b", {"sku": "never"})).status_code == 500
                problem(await http.order("c", {"sku": "gone"}), 503, "idempotency-unavailable")
                assert (await http.order(None, {"sku": "never"}, path="/notes")).status_code == 500
                assert (await http.order("d", {"sku": "tea"})).status_code == 201
            assert await effects(conn) == ["again", "tea"]
            assert len(await records(conn)) == 2
    finally:
        await conn.execute("DROP TRIGGER at_commit ON effects; DROP FUNCTION at_commit; DROP SEQUENCE tries")
