"""Clients that send their bodies slowly keep no connection from others (SEC-1, HTTP)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import asyncpg
import pytest
from fastapi import Depends, FastAPI, Request

from holdfast.idempotency import IdempotencyMiddleware, IdempotencySettings, exchange_of
from holdfast.integrations.fastapi import Idempotency
from tests.http.shop import SECRET

pytestmark = pytest.mark.trust

POOL = 2


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[asyncpg.Pool]:
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=POOL)
    yield pool
    pool.terminate()


def plain(pool: asyncpg.Pool, settings: IdempotencySettings) -> Any:
    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        await exchange_of(scope).begin("tenant", required=False)
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": str(size).encode()})

    return IdempotencyMiddleware(endpoint, pool.acquire, {1: SECRET}, settings)


def fastapi(pool: asyncpg.Pool, settings: IdempotencySettings) -> Any:
    app = FastAPI()
    idempotency = Idempotency(pool.acquire, {1: SECRET}, scope=lambda: "tenant", settings=settings)
    idempotency.install(app)

    @app.post("/", status_code=201)
    async def endpoint(request: Request, tx: Annotated[Any, Depends(idempotency.optional)]) -> int:
        return len(await request.body())

    return app


class Upload:
    """A request whose body arrives in two parts, the second when it is released."""

    def __init__(self, app: Any, key: str | None, parts: tuple[bytes, bytes] = (b" ", b" ")) -> None:
        self.release = asyncio.Event()
        self.asked = asyncio.Event()
        self.messages: list[Any] = []
        self._parts = list(parts)
        headers = [(b"content-type", b"text/plain"), (b"host", b"shop")]
        headers += [] if key is None else [(b"idempotency-key", key.encode())]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": "/",
            "raw_path": b"/", "root_path": "", "query_string": b"", "scheme": "http", "headers": headers,
            "client": ("192.0.2.1", 1), "server": ("shop", 80),
        }  # fmt: skip
        self.running = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if len(self._parts) == 1:
            self.asked.set()
            await self.release.wait()
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)

    async def answer(self) -> tuple[int, bytes]:
        await asyncio.wait_for(self.running, 5)
        return self.messages[0]["status"], b"".join(each.get("body", b"") for each in self.messages)


over_applications = pytest.mark.parametrize("make", [plain, fastapi])


@over_applications
@pytest.mark.parametrize("keyed", [True, False])
async def test_a_slow_body_holds_no_connection(pool: asyncpg.Pool, make: Any, keyed: bool) -> None:
    app = make(pool, IdempotencySettings(connect_within=2))
    slow = [Upload(app, f"slow-{n}" if keyed else None) for n in range(2 * POOL)]
    for each in slow:
        await asyncio.wait_for(each.asked.wait(), 5)
    honest = Upload(app, "honest")
    honest.release.set()
    assert await honest.answer() == (201, b"2")
    assert pool.get_idle_size() == pool.get_size(), "no connection is in use"
    for each in slow:
        each.release.set()
    assert {await each.answer() for each in slow} == {(201, b"2")}


@over_applications
async def test_a_body_must_arrive_in_time(pool: asyncpg.Pool, make: Any) -> None:
    slow = Upload(make(pool, IdempotencySettings(receive_within=0.2)), "slow")
    status, body = await slow.answer()
    assert (status, b"request-too-slow" in body) == (408, True)


@over_applications
async def test_a_large_body_without_a_key_is_read_whole(pool: asyncpg.Pool, make: Any) -> None:
    """What was received before the transaction is not lost when it is more than is kept."""
    upload = Upload(make(pool, IdempotencySettings(request_limit=10)), None, (b"x" * 100, b"y" * 50))
    upload.release.set()
    assert await upload.answer() == (201, b"150")
