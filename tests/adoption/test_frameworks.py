"""Applications of web frameworks, made from the pages of docs/frameworks in an empty folder by their own commands.

They run in environments that have what the page says to install, and nothing else.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import asyncpg
import fastapi.testclient
import litestar.testing
import pytest
from litestar.di import NamedDependency, Provide

from holdfast import Publisher
from holdfast.errors import ConfigurationError
from holdfast.integrations.asgi import RequestTransaction
from holdfast.integrations.asgi import transaction_per_request as for_asgi
from holdfast.integrations.fastapi import transaction_per_request as for_fastapi
from tests.adoption.bare import Installed
from tests.docs.support import ROOT, blocks

pytestmark = pytest.mark.timeout(300)

FOLDER = ROOT / "docs" / "frameworks"
# What the commands of each page print.
PRINTED = {
    "django": "{'1': True}",
    "fastapi": "{'1': True}",
    "flask": "{'1': True}",
    "litestar": "{'1': True}",
    "starlette": "{'1': True}",
}


def saved(page: Path, folder: Path) -> None:
    """Save what the page says to save."""
    for block in blocks("python", pages=[page]):
        assert block.file is not None, block.name
        path = folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)


def run(page: Path, dsn: str, folder: Path, installed: Installed) -> str:
    """Save what the page says to save, run its commands where it says to install, and return what they print."""
    saved(page, folder)
    [commands] = blocks("sh", pages=[page])
    done = subprocess.run(
        ["/bin/sh", "-e"],
        input=commands.text,
        cwd=folder,
        env={**installed(page), "HOLDFAST_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_page_has_its_test() -> None:
    elsewhere = {"faststream"}  # tests/adoption/test_faststream.py
    assert {*PRINTED, *elsewhere} == {page.stem for page in FOLDER.glob("*.md")}


@pytest.mark.slow
@pytest.mark.nightly("application of a page")
@pytest.mark.parametrize("name", sorted(PRINTED))
async def test_the_application_of_a_page(name: str, empty_dsn: str, tmp_path: Path, installed: Installed) -> None:
    """An event exists if and only if its request has committed, and is handled once (PUB-1)."""
    printed = run(FOLDER / f"{name}.md", empty_dsn, tmp_path, installed).splitlines()
    assert PRINTED[name] in printed
    assert name != "django" or "Found 2 test(s)." in printed
    connection = await asyncpg.connect(empty_dsn)
    rows = await connection.fetch("SELECT payload->>'order_id', handler_name, status FROM core.outbox")
    await connection.close()
    assert [tuple(row) for row in rows] == [("1", "mail.confirm", "delivered")]


def fastapi_application(events: Any, lifespan: Any) -> Any:
    app = fastapi.FastAPI(lifespan=lifespan)

    @app.post("/", status_code=201)
    async def place(events: Annotated[RequestTransaction, events]) -> None:
        await place_twice(events)

    return fastapi.testclient.TestClient(app, raise_server_exceptions=False)


def litestar_application(events: Any, lifespan: Any) -> Any:
    @litestar.post("/", dependencies={"events": Provide(events)})
    async def place(events: NamedDependency[RequestTransaction]) -> None:
        await place_twice(events)

    return litestar.testing.TestClient(litestar.Litestar([place], lifespan=[lifespan]), raise_server_exceptions=False)


async def place_twice(events: RequestTransaction) -> None:
    await events.tx.execute("INSERT INTO orders VALUES (1), (1)")
    await events.publish("order.placed", {"order_id": 1})


@pytest.mark.parametrize(
    ("per_request", "application"),
    [(for_fastapi, fastapi_application), (for_asgi, litestar_application)],
    ids=["fastapi", "litestar"],
)
async def test_a_commit_that_fails_is_no_success(
    per_request: Any, application: Any, dsn: str, conn: asyncpg.Connection
) -> None:
    """The response is sent after the commit, so that a client is never told of an order that is not there (PUB-1)."""
    await conn.execute("CREATE TABLE orders (id bigint, UNIQUE (id) DEFERRABLE INITIALLY DEFERRED)")
    held: dict[str, Any] = {}

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as held["pool"]:
            yield

    events = per_request(Publisher("shop"), lambda: held["pool"].acquire())

    def post() -> int:
        with application(events, lifespan) as client:
            return int(client.post("/").status_code)

    assert await asyncio.to_thread(post) == 500
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 0


async def test_an_endpoint_that_goes_on_after_a_failed_statement_is_no_success(
    dsn: str, conn: asyncpg.Connection
) -> None:
    """Postgres answers such a COMMIT with a rollback, and no error (PUB-1)."""
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        request = for_asgi(Publisher("shop"), pool.acquire)()
        events = await anext(request)
        await events.publish("order.placed", {})
        with pytest.raises(asyncpg.UndefinedTableError):
            await events.tx.execute("SELECT FROM nothing")
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await anext(request, None)


async def test_a_publish_after_the_endpoint_is_refused(dsn: str, conn: asyncpg.Connection) -> None:
    """A streamed body or a background task would write to a transaction of the next request (PUB-1)."""
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        request = for_asgi(Publisher("shop"), pool.acquire)()
        events = await anext(request)
        await events.publish("order.placed", {})
        assert await anext(request, None) is None
        with pytest.raises(ConfigurationError, match="after the transaction of the request has ended"):
            await events.publish("order.placed", {})
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 1


def test_what_makes_no_dependency_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="publisher is str, not Publisher"):
        for_asgi("shop", print)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="connect is NoneType, not a function"):
        for_fastapi(Publisher("shop"), None)  # type: ignore[arg-type]
