"""The middleware around applications that answer for errors themselves: rows 8, 10, 16 and 20 of the contract."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from holdfast.idempotency import exchange_of
from tests.http.plain import Plain
from tests.http.support import Client, names, problem, records, runs, served


@asynccontextmanager
async def around(dsn: str, conn: asyncpg.Connection, **settings: Any) -> AsyncIterator[Client]:
    """Starlette inside: its ServerErrorMiddleware answers 500 for an exception, and raises it again."""

    async def fail(request: Request) -> Response:
        tx = await exchange_of(request.scope).begin("alice")
        await conn.execute("INSERT INTO runs (name) VALUES ('tea')")
        await tx.execute("INSERT INTO effects (name) VALUES ('image')")
        query = request.query_params
        if query.get("code") and len(await runs(conn)) <= int(query["times"]):
            await tx.execute(f"DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '{query['code']}'; END $$")
        if "broken" in query:
            raise RuntimeError("broken")
        return PlainTextResponse("on purpose", int(query.get("status", 201)))

    inner = Starlette(routes=[Route("/fail", fail, methods=["POST"])])
    async with served(Plain(dsn, inner, **settings)) as http:
        yield http


@pytest.mark.parametrize("code", ["40001", "40P01", "55P03"])
async def test_a_page_made_of_a_conflict_is_run_again(dsn: str, conn: asyncpg.Connection, code: str) -> None:
    """Row 16: the 500 was said already, and the error came after it. The client hears of neither."""
    async with around(dsn, conn) as http:
        answer = await http.order(path=f"/fail?code={code}&times=3")
        assert (answer.status_code, answer.text) == (201, "on purpose")
        again = await http.order(path=f"/fail?code={code}&times=3")
        assert (again.content, again.headers["idempotent-replayed"]) == (answer.content, "true")
    assert len(await runs(conn)) == 4
    assert await names(conn, "effects") == ["image"]


@pytest.mark.parametrize("store_5xx", [False, True], ids=["default", "store-5xx"])
async def test_a_page_made_of_a_conflict_that_does_not_pass(
    dsn: str, conn: asyncpg.Connection, store_5xx: bool
) -> None:
    """Row 16: 503 with Retry-After after three retries, and nothing is stored."""
    async with around(dsn, conn, store_5xx=store_5xx) as http:
        answer = await http.order(path="/fail?code=40001&times=99")
        problem(answer, 503, "idempotency-unavailable")
        assert answer.headers["retry-after"] == "1"
    assert (len(await runs(conn)), await names(conn, "effects"), await records(conn)) == (4, [], [])


@pytest.mark.parametrize("store_5xx", [False, True], ids=["default", "store-5xx"])
async def test_a_page_made_of_an_exception_is_not_stored(dsn: str, conn: asyncpg.Connection, store_5xx: bool) -> None:
    """Row 10: whatever the settings; a 5xx on purpose is, with store_5xx, and its work is undone."""
    async with around(dsn, conn, store_5xx=store_5xx) as http:
        for _ in range(2):
            page = await http.order("a", path="/fail?broken")
            assert (page.status_code, page.text) == (500, "Internal Server Error")
            assert "idempotent-replayed" not in page.headers
        assert (len(await runs(conn)), await names(conn, "effects"), await records(conn)) == (2, [], [])
        meant, again = [await http.order("b", path="/fail?status=503") for _ in range(2)]
        assert (meant.status_code, again.status_code, again.content) == (503, 503, meant.content)
        assert ("idempotent-replayed" in again.headers) == store_5xx
    assert (len(await runs(conn)), len(await records(conn))) == ((3, 1) if store_5xx else (4, 0))
    assert await names(conn, "effects") == []


class OneConnection(Plain):
    """Whoever uses it after its time uses that of the next request."""

    async def open(self) -> None:
        self._pool = AsyncConnectionPool(self.dsn, min_size=1, max_size=1, open=False)
        await self._pool.open()

    def connect(self) -> Any:
        return self._pool.connection()


async def answer(send: Any, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("status", [409, 201])
async def test_a_commit_that_fails_and_is_answered_for(dsn: str, conn: asyncpg.Connection, status: int) -> None:
    """Row 8: the connection is another request's by then, whose work and record stay together. A 2xx does not go."""
    await conn.execute(
        """DROP TABLE IF EXISTS children, parents;
           CREATE TABLE parents (id int PRIMARY KEY);
           CREATE TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)"""
    )
    begun, answered = asyncio.Event(), asyncio.Event()

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        tx = await exchange_of(scope).begin("alice")
        if scope["path"] == "/other":
            await tx.execute("INSERT INTO effects (name) VALUES ('image')")
            begun.set()
            await answered.wait()
            await answer(send, 201, b"other")
            return
        await tx.execute("INSERT INTO children VALUES (1)")
        try:
            await answer(send, 201, b"placed")
        except psycopg.errors.ForeignKeyViolation:
            await asyncio.wait_for(begun.wait(), 10)
            try:
                await answer(send, status, b"no such parent")
            finally:
                answered.set()

    async with served(OneConnection(dsn, endpoint)) as http:
        refused, other = await asyncio.gather(http.order("a"), http.order("b", path="/other"))
        assert (refused.status_code, other.status_code) == (409 if status == 409 else 500, 201)
        again = await http.order("b", path="/other")
        assert (again.content, again.headers["idempotent-replayed"]) == (b"other", "true")
    assert await names(conn, "effects") == ["image"]
    assert [record["key"] for record in await records(conn)] == ["b"]


async def test_a_limit_that_ends_during_the_commit(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 20: it was committed, so its own answer goes, and not the one of whoever lost patience."""
    await conn.execute(
        """CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.5); RETURN NULL; END';
           CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
               FOR EACH ROW EXECUTE FUNCTION slow()"""
    )

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        tx = await exchange_of(scope).begin("alice")
        await tx.execute("INSERT INTO effects (name) VALUES ('image')")
        try:
            async with asyncio.timeout(0.1):
                await answer(send, 201, b"placed")
        except TimeoutError:
            await answer(send, 422, b"too slow")

    async with served(OneConnection(dsn, endpoint)) as http:
        first, again = await http.order(), await http.order()
    await conn.execute("DROP FUNCTION slow CASCADE")
    assert (first.status_code, first.content) == (again.status_code, again.content) == (201, b"placed")
    assert await names(conn, "effects") == ["image"]
