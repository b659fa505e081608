"""Crashes, cut lines, clients that go: rows 17, 20 and 21 of the contract. A retry executes or replays, never both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from typing import Any

import asyncpg
import httpx
import pytest

from chaos.wire import Cut, Watch, wired
from holdfast.idempotency.asgi import exchange
from tests.http.plain import Plain, stepped
from tests.http.shop import DRIVERS
from tests.http.support import (
    ORDER,
    Client,
    Zygote,
    client,
    effects,
    opened,
    problem,
    records,
    reserved_port,
    runs,
    served,
)
from tests.logins import Logins
from tests.servers import SessionServer
from tests.worker.support import until


async def settled(conn: asyncpg.Connection) -> int:
    """How many orders there are: each with its event and its record, or none of them."""
    async with conn.transaction(isolation="repeatable_read"):
        found = len(await effects(conn))
        assert [record["status"] for record in await records(conn)] == ["Completed"] * found
    return found


# --- the server dies -------------------------------------------------------------------------------------


async def killed(
    conn: asyncpg.Connection, zygote: Zygote, doomed: dict[str, Any], other: dict[str, Any], moments: range
) -> tuple[int, int]:
    """Kill a server at each of these moments of a request and retry at another, until a request is answered before.

    Returns how often it died, and how often the retry found that the request had been carried out.
    """
    deaths, committed, first = 0, 0, None
    with reserved_port() as port, reserved_port() as next_port:
        async with zygote.serving(port=next_port, **other), client(next_port) as survivor:
            for moment in moments:
                await conn.execute("TRUNCATE effects, core.outbox, core.idempotency_records")
                async with zygote.serving(port=port, kill=moment, **doomed) as [pid], client(port) as http:
                    with contextlib.suppress(httpx.TransportError):
                        first = await http.order(f"k-{moment}")
                    if first is not None:
                        break
                    await until(lambda pid=pid: not alive(pid), what="its death")
                deaths += 1
                before = await settled(conn)
                retry = await survivor.order(f"k-{moment}")
                assert retry.status_code == 201, f"moment {moment}"
                replayed = "idempotent-replayed" in retry.headers
                assert replayed or before == 0, f"moment {moment}: carried out twice"
                assert await settled(conn) == 1, f"moment {moment}"
                committed += replayed
    assert first is not None and first.status_code == 201
    return deaths, committed


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_the_server_is_killed_at_every_await(dsn: str, conn: asyncpg.Connection, zygote: Zygote) -> None:
    """Row 21, H6: SIGKILL whenever the request waits or has just waited, from its arrival to its answer."""
    plain: dict[str, Any] = {"app": "plain", "dsn": dsn}
    deaths, committed = await killed(conn, zygote, plain, plain, range(1, 200))
    assert deaths >= 15, "there are fewer moments than the request has statements"
    assert 0 < committed < deaths


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("driver", "other"), [("asyncpg", "psycopg"), ("psycopg", "sqlalchemy")])
async def test_the_retry_goes_to_another_driver(
    dsn: str, conn: asyncpg.Connection, zygote: Zygote, driver: str, other: str
) -> None:
    """Row 21, T35: killed at its awaits under one driver, the retry in a process with another one."""
    first, second = ({"app": "shop", "dsn": dsn, "options": [each, "read committed"]} for each in (driver, other))
    deaths, committed = await killed(conn, zygote, first, second, range(3, 600, 3))  # every third of them
    assert deaths >= 5 and 0 < committed < deaths


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def test_a_dead_server_holds_nobody_up(dsn: str, conn: asyncpg.Connection, zygote: Zygote) -> None:
    """Row 21, H6: mid-request; the retry goes to another process that was there all the time."""
    with reserved_port() as first_port, reserved_port() as second_port:
        wanted: dict[str, Any] = {"app": "shop", "dsn": dsn, "options": ["asyncpg", "read committed"]}
        async with (
            zygote.serving(port=first_port, **wanted) as [pid],
            zygote.serving(port=second_port, **wanted),
            client(first_port) as doomed,
            client(second_port) as http,
        ):
            lost = asyncio.create_task(doomed.order(order={"seconds": 20}))
            await until(lambda: runs(conn), what="it runs")
            os.kill(pid, 9)
            with pytest.raises(httpx.TransportError):
                await lost
            answer = await http.order(order={"seconds": 0.0})
            assert answer.status_code == 201
    assert await effects(conn) == ["tea"]


# --- the line to the database is cut -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_the_line_is_cut_at_every_message(dsn: str, conn: asyncpg.Connection) -> None:
    """Rows 17 and 21: whatever Postgres was told or has answered, 201 means that it is committed."""
    async with wired(dsn) as (wire, through):

        async def attempt(cut: Cut | None) -> tuple[Watch, httpx.Response]:
            await conn.execute("TRUNCATE effects, core.outbox, core.idempotency_records")
            async with served(Plain(through)) as http:
                await http.order("warm")  # so that the connection is there, and its statements are prepared
                await conn.execute("TRUNCATE effects, core.outbox, core.idempotency_records")
                watch = wire.watch(cut=cut)
                answer = await http.order()
                wire.watch()
                if cut is not None:
                    assert watch.made.is_set(), cut
                    assert answer.status_code in ((201,) if await settled(conn) else ()) + (503,), cut
                    retry = await http.order()
                    assert retry.status_code == 201, cut
                    assert await settled(conn) == 1, cut
                return watch, answer

        learned, uncut = await attempt(None)
        assert uncut.status_code == 201
        statuses = []
        for direction in ("to_server", "to_client"):
            letters = learned.seen[direction]  # type: ignore[index]
            # The parts of one statement travel together: its last one stands for all.
            for number, letter in enumerate(letters, start=1):
                if letter in ("Q", "S", "Z"):
                    _, answer = await attempt(Cut(direction, number))  # type: ignore[arg-type]
                    statuses.append(answer.status_code)
        assert len(statuses) >= 12
        assert set(statuses) <= {201, 503}
        assert statuses.count(503) >= 8


async def test_a_store_that_cannot_be_reached(conn: asyncpg.Connection) -> None:
    """Row 17: 503 and not carried out, over every driver."""
    nowhere = socket.socket()
    nowhere.bind(("127.0.0.1", 0))
    try:
        for driver in DRIVERS:
            dsn = f"postgresql://nobody:nothing@127.0.0.1:{nowhere.getsockname()[1]}/none"
            async with opened(dsn, driver, connect_within=0.3) as (shop, http):
                for key, path in (("k-1", "/orders"), (None, "/notes")):
                    answer = await http.order(key, path=path)
                    if driver.startswith("sqlalchemy") and key is None:
                        # A session connects with its first statement, which is the endpoint's own.
                        assert answer.status_code in (500, 503)
                        continue
                    problem(answer, 503, "idempotency-unavailable")
                    assert answer.headers["retry-after"] == "1"
                assert "nothing" not in str(shop.facts)  # the password
    finally:
        nowhere.close()


async def test_a_store_that_is_not_there(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 17: whoever cannot remember must not act; and no client is asked to wait for a forgotten migration."""
    async with opened(dsn, schema="elsewhere") as (shop, http):
        answer = await http.order()
        problem(answer, 500, "idempotency-misconfigured")
        assert "retry-after" not in answer.headers
        (told,) = [(fact.name, fact.details["sqlstate"], fact.details["problem"]) for fact in shop.facts]  # type: ignore[union-attr]
    name, state, text = told
    assert (name, state) == ("idempotency_misconfigured", "3F000")
    assert "no schema elsewhere (not installed)" in text
    assert text.endswith("holdfast migrate apply --schema elsewhere")
    assert await runs(conn) == []


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_login_without_the_role(
    dsn: str, conn: asyncpg.Connection, driver: str, postgres_server: SessionServer
) -> None:
    """Row 17: the log has the grant, in whatever error the driver wraps the refusal."""
    logins = Logins(postgres_server, dsn)
    logins.create()
    try:
        async with opened(logins.dsn_of("login_stranger"), driver) as (shop, http):
            problem(await http.order(), 500, "idempotency-misconfigured")
            (told,) = shop.facts
    finally:
        logins.drop()
    assert told.details["sqlstate"] == "42501"  # type: ignore[union-attr]
    assert "may not record requests in the schema core" in told.details["problem"]  # type: ignore[union-attr]
    assert "GRANT holdfast_producer TO" in told.details["problem"]  # type: ignore[union-attr]


async def test_a_login_that_the_server_refuses(dsn: str, postgres_server: SessionServer) -> None:
    """Row 17: an address that is wrong is said to be."""
    async with opened(Logins(postgres_server, dsn).dsn_of("nobody")) as (shop, http):
        problem(await http.order(), 500, "idempotency-misconfigured")
        (told,) = shop.facts
    assert told.details["problem"] == (  # type: ignore[union-attr]
        "the server refuses the login of the application; check the user and the password"
    )


@pytest.mark.slow
async def test_a_pool_with_nothing_to_give(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 17: 503 within the time for a connection, and the others go on."""
    async with opened(dsn, connect_within=1.0) as (_, http):
        # All eight connections are opened meanwhile, and none is given back before the ninth has waited.
        busy = [asyncio.create_task(http.order(f"k-{n}", {"seconds": 4.0})) for n in range(8)]
        await until(lambda: running(conn, 8), what="eight run")
        problem(await http.order("late"), 503, "idempotency-unavailable")
        assert [(await each).status_code for each in busy] == [201] * 8
        assert (await http.order("late")).status_code == 201
    assert len(await effects(conn)) == 9


async def running(conn: asyncpg.Connection, count: int) -> bool:
    return len(await runs(conn)) >= count


async def test_the_backend_is_terminated_mid_request(dsn: str, conn: asyncpg.Connection) -> None:
    """Rows 17 and 21: over every driver 503, nothing stored, and the retry is carried out."""
    for driver in DRIVERS:
        await conn.execute("TRUNCATE effects, runs, core.outbox, core.idempotency_records")
        async with opened(dsn, driver) as (_, http):
            cut = asyncio.create_task(http.order(order={"seconds": 0.3, "count": True}))
            await until(lambda: holding(conn), what="it holds its transaction")
            await conn.execute(
                """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                   WHERE state = 'idle in transaction' AND datname = current_database()"""
            )
            assert (await cut).status_code == 503, driver
            assert (await effects(conn), await records(conn)) == ([], [])
            assert (await http.order()).status_code == 201
        assert await effects(conn) == ["tea"]


async def holding(conn: asyncpg.Connection) -> bool:
    return bool(
        await conn.fetchval(
            """SELECT EXISTS (SELECT FROM pg_stat_activity WHERE state = 'idle in transaction'
                              AND query LIKE '%counters%' AND datname = current_database())"""
        )
    )


async def test_an_endpoint_that_idles_is_ended(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 12: a holder that is gone without a word holds the key no longer than `idle`."""
    async with opened(dsn, idle=1) as (_, http):
        assert (await http.order(order={"seconds": 1.6})).status_code == 503
        assert (await effects(conn), await records(conn)) == ([], [])
        assert (await http.order()).status_code == 201


# --- the client goes ---------------------------------------------------------------------------------------


def request(port: int, body: bytes, length: int | None = None) -> bytes:
    lines = (
        "POST /orders HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Authorization: Bearer alice",
        "Idempotency-Key: k-1",
        "Content-Type: application/json",
        f"Content-Length: {length or len(body)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


def port_of(http: Client) -> int:
    assert http.base_url.port is not None
    return http.base_url.port


async def test_the_client_goes_while_its_request_runs(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 20, H7: the transaction comes to its end, and the retry is answered with it."""
    async with opened(dsn) as (_, http):
        body = json.dumps({**ORDER, "seconds": 0.3}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(http))
        writer.write(request(port_of(http), body))
        await writer.drain()
        await until(lambda: runs(conn), what="it runs")
        writer.transport.abort()
        await until(lambda: records(conn), what="the commit")
        retry = await http.order(content=body, headers={"Content-Type": "application/json"})
        assert (retry.status_code, retry.headers["idempotent-replayed"]) == (201, "true")
    assert (await runs(conn), await effects(conn)) == (["tea"], ["tea"])


async def test_the_client_goes_before_its_request_is_whole(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 20, H7: what was not sent in full is not carried out."""
    async with opened(dsn) as (_, http):
        body = json.dumps(ORDER).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(http))
        writer.write(request(port_of(http), body, length=len(body) + 10))
        await writer.drain()
        writer.transport.abort()
        await writer.wait_closed() if not writer.transport.is_closing() else None
        assert (await http.order("other")).status_code == 201
    assert (await runs(conn), len(await records(conn))) == (["tea"], 1)


async def test_a_request_is_cancelled_at_every_await(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 20, A11: a server that cancels finds the whole transaction or none of it, and its connection back."""
    app = Plain(dsn)
    await app.open()
    unstepped = exchange.uninterrupted
    cancelled = 0
    try:
        for moment in range(1, 200):
            await conn.execute("TRUNCATE effects, core.outbox, core.idempotency_records")
            answers: list[Any] = []
            call = asyncio.current_task()
            moments = 0

            def step(phase: str) -> None:
                nonlocal moments
                moments += phase == "suspended"
                if moments == moment and phase == "suspended":  # noqa: B023
                    asyncio.get_running_loop().call_soon(call.cancel)  # type: ignore[union-attr]  # noqa: B023

            monkeypatch.setattr(exchange, "uninterrupted", lambda work, step=step: unstepped(stepped(work, step)))
            call = asyncio.create_task(stepped(app(*asgi(answers)), step))
            try:
                await call
            except asyncio.CancelledError:
                cancelled += 1
            whole = await settled(conn)
            assert app.pool.get_idle_size() == app.pool.get_size(), f"moment {moment}: a connection is missing"
            assert whole == 1 or not answers, f"moment {moment}: answered without a commit"
            if moments < moment:
                break
            monkeypatch.setattr(exchange, "uninterrupted", unstepped)
            await app(*asgi(answers := []))
            assert answers[0]["status"] == 201
            assert await settled(conn) == 1, f"moment {moment}"
        assert cancelled >= 5
        assert moments >= 8
    finally:
        await app.pool.close()


def asgi(answers: list[Any]) -> tuple[Any, Any, Any]:
    """A request as a server would bring it, and a place for the answer."""
    headers = [
        (b"authorization", b"Bearer alice"),
        (b"idempotency-key", b"k-1"),
        (b"content-type", b"application/json"),
    ]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/orders",
        "raw_path": b"/orders",
        "query_string": b"",
        "headers": headers,
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(ORDER).encode()}

    async def send(message: Any) -> None:
        answers.append(message)

    return scope, receive, send
