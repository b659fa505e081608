"""The store: expiry, secrets, retention, privileges, and commands with keys of a job's own making (rows 15, IDM-2)."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import asyncpg
import httpx
import psycopg
import psycopg_pool
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher
from holdfast.errors import CommandUnderWay, ConfigurationError, KeyReused, PayloadError
from holdfast.idempotency import Commands, IdempotencyMiddleware, IdempotencySettings, exchange_of, job_key
from holdfast.operator import Operator
from holdfast.retry import classify
from tests.http.plain import Plain
from tests.http.shop import SECRET
from tests.http.support import effects, opened, problem, records, served
from tests.worker.support import drained, running


async def age(conn: asyncpg.Connection, **time: float) -> None:
    """As if so much time had passed."""
    past = timedelta(**time)
    await conn.execute(
        """UPDATE core.idempotency_records
           SET created_at = created_at - $1::interval, expires_at = expires_at - $1::interval""",
        past,
    )


# --- expiry ------------------------------------------------------------------------------------------------


async def test_an_expired_key_is_a_new_one(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 15: by the database's clock; also for another request, and also for fifty at once."""
    async with opened(dsn, keep=3600) as (_, http):
        first = await http.order()
        await age(conn, minutes=59)
        assert (await http.order()).content == first.content
        await age(conn, minutes=2)
        second = await http.order(order={"sku": "coffee"})
        assert (second.status_code, second.json()["sku"]) == (201, "coffee")
        assert "idempotent-replayed" not in second.headers
        await age(conn, minutes=61)
        answers = await asyncio.gather(*(http.order(order={"sku": "milk", "seconds": 0.1}) for _ in range(8)))
        assert {answer.content for answer in answers} == {answers[0].content}
    assert await effects(conn) == ["tea", "coffee", "milk"]
    assert len(await records(conn)) == 1


# --- secrets -----------------------------------------------------------------------------------------------


async def test_secrets_are_changed_without_a_break(dsn: str, conn: asyncpg.Connection) -> None:
    """The newest signs, the older ones are recognised; without its secret an answer is not given (IDM-1, S18)."""
    other = "another secret of the tests, newer"

    async def order(key: str, secrets: dict[int, str]) -> int:
        app = Plain(dsn)
        app._app._config.secrets.__init__(secrets)  # type: ignore[misc]
        async with served(app) as http:
            return (await http.order(key)).status_code

    assert await order("old", {1: SECRET}) == 201
    assert await order("old", {1: SECRET, 2: other}) == 201
    assert await order("new", {1: SECRET, 2: other}) == 201
    assert await order("new", {2: other}) == 201
    assert await order("old", {2: other}) == 409
    found = {record["key"]: record["hash_version"] for record in await records(conn)}
    assert found == {"old": 1, "new": 2}
    assert len(await effects(conn)) == 2


async def test_nothing_stored_tells_the_request(dsn: str, conn: asyncpg.Connection) -> None:
    """The hash is keyed, no body of a request is kept, and logs have a part of a hash for the key (S7, S18, RTY-3)."""
    async with opened(dsn) as (shop, http):
        await http.order("a-very-secret-key", {"seat": "canary-seat"})
        await http.order("a-very-secret-key", {"seat": "other"})
        # An error whose message quotes a row, and that is given up.
        quoting = "INSERT INTO seats VALUES ('canary-seat')"
        assert (await http.order("another-secret-key", {"sql": quoting})).status_code == 409
        retries = [fact.details for fact in shop.facts if fact.name == "request_retried"]  # type: ignore[union-attr]
        assert [each["attempt"] for each in retries] == [1, 2, 3] and len(
            {each["correlation_id"] for each in retries}
        ) == 1
        assert {"operation", "next_attempt_at", "retry_in_s"} <= retries[0].keys()
        for secret in ("a-very-secret-key", "another-secret-key", "canary"):
            assert secret not in str(shop.facts)
    [record] = await records(conn)
    assert "canary" not in str(dict(record))
    assert len(record["request_hash"]) == 64


async def test_whoever_cannot_name_the_request_gets_no_answer(dsn: str, conn: asyncpg.Connection) -> None:
    """With scope and key alone the database says nothing of what it has stored (S18)."""
    async with opened(dsn) as (_, http):
        await http.order()
    guess = "SELECT core.idempotency_begin('http:alice', 'k-1', '{0000}', 1, '1 day', 1000, NULL)"
    assert json.loads(await conn.fetchval(guess)) == {"outcome": "reused"}


# --- connections -------------------------------------------------------------------------------------------


async def test_more_requests_than_a_synchronous_pool_has_connections(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 17: those who wait for a connection do not take the threads that its holders need to give it back."""

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        tx = await exchange_of(scope).begin("alice")
        await asyncio.to_thread(tx.execute, "INSERT INTO effects (name) VALUES ('image')")
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    with psycopg_pool.ConnectionPool(dsn, min_size=2, max_size=2) as pool:
        app = IdempotencyMiddleware(endpoint, pool.connection, {1: SECRET})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as http:
            answers = await asyncio.gather(
                *(http.post("/", headers={"Idempotency-Key": f"k-{number}"}) for number in range(40))
            )
    assert [answer.status_code for answer in answers] == [201] * 40
    assert len(await effects(conn)) == 40


# --- retention ---------------------------------------------------------------------------------------------


async def test_expired_records_are_swept(dsn: str, conn: asyncpg.Connection) -> None:
    """By the policy of idempotency_record, in batches, by the sweeper of workers and operators (IDM-1, OBX-5)."""
    async with opened(dsn) as (_, http):
        await http.order("old")
        await age(conn, hours=25)
        await http.order("new")
    async with Operator(dsn, actor="ann@example.org") as operator:
        found = await operator.retention.report()
        assert [(due.step, due.count) for due in found.due] == [("records", 1)]
        done = await operator.retention.sweep(reason="a test")
        assert done.swept == {**done.swept, "records": 1}
    assert [record["key"] for record in await records(conn)] == ["new"]
    audited = await conn.fetchval(
        "SELECT arguments FROM core.audit WHERE action = 'retention.sweep' ORDER BY id DESC LIMIT 1"
    )
    assert json.loads(audited)["step"] == "records"


async def test_expired_records_may_be_kept(dsn: str, conn: asyncpg.Connection) -> None:
    """With days in the policy they stay so long, and are still no answer (OBX-5)."""
    change = "SELECT core.retention_set('ann', 'a test', 'idempotency_record', '*', $1, 0, 'HARD_DELETE')"
    await conn.execute(change, 100)  # longer than the inbox: it has nothing to do with replays
    try:
        async with opened(dsn) as (_, http):
            await http.order("old")
            await age(conn, days=50)
            assert await conn.fetchval("SELECT swept FROM core.sweep_records(100)") == 0
            assert "idempotent-replayed" not in (await http.order("old")).headers
            await age(conn, days=102)
            assert await conn.fetchval("SELECT swept FROM core.sweep_records(100)") == 1
    finally:
        await conn.execute(change, 0)


async def test_a_sweep_is_small(dsn: str, conn: asyncpg.Connection) -> None:
    """At most what it is told, from the left edge of the index, and it says whether there is more (E7)."""
    await conn.execute(
        """INSERT INTO core.idempotency_records (scope, key, request_hash, hash_version, status, response_status_code,
                                                 expires_at)
           SELECT 's', n::text, 'h', 1, 'Completed', 201, now() - n * interval '1 second'
           FROM generate_series(1, 250) n"""
    )
    taken = [tuple(await conn.fetchrow("SELECT swept, more FROM core.sweep_records(100)")) for _ in range(3)]
    assert taken == [(100, True), (100, True), (50, False)]


# --- commands ----------------------------------------------------------------------------------------------


async def test_a_command_is_carried_out_once(dsn: str, conn: asyncpg.Connection) -> None:
    """The result of the first time, in the caller's transaction; a rollback takes both back (IDM-2)."""
    commands = Commands({1: SECRET})
    key = job_key("2026-03-01", "send-reminder", 17)
    assert key == "job:2026-03-01:send-reminder:17"
    ran: list[int] = []

    async def remind() -> dict[str, int]:
        ran.append(1)
        await conn.execute("INSERT INTO effects (name) VALUES ('image')")
        return {"reminders": len(ran)}

    with pytest.raises(RuntimeError):
        async with conn.transaction():
            assert await commands.run(conn, key, {"order": 17}, remind) == {"reminders": 1}
            raise RuntimeError
    for _ in range(3):
        async with conn.transaction():
            assert await commands.run(conn, key, {"order": 17}, remind) == {"reminders": 2}
    assert (len(ran), await effects(conn)) == (2, ["image"])
    [record] = await records(conn)
    assert (record["scope"], record["key"], record["status"]) == ("job:jobs", key, "Completed")

    async with conn.transaction():
        with pytest.raises(KeyReused):
            await commands.run(conn, key, {"order": 18}, remind)
        with pytest.raises(PayloadError):
            await commands.run(conn, "k", {"order": {1, 2}}, remind)


async def test_commands_in_synchronous_transactions(dsn: str) -> None:
    """With psycopg and SQLAlchemy, inside a savepoint too; the answer is the one of the other driver (IDM-2)."""
    commands = Commands({1: SECRET})
    results: list[Any] = []

    def work() -> list[int]:
        return [1, 2]

    with psycopg.connect(dsn) as connection, connection.transaction():
        results.append(commands.run(connection, "k", {}, work))
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session, session.begin(), session.begin_nested():
        session.execute(text("INSERT INTO effects (name) VALUES ('image')"))
        results.append(commands.run(session, "k", {}, work))
        results.append(commands.run(session, "other", {}, work))
    engine.dispose()
    assert results == [[1, 2]] * 3


@pytest.mark.parametrize("ending", ["COMMIT; BEGIN", "ROLLBACK; BEGIN"], ids=["commit", "rollback"])
async def test_a_command_that_ends_the_transaction(dsn: str, conn: asyncpg.Connection, ending: str) -> None:
    """And begins another, in which nothing would remember its result (IDM-2)."""
    commands = Commands({1: SECRET})

    async def end() -> None:
        await conn.execute(ending)

    await conn.execute("BEGIN")
    with pytest.raises(ConfigurationError, match="leave commit and rollback to the caller"):
        await commands.run(conn, "asyncpg", {}, end)
    await conn.execute("ROLLBACK")
    with psycopg.connect(dsn) as connection:
        with pytest.raises(ConfigurationError, match="leave commit and rollback to the caller"):
            commands.run(connection, "psycopg", {}, lambda: connection.execute(ending) and None)
        connection.rollback()
    assert "Completed" not in [record["status"] for record in await records(conn)]


async def test_a_command_that_is_under_way(dsn: str, conn: asyncpg.Connection) -> None:
    """Whoever comes second waits, and is told to come again (IDM-2, RTY-2)."""
    commands = Commands({1: SECRET}, IdempotencySettings(wait=0.05))
    other = await asyncpg.connect(dsn)

    async def nothing() -> None: ...

    try:
        async with conn.transaction():
            await commands.run(conn, "k", {}, nothing)
            with pytest.raises(CommandUnderWay) as caught:
                async with other.transaction():
                    await commands.run(other, "k", {}, nothing)
        assert (classify(caught.value).terminal, classify(caught.value).retry_after) == (False, 1)
        async with other.transaction():
            assert await commands.run(other, "k", {}, nothing) is None
    finally:
        await other.close()


async def test_a_handler_dispatches_commands(dsn: str, conn: asyncpg.Connection) -> None:
    """With the event's id in the key, whatever repeats the event does not repeat the command (IDM-2)."""
    commands, registry = Commands({1: SECRET}), HandlerRegistry()

    @registry.handler("reminders.due", name="shop.send_reminders")
    async def send_reminders(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        async def remind() -> None:
            await tx.execute("INSERT INTO effects (name) VALUES ('image')")

        for order in event.payload["orders"]:
            key = job_key(event.payload["run"], "send-reminder", order)
            await commands.run(tx, key, {"order": order}, remind)

    async with conn.transaction():
        due = {"run": "2026-03-01", "orders": [1, 2, 3]}
        # The same run twice, as two events that know nothing of each other.
        await Publisher("shop").publish_many(conn, [NewEvent("reminders.due", due), NewEvent("reminders.due", due)])
    async with running(dsn, registry):
        await drained(conn)
    assert await conn.fetchval("SELECT count(*) FROM effects") == 3
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 2


# --- as the client of another service ------------------------------------------------------------------------


async def test_a_handler_that_calls_such_a_service(dsn: str) -> None:
    """What the contract answers is classified as it is meant: under way is transient, reused is terminal (RTY-2)."""
    async with opened(dsn, wait=0.05) as (_, http):
        slow = asyncio.create_task(http.order("slow", {"seconds": 0.5}))
        await asyncio.sleep(0.2)
        under_way, reused = await http.order("slow", {"seconds": 0.5}), None
        await slow
        reused = await http.order("slow", {"sku": "coffee"})
        missing = await http.order(None)
    problem(under_way, 409, "idempotency-in-progress")
    verdicts = [verdict_on(answer) for answer in (under_way, reused, missing)]
    assert [(verdict.terminal, verdict.retry_after) for verdict in verdicts] == [(False, 1), (True, None), (True, None)]


def verdict_on(answer: Any) -> Any:
    try:
        answer.raise_for_status()
    except Exception as error:
        return classify(error)
    raise AssertionError("it was a success")
