"""The smallest application that takes part: no framework, one endpoint, and a way to stop it at any await."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import asyncpg

from holdfast import Publisher
from holdfast.idempotency import IdempotencyMiddleware, IdempotencySettings, exchange_of
from holdfast.telemetry import Fact
from tests.http.shop import SECRET

publisher = Publisher("shop", generation=0)  # each request sends the same statements


async def place_order(scope: Any, receive: Any, send: Any) -> None:
    """Authenticate, validate, begin, work, answer."""
    headers = dict(scope["headers"])
    who = headers.get(b"authorization", b"").removeprefix(b"Bearer ").decode()
    if not who:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body"})
        return
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message.get("body", b""), message.get("more_body", False)
    order = json.loads(body)
    tx = await exchange_of(scope).begin(who)
    number = await tx.fetchval("INSERT INTO effects (name) VALUES ($1) RETURNING id", order["sku"])
    await publisher.publish(tx, "order.placed", {"sku": order["sku"]})
    answer = json.dumps({"number": number}).encode()
    await send(
        {
            "type": "http.response.start",
            "status": 201,
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())],
        }
    )
    # In two pieces: nothing may go before the last one is there.
    await send({"type": "http.response.body", "body": answer[:3], "more_body": True})
    await send({"type": "http.response.body", "body": answer[3:]})


class Plain:
    """The application with its pool, which it opens with the server."""

    def __init__(self, dsn: str, endpoint: Any = place_order, **settings: Any) -> None:
        self.dsn = dsn
        self.facts: list[Fact] = []
        self._pool: Any = None
        self._app = IdempotencyMiddleware(
            endpoint, self.connect, {1: SECRET}, IdempotencySettings(**settings), observe=self.facts.append
        )

    def connect(self) -> Any:
        return self._pool.acquire()

    @property
    def pool(self) -> Any:
        return self._pool

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self._app(scope, receive, send)
            return
        assert scope["type"] == "lifespan"
        await receive()
        await self.open()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._pool.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(self.dsn, min_size=1, max_size=4)


class Steps:
    """Awaits a coroutine, and calls back at each of its awaits that really wait, before and after."""

    def __init__(self, work: Coroutine[Any, Any, Any], step: Callable[[str], None]) -> None:
        self._work = work
        self._step = step

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731
        while True:
            try:
                waiting = resume()
            except StopIteration as end:
                return end.value
            self._step("suspended")
            try:
                yield waiting
            except BaseException as error:
                resume = lambda error=error: self._work.throw(error)  # type: ignore[misc]  # noqa: E731
            else:
                resume = lambda: self._work.send(None)  # noqa: E731
            self._step("resumed")


async def stepped(work: Coroutine[Any, Any, Any], step: Callable[[str], None]) -> Any:
    return await Steps(work, step)
