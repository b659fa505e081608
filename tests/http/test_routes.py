"""FastAPI's side of the contract: what is refused before the first request, and what OpenAPI shows (row 19)."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import asyncpg
import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Request, Response, WebSocket
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware

from holdfast.errors import ConfigurationError
from holdfast.idempotency import IdempotencySettings, exchange_of
from holdfast.integrations.fastapi import Idempotency, IdempotentRoute
from tests.http.plain import Plain
from tests.http.shop import SECRET, Shop
from tests.http.support import effects, opened, problem, records, served


async def anybody() -> str:
    return "anybody"


def idempotency(connect: Callable[[], Any] = lambda: None, **options: Any) -> Idempotency:
    return Idempotency(connect, {1: SECRET}, scope=anybody, **options)


async def generator(tx: Any) -> AsyncIterator[int]:
    yield 1


def sync_generator(tx: Any) -> Iterator[int]:
    yield 1


async def streaming(tx: Any) -> StreamingResponse:
    raise NotImplementedError


async def file(tx: Any) -> FileResponse:
    raise NotImplementedError


async def whole(tx: Any) -> dict[str, str]:
    raise NotImplementedError


def depending(endpoint: Callable[..., Any], on: Any) -> Callable[..., Any]:
    endpoint.__annotations__["tx"] = Annotated[Any, Depends(on)]
    return endpoint


@pytest.mark.parametrize("endpoint", [generator, sync_generator, streaming, file])
def test_a_stream_is_refused_when_it_is_declared(endpoint: Callable[..., Any]) -> None:
    """Row 19, H8: server-sent events, JSON lines, streams and files, by the endpoint or by its annotation."""
    app, idem = FastAPI(), idempotency()
    idem.install(app)
    with pytest.raises(ConfigurationError, match="/stream"):
        app.post("/stream")(depending(endpoint, idem.required))


@pytest.mark.parametrize("response_class", [StreamingResponse, FileResponse])
def test_a_stream_by_its_response_class(response_class: type[Response]) -> None:
    """Row 19: the same, said to the route."""
    app, idem = FastAPI(), idempotency()
    idem.install(app)
    with pytest.raises(ConfigurationError, match="/stream"):
        app.post("/stream", response_class=response_class)(depending(whole, idem.optional))


def test_a_method_without_idempotency_is_refused() -> None:
    """Rows 1 and 19: GET has none."""
    app, idem = FastAPI(), idempotency()
    idem.install(app)
    for methods in (["GET"], ["POST", "PUT"]):
        with pytest.raises(ConfigurationError, match="methods"):
            app.api_route("/orders", methods=methods)(depending(whole, idem.required))


async def test_an_application_with_a_wrong_route_does_not_start() -> None:
    """Row 19: a websocket, and a router that would not take the key, are found at the start and not by a client."""
    idem = idempotency()
    router = APIRouter()
    router.post("/orders")(depending(whole, idem.required))
    app = FastAPI()
    idem.install(app)
    app.include_router(router)
    with pytest.raises(NotStarted, match="IdempotentRoute"):
        await lifespan(app)

    app = FastAPI()
    idem.install(app)

    @app.websocket("/live")
    async def live(websocket: WebSocket, tx: Annotated[Any, Depends(idem.required)]) -> None: ...

    with pytest.raises(NotStarted, match="websocket"):
        await lifespan(app)


@pytest.mark.parametrize("route_class", [APIRoute, IdempotentRoute])
@pytest.mark.parametrize("where", ["include", "nested", "router", "app", "route"])
async def test_a_transaction_for_a_whole_router(
    dsn: str, conn: asyncpg.Connection, where: str, route_class: type[APIRoute]
) -> None:
    """Row 19: declared for many endpoints at once, it is a transaction for each of them, or refused at the start."""
    everything = Everything(dsn)
    depends = [Depends(everything.idem.required)]
    if where == "app":
        everything.app.router.dependencies.extend(depends)
    inner = APIRouter(route_class=route_class, dependencies=depends if where == "router" else None)

    @inner.post("/orders", status_code=201, dependencies=depends if where == "route" else None)
    async def place(request: Request) -> dict[str, str]:
        return {"placed": str(len(await records(conn)))}

    outer = APIRouter(route_class=route_class)
    outer.include_router(inner, dependencies=depends if where == "nested" else None)
    everything.app.include_router(outer, dependencies=depends if where == "include" else None)
    try:
        await lifespan(everything.app)
    except NotStarted as refused:
        assert "/orders" in str(refused)
        # Declared at once with the route, it is known in time.
        assert route_class is APIRoute or where in ("include", "nested", "app")
        return
    assert route_class is IdempotentRoute
    async with everything as app, served(app) as http:
        first, again = await http.order(), await http.order()
        assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
        assert again.headers["idempotent-replayed"] == "true"
    assert len(await records(conn)) == 1


async def test_a_wrong_route_is_never_a_success(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 19: where nothing is checked at the start, because the server knows no lifespan, the request fails."""
    everything = Everything(dsn)
    router = APIRouter()

    @router.post("/orders", status_code=201)
    async def place(tx: Annotated[asyncpg.Connection, Depends(everything.idem.required)]) -> dict[str, str]:
        await tx.execute("INSERT INTO effects (name) VALUES ('image')")
        return {"placed": "yes"}

    everything.app.include_router(router)
    async with everything as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
            assert (await http.post("/orders", headers={"Idempotency-Key": "k"})).status_code == 500
    assert await effects(conn) == []


class NotStarted(Exception):
    """What a server prints when it ends: the application answered lifespan.startup.failed."""


async def lifespan(app: FastAPI) -> None:
    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        if message["type"] == "lifespan.startup.failed":
            raise NotStarted(message["message"])

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)


class Everything:
    """An application with what people put around their endpoints."""

    def __init__(self, dsn: str, **options: Any) -> None:
        self.plain = Plain(dsn)
        self.told: list[str] = []
        self.idem = idempotency(self.plain.connect, **options)
        self.app = FastAPI(lifespan=None)
        self.idem.install(self.app)

    async def __aenter__(self) -> FastAPI:
        await self.plain.open()
        return self.app

    async def __aexit__(self, *error: object) -> None:
        await self.plain.pool.close()


async def test_a_buffered_stream_is_whole(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 19, H8: with buffered=True a stream is held back until the commit, and repeated in full."""
    everything = Everything(dsn, buffered=True, settings=IdempotencySettings(buffer_limit=5000))
    Tx = Annotated[asyncpg.Connection, Depends(everything.idem.required)]

    async def pieces(tx: asyncpg.Connection, count: int) -> AsyncIterator[bytes]:
        for n in range(count):
            # Still in the transaction: nothing of it has gone yet.
            await tx.execute("INSERT INTO effects (name) VALUES ('image')")
            yield f"{n:>99}\n".encode()

    @everything.app.post("/stream")
    async def stream(tx: Tx, count: int) -> StreamingResponse:
        return StreamingResponse(pieces(tx, count), 201)

    @everything.app.post("/events")
    async def events(tx: Tx) -> StreamingResponse:
        return StreamingResponse(pieces(tx, 1), media_type="text/event-stream")

    async with everything as app, served(app) as http:
        first, again = [await http.order("a", path="/stream?count=20") for _ in range(2)]
        assert (first.status_code, len(first.content)) == (201, 2000)
        assert again.content == first.content
        assert again.headers["idempotent-replayed"] == "true"
        assert await effects(conn) == ["image"] * 20
        # Too long to be held back, or without an end: an error, and nothing of it happened.
        assert (await http.order("b", path="/stream?count=60")).status_code == 500
        assert (await http.order("c", path="/events")).status_code == 500
    assert await effects(conn) == ["image"] * 20
    assert len(await records(conn)) == 1


PAST_SEND = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


@pytest.mark.parametrize("kind", [*PAST_SEND, "http.response.debug"])
async def test_an_answer_past_the_middleware(dsn: str, conn: asyncpg.Connection, kind: str) -> None:
    """Row 19: what a server offers besides `send` is not passed on, and who uses it anyway is not answered with a part
    of a body; hints and debugging are no part of it, and do no harm.
    """
    offered: list[set[str]] = []

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        tx = await exchange_of(scope).begin("anybody")
        offered.append({*scope["extensions"]})
        await tx.execute("INSERT INTO effects (name) VALUES ('image')")
        headers = [(b"content-length", b"5"), (b"trailer", b"x-sum")]
        await send({"type": "http.response.start", "status": 201, "headers": headers, "trailers": True})
        await send({"type": kind, "path": "/etc/hostname", "file": 0, "headers": [], "info": {}})
        if kind == "http.response.debug":
            await send({"type": "http.response.body", "body": b"whole"})

    plain = Plain(dsn, endpoint)

    async def offering(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["extensions"] = {name: {} for name in (*PAST_SEND, "tls")}
        await plain(scope, receive, send)

    async with served(offering) as http:
        answer = await http.order()
    assert offered[0] == {"tls"}
    if kind == "http.response.debug":
        assert (answer.status_code, answer.content) == (201, b"whole")
        assert len(await records(conn)) == 1
    else:
        assert answer.status_code == 500
        assert (await effects(conn), await records(conn)) == ([], [])


async def test_background_tasks_run_after_the_commit(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 19: once, not for a replay; and an error of theirs does not take back the answer."""
    everything = Everything(dsn)
    seen: list[int] = []

    @everything.app.post("/orders", status_code=201)
    async def place(
        tx: Annotated[asyncpg.Connection, Depends(everything.idem.required)], later: BackgroundTasks
    ) -> dict[str, str]:
        await tx.execute("INSERT INTO effects (name) VALUES ('image')")

        async def look() -> None:
            seen.append(await conn.fetchval("SELECT count(*) FROM core.idempotency_records WHERE status = 'Completed'"))
            raise RuntimeError("too late to matter")

        later.add_task(look)
        return {"placed": "yes"}

    async with everything as app, served(app) as http:
        for _ in range(2):
            assert (await http.order()).status_code == 201
    assert seen == [1]


async def test_among_other_middleware(dsn: str, conn: asyncpg.Connection) -> None:
    """Rows 7, 8, 11 and 13: functions around the application, inside and outside, and a compressed answer."""
    everything = Everything(dsn)
    app, seen = everything.app, []

    class Inner(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            seen.append("inner")
            response: Response = await call_next(request)
            return response

    class Outer(Inner):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            response: Response = await call_next(request)
            response.headers["X-Outer"] = "yes"
            return response

    # The one that is added last is the outermost.
    install, app.user_middleware[:] = list(app.user_middleware), []
    app.add_middleware(Inner)
    app.add_middleware(GZipMiddleware, minimum_size=10)
    app.user_middleware[:] = install + app.user_middleware
    app.add_middleware(Outer)

    @app.post("/orders", status_code=201)
    def place(order: dict[str, str], tx: Annotated[Any, Depends(everything.idem.required)]) -> dict[str, str]:
        return {"filling": "x" * 500}

    async with everything, served(app) as http:
        first, again = await http.order(), await http.order()
        assert first.json() == again.json() == {"filling": "x" * 500}
        assert first.headers["content-encoding"] == again.headers["content-encoding"] == "gzip"
        assert again.headers["idempotent-replayed"] == "true"
        assert (first.headers["x-outer"], again.headers["x-outer"]) == ("yes", "yes")
        problem(await http.order(order={"sku": "coffee"}), 409, "idempotency-key-reused")
    assert seen == ["inner"] * 3


async def test_a_router_of_its_own(dsn: str, conn: asyncpg.Connection) -> None:
    """Rows 7, 11 and 14: included with a prefix; the template with the prefix is the route."""
    everything = Everything(dsn, settings=IdempotencySettings(route_in_scope=True))
    router = APIRouter(route_class=IdempotentRoute)

    @router.post("/orders/{number}", status_code=201)
    async def place(number: int, tx: Annotated[Any, Depends(everything.idem.required)]) -> dict[str, int]:
        return {"number": number}

    everything.app.include_router(router, prefix="/v1")
    everything.app.include_router(router, prefix="/v2")
    async with everything as app, served(app) as http:
        for version in ("v1", "v2"):
            for _ in range(2):
                assert (await http.order(path=f"/{version}/orders/17")).json() == {"number": 17}
        problem(await http.order(path="/v1/orders/18"), 409, "idempotency-key-reused")
    scopes = sorted(record["scope"] for record in await records(conn))
    assert scopes == ["http:anybody POST /v1/orders/{number}", "http:anybody POST /v2/orders/{number}"]


async def test_an_endpoint_that_commits_by_itself(dsn: str, conn: asyncpg.Connection) -> None:
    """It is told so with 500, and is never carried out again (IDM-1)."""
    everything = Everything(dsn)

    @everything.app.post("/orders", status_code=201)
    async def place(tx: Annotated[asyncpg.Connection, Depends(everything.idem.required)]) -> dict[str, str]:
        await tx.execute("INSERT INTO effects (name) VALUES ('image')")
        await tx.execute("COMMIT")
        return {"placed": "yes"}

    async with everything as app, served(app) as http:
        assert (await http.order()).status_code == 500
        problem(await http.order(), 409, "response-not-replayable")
    assert await effects(conn) == ["image"]


async def test_an_endpoint_that_rolls_back_by_itself(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 8: and then refuses: its answer is kept all the same, as it is the habit with SQLAlchemy sessions."""
    async with opened(dsn, "sqlalchemy") as (shop, http):
        Tx = Annotated[Any, Depends(shop.idempotency.required)]

        @shop.app.post("/habit", status_code=201)
        async def place(tx: Tx) -> Response:
            await shop.execute(tx, "INSERT INTO effects (name) VALUES (:name)", name="image")
            await tx.rollback()
            return Response("no", 409)

        first, again = await http.order(path="/habit"), await http.order(path="/habit")
        assert (first.status_code, again.status_code, again.content) == (409, 409, b"no")
        assert again.headers["idempotent-replayed"] == "true"
    assert await effects(conn) == []


def test_openapi_shows_the_header_and_the_problems() -> None:
    """Required where it is, optional where it is, and nothing elsewhere (IDM-1)."""
    schema = Shop("postgresql://nowhere/none").app.openapi()

    def header(path: str) -> list[dict[str, Any]]:
        parameters = schema["paths"][path]["post"].get("parameters", [])
        return [each for each in parameters if each["name"] == "Idempotency-Key"]

    [required], [optional] = header("/orders"), header("/notes")
    assert (required["in"], required["required"], optional["required"]) == ("header", True, False)
    assert required["schema"] == {"type": "string", "minLength": 1, "maxLength": 255}
    assert header("/plain") == []
    responses = schema["paths"]["/orders"]["post"]["responses"]
    assert {"201", "400", "409", "413", "422", "503"} <= set(responses)
    for status in ("400", "409", "413", "503"):
        assert list(responses[status]["content"]) == ["application/problem+json"]
    assert "application/json" in responses["422"]["content"]  # FastAPI's own, for validation
    assert "409" not in schema["paths"]["/plain"]["post"]["responses"]
    assert Shop("postgresql://nowhere/none", mismatch_status=422).app.openapi()["paths"]["/orders"]["post"]


async def test_without_the_middleware_there_is_an_error() -> None:
    """Row 17: and not a request that is carried out without its key."""
    with pytest.raises(ConfigurationError, match="middleware"):
        exchange_of({"type": "http", "method": "POST"})
