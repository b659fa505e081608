"""One rule for every framework: an exception rolls back, and a response commits, whatever its status."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import asyncpg
import fastapi
import fastapi.responses
import fastapi.testclient
import flask
import litestar
import litestar.exceptions
import litestar.testing
import psycopg
import pytest
import starlette.applications
import starlette.exceptions
import starlette.requests
import starlette.responses
import starlette.routing
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath

from holdfast import Publisher
from holdfast.integrations import asgi
from holdfast.integrations import fastapi as for_fastapi
from holdfast.integrations.flask import TransactionPerRequest
from tests.docs.support import ROOT

PUBLISHER = Publisher("shop")
# How a request ends, the status that its client reads, and whether its event is kept.
ENDS = {
    "returned-201": (201, True),
    "returned-302": (302, True),
    "returned-409": (409, True),
    "returned-500": (500, True),
    "raised-403": (403, False),
    "raised-error": (500, False),
}
Statuses = Callable[[str], dict[str, int]]


class OutOfStock(Exception):
    """What no framework makes a response of, but for a 500."""


def status_of(end: str, refusal: Callable[[int], Exception]) -> int:
    """Return the status of the response to return, or raise."""
    how, _, what = end.partition("-")
    if how == "raised":
        raise OutOfStock if what == "error" else refusal(int(what))
    return int(what)


def posted(client: Any, **options: Any) -> dict[str, int]:
    """End a request in each way, and return the statuses."""
    return {end: client.post(f"/{end}", **options).status_code for end in ENDS}


class Pool:
    """A pool that lives as long as an application."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._pool: Any = None

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        async with asyncpg.create_pool(self._dsn, min_size=1, max_size=1) as self._pool:
            yield

    def acquire(self) -> Any:
        return self._pool.acquire()


def in_fastapi(dsn: str) -> dict[str, int]:
    pool = Pool(dsn)
    app = fastapi.FastAPI(lifespan=pool.lifespan)
    events_of_request = for_fastapi.transaction_per_request(PUBLISHER, pool.acquire)

    @app.post("/{end}")
    async def place(end: str, events: Annotated[asgi.RequestTransaction, events_of_request]) -> Any:
        await events.publish("order.placed", {"end": end})
        return fastapi.responses.JSONResponse({}, status_of(end, fastapi.HTTPException))

    with fastapi.testclient.TestClient(app, raise_server_exceptions=False, follow_redirects=False) as client:
        return posted(client)


def in_litestar(dsn: str) -> dict[str, int]:
    pool = Pool(dsn)
    events_of_request = asgi.transaction_per_request(PUBLISHER, pool.acquire)

    def refusal(status: int) -> Exception:
        return litestar.exceptions.HTTPException(status_code=status)

    @litestar.post("/{end:str}", dependencies={"events": Provide(events_of_request)})
    async def place(end: FromPath[str], events: NamedDependency[asgi.RequestTransaction]) -> litestar.Response[None]:
        await events.publish("order.placed", {"end": end})
        return litestar.Response(None, status_code=status_of(end, refusal))

    app = litestar.Litestar([place], lifespan=[pool.lifespan])
    with litestar.testing.TestClient(app, raise_server_exceptions=False) as client:
        return posted(client, follow_redirects=False)


def in_starlette(dsn: str) -> dict[str, int]:
    """Its page has no dependency: the endpoint opens the transaction."""
    pool = Pool(dsn)

    async def place(request: starlette.requests.Request) -> starlette.responses.Response:
        end = request.path_params["end"]
        async with pool.acquire() as connection, connection.transaction():
            await PUBLISHER.publish(connection, "order.placed", {"end": end})
            return starlette.responses.Response(status_code=status_of(end, starlette.exceptions.HTTPException))

    routes = [starlette.routing.Route("/{end}", place, methods=["POST"])]
    app = starlette.applications.Starlette(routes=routes, lifespan=pool.lifespan)
    with fastapi.testclient.TestClient(app, raise_server_exceptions=False, follow_redirects=False) as client:
        return posted(client)


def in_flask(dsn: str) -> dict[str, int]:
    app = flask.Flask("shop")
    events = TransactionPerRequest(PUBLISHER, lambda: psycopg.connect(dsn), app)

    def refusal(status: int) -> Exception:
        return flask.abort(status)

    @app.post("/<end>")
    def place(end: str) -> Any:
        events.publish("order.placed", {"end": end})
        return "", status_of(end, refusal)

    return posted(app.test_client())


DJANGO = """
import json, sys
import django
from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.urls import path
from holdfast import Publisher
from holdfast.postgres.addresses import readable_address
from urllib.parse import unquote, urlsplit

place = urlsplit(readable_address(sys.argv[1], "dsn"))
settings.configure(
    ROOT_URLCONF=__name__, SECRET_KEY="no", ALLOWED_HOSTS=["testserver"],
    DATABASES={"default": {
        "ENGINE": "django.db.backends.postgresql", "NAME": place.path.lstrip("/"),
        "USER": unquote(place.username or ""), "PASSWORD": unquote(place.password or ""),
        "HOST": place.hostname or "", "PORT": place.port or "",
        "ATOMIC_REQUESTS": True}},
)

class OutOfStock(Exception): ...

def view(request, end):
    Publisher("shop").publish(connection, "order.placed", {"end": end})
    how, _, what = end.partition("-")
    if how == "raised":
        raise OutOfStock if what == "error" else PermissionDenied
    return HttpResponse(status=int(what))

urlpatterns = [path("<end>", view)]
django.setup()
client = Client(raise_request_exception=False)
print(json.dumps({end: client.post(f"/{end}").status_code for end in sys.argv[2:]}))
"""


def in_django(dsn: str) -> dict[str, int]:
    """With ATOMIC_REQUESTS; in a process of its own, because settings are those of a process."""
    run = subprocess.run(
        [sys.executable, "-c", DJANGO, dsn, *ENDS], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, int] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("statuses", [in_django, in_fastapi, in_flask, in_litestar, in_starlette])
async def test_an_exception_rolls_back_and_a_response_commits(
    statuses: Statuses, dsn: str, conn: asyncpg.Connection
) -> None:
    """Whoever moves an endpoint to another framework need not ask what becomes of its events (PUB-1)."""
    assert await asyncio.to_thread(statuses, dsn) == {end: status for end, (status, _) in ENDS.items()}
    rows = await conn.fetch("SELECT payload->>'end' FROM core.outbox ORDER BY 1")
    assert [row[0] for row in rows] == sorted(end for end, (_, kept) in ENDS.items() if kept)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "frameworks").glob("*.md")), ids=lambda page: page.stem)
def test_every_page_says_when_a_request_commits(page: Path) -> None:
    if page.stem != "faststream":  # which has handlers, and no requests
        assert "**An exception rolls back, and a response commits**, whatever its status" in page.read_text()
