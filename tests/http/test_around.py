"""The middleware around a whole application, whose own error pages come between: rows 10 and 16 of the contract."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from holdfast.idempotency import exchange_of
from tests.http.plain import Plain
from tests.http.support import Client, names, problem, records, runs, served

pytestmark = [pytest.mark.http_contract, pytest.mark.newest_postgres]


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
