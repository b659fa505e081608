"""Health over HTTP: /health/live and /health/ready, for the server of the worker's command and for ASGI applications.

    app.mount("/health", HealthApp(worker.health))

200 means yes and 503 no. The body is the whole health as JSON, with the reasons under `problems`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from holdfast.checks import function, takes
from holdfast.errors import ConfigurationError
from holdfast.observability.health import Health, ReadHealth, of_database, read_now
from holdfast.observability.http import JSON, Page, Request, Response

LIVE = "/health/live"
READY = "/health/ready"


def pages(read: ReadHealth, databases: Iterable[str] = ()) -> dict[str, Page]:
    """The two pages, for a `Site`. `read` is called with each request, in the thread of the server.

    Where a worker serves several databases, /health/ready/NAME is the readiness of one.
    """

    async def live(_request: Request) -> Response:
        health = await read_now(read)
        return response(health, health.live)

    async def ready(_request: Request) -> Response:
        health = await read_now(read)
        return response(health, health.ready)

    def ready_for(database: str) -> Page:
        async def page(_request: Request) -> Response:
            health = of_database(await read_now(read), database)
            return response(health, health.ready)

        return page

    return {LIVE: live, READY: ready} | {f"{READY}/{database}": ready_for(database) for database in databases}


def response(health: Health, well: bool) -> Response:
    """A response with the health as JSON: 200 if it is well, else 503."""
    status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(json.dumps(health.as_data()) + "\n", status, JSON)


class HealthApp:
    """An ASGI application with the pages `live` and `ready`, to be mounted in the service that a worker is a part of.

    It answers on the event loop that it is mounted on: if that is also the worker's, a probe that gets no answer in
    time says that the loop is blocked.
    """

    def __init__(self, read: ReadHealth) -> None:
        remedy = "pass the method health itself: HealthApp(worker.health)"
        function("read", read, remedy)
        if not takes(read, 0):
            raise ConfigurationError("read", "takes an argument", remedy)
        self._pages = {path.rpartition("/")[2]: page for path, page in pages(read).items()}

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan":  # it is run by itself, not mounted
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] != "http":
            raise ValueError(f"holdfast's health does not answer {scope['type']}")
        page = self._pages.get(scope["path"].rpartition("/")[2])
        if scope["method"] not in ("GET", "HEAD"):
            found = Response("only GET is supported\n", HTTPStatus.METHOD_NOT_ALLOWED)
        elif page is None:
            found = Response(f"there is {' and '.join(self._pages)}\n", HTTPStatus.NOT_FOUND)
        else:
            found = await page(Request(scope["path"]))
        body = found.body.encode("utf-8", "backslashreplace")
        headers = {"content-type": found.content_type, "content-length": str(len(body)), "cache-control": "no-store"}
        if found.status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers["allow"] = "GET, HEAD"
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": found.status.value, "headers": encoded})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
