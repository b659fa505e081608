"""The contract in Django, over its own threaded server: the same rows, and views in place of endpoints."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from tests.acceptance.support import until
from tests.http.shop import ISOLATION
from tests.http.support import Client, Zygote, client, effects, problem, records, reserved_port, runs

pytestmark = [pytest.mark.http_contract, pytest.mark.newest_postgres]


@asynccontextmanager
async def django(
    zygote: Zygote, dsn: str, *, count: int = 1, isolation: str = ISOLATION[0], interface: str = "wsgi", **options: Any
) -> AsyncIterator[Client]:
    with reserved_port() as port:
        wanted = {"app": "django", "port": port, "dsn": dsn, "options": [interface, isolation, options]}
        async with zygote.serving(count, **wanted), client(port) as http:
            yield http


async def test_keys_in_django(dsn: str, conn: asyncpg.Connection, zygote: Zygote) -> None:
    """Rows 1 to 6, 13 and 14, H2 to H4, H9: which requests take part, and whose keys they are."""
    async with django(zygote, dsn, REQUEST_LIMIT=1000) as http:
        assert (await http.get("/gifts", headers={"Authorization": "Bearer alice", "Idempotency-Key": "k"})).is_success
        assert (await http.order(path="/plain")).json() == {"plain": "yes"}
        problem(await http.order(None), 400, "idempotency-key-missing")
        problem(await http.order(""), 400, "idempotency-key-missing")
        for key in ("x" * 256, "two words", '"unended', "one,two"):
            problem(await http.order(key), 400, "idempotency-key-invalid")
        fields = [("Authorization", "Bearer alice"), ("Idempotency-Key", "a"), ("Idempotency-Key", "a")]
        problem(await http.post("/orders", json={"sku": "tea"}, headers=fields), 400, "idempotency-key-invalid")
        for who, status in ((None, 401), ("mallory", 403)):
            assert (await http.order(who=who)).status_code == status
        problem(await http.order(order={"filling": "x" * 1000}), 413, "request-too-large")
        assert (await runs(conn), await records(conn)) == ([], [])

        first, again, quoted = await http.order("k"), await http.order("k"), await http.order('"k"')
        assert first.status_code == 201
        assert first.content == again.content == quoted.content
        assert (first.headers["idempotency-key"], quoted.headers["idempotency-key"]) == ("k", '"k"')
        for who, status in ((None, 401), ("mallory", 403)):
            assert (await http.order("k", who=who)).status_code == status
        problem(await http.order("k", {"sku": "coffee"}), 409, "idempotency-key-reused")
        problem(await http.order("k", path="/gifts"), 409, "idempotency-key-reused")
        assert (await http.order("k", who="bob")).status_code == 201
        assert (await http.order("g", path="/gifts")).status_code == 201
        assert (await http.order("g", path="/gifts")).headers["idempotent-replayed"] == "true"
    assert await effects(conn) == ["tea"] * 3


@pytest.mark.parametrize("isolation", ISOLATION[::2], ids=lambda value: value.replace(" ", "-"))
async def test_answers_in_django(dsn: str, conn: asyncpg.Connection, zygote: Zygote, isolation: str) -> None:
    """Rows 7 to 11, 16 and 18, H5, H8: what is kept, undone, dropped and run again."""
    async with django(zygote, dsn, isolation=isolation, RESPONSE_LIMIT=2000) as http:
        first, again = await http.order("a"), await http.order("a")
        assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
        for name in ("content-type", "location", "x-request-id"):
            assert again.headers[name] == first.headers[name], name
        assert "set-cookie" in first.headers and "set-cookie" not in again.headers
        assert (again.headers["idempotent-replayed"], again.headers["cache-control"]) == ("true", "no-store")
        assert await effects(conn) == ["tea"]

        assert (await http.order("b", {"seat": "1"})).status_code == 201
        for key, order, status in (("b-1", {"status": 422}, 422), ("b-2", {"seat": "1"}, 409)):
            refused, again = await http.order(key, order), await http.order(key, order)
            assert (refused.status_code, again.status_code) == (status, status)
            assert again.headers["idempotent-replayed"] == "true"
            assert refused.content == again.content
        assert await effects(conn) == ["tea", "tea"]

        kept = len(await records(conn))
        for order in (
            {"status": 429},
            {"status": 503},
            {"error": "exception"},
            {"error": "aborted"},
            {"error": "doomed"},
        ):
            assert (await http.order("c", order)).status_code == order.get("status", 500)
        for error in ("aborted", "doomed"):
            assert (await http.order(None, {"error": error}, path="/notes")).status_code == 500
        for code in ("40001", "23505"):
            fails = f"DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '{code}'; END $$"
            before = len(await runs(conn))
            problem(await http.order("d", {"sql": fails}), 503, "idempotency-unavailable")
            assert len(await runs(conn)) == before + 4
        assert len(await records(conn)) == kept
        assert (await http.order("c")).status_code == 201

        large, not_kept = await http.order("e", {"size": 3000}), await http.order("e", {"size": 3000})
        assert len(large.json()["filling"]) == 3000
        problem(not_kept, 409, "response-not-replayable")
        assert not_kept.headers["location"] == "/orders/tea"
        assert (await http.order(None, path="/notes")).status_code == 201
    assert await effects(conn) == ["tea"] * 5


@pytest.mark.parametrize("isolation", ISOLATION, ids=lambda value: value.replace(" ", "-"))
async def test_fifty_at_once_in_django(dsn: str, conn: asyncpg.Connection, zygote: Zygote, isolation: str) -> None:
    """H1, P9: in two processes, one execution, no 5xx, and the same bytes for everybody."""
    async with django(zygote, dsn, count=2, isolation=isolation) as http:
        answers = await asyncio.gather(*(http.order(order={"seconds": 0.2}) for _ in range(50)))
    assert Counter(answer.status_code for answer in answers) == {201: 50}
    assert len({answer.content for answer in answers}) == 1
    assert (await runs(conn), await effects(conn)) == (["tea"], ["tea"])


async def test_waiting_and_dying_in_django(dsn: str, conn: asyncpg.Connection, zygote: Zygote) -> None:
    """Rows 12, 17 and 21: 409 after the wait, and a terminated backend leaves nothing behind."""
    async with django(zygote, dsn, WAIT=0.1) as http:
        first = asyncio.create_task(http.order(order={"seconds": 0.6}))
        await until(lambda: runs(conn), what="the first one runs")
        waiting = await http.order(order={"seconds": 0.6})
        problem(waiting, 409, "idempotency-in-progress")
        assert waiting.headers["retry-after"] == "1"
        assert (await first).status_code == 201

        ends = "SELECT pg_terminate_backend(pg_backend_pid())"
        assert (await http.order("b", {"sql": ends})).status_code == 503
        assert (await http.order("b")).status_code == 201
    assert await effects(conn) == ["tea"] * 2


async def test_what_django_refuses(dsn: str, conn: asyncpg.Connection, zygote: Zygote) -> None:
    """Row 19, IDM-1: a stream, and a view inside a transaction of somebody else, are errors and change nothing."""
    async with django(zygote, dsn) as http:
        assert (await http.order(path="/stream")).status_code == 500
        assert (await http.order(path="/nested")).status_code == 500
    assert (await effects(conn), await records(conn)) == ([], [])


async def test_django_under_asgi(dsn: str, conn: asyncpg.Connection, zygote: Zygote) -> None:
    """Rows 7, 10 and 11: the same middleware under uvicorn, where Django gives it a thread."""
    async with django(zygote, dsn, interface="asgi") as http:
        assert (await http.order(order={"error": "exception"})).status_code == 500
        first, again = await http.order(), await http.order()
        assert (first.status_code, again.content) == (201, first.content)
        assert again.headers["idempotent-replayed"] == "true"
    assert await effects(conn) == ["tea"]
