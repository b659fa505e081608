"""The application of the contract's tests: a small FastAPI shop, over any driver and isolation level.

What an endpoint does is said by the request, so that one application serves every row of the contract:

effects   written in the request's transaction: what the contract promises to happen once
runs      written at once on another connection: every time an endpoint was entered, whatever became of it
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import asyncpg
import psycopg_pool
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from holdfast import Publisher
from holdfast.idempotency import IdempotencySettings
from holdfast.integrations.fastapi import Idempotency
from holdfast.telemetry import Fact

SECRET = "a secret of the tests, long enough"
DRIVERS = ("asyncpg", "psycopg", "sqlalchemy", "sqlalchemy-sync")
# All that docs/http.md names. Those whose name begins with sqlalchemy connect with their first statement.
EVERY_DRIVER = (*DRIVERS, "psycopg-sync", "sqlalchemy-core", "sqlalchemy-core-begin", "sqlalchemy-core-begin-sync")
ISOLATION = ("read committed", "repeatable read", "serializable")
TABLES = """
    CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, name text NOT NULL);
    CREATE TABLE runs (id bigint GENERATED ALWAYS AS IDENTITY, name text NOT NULL);
    CREATE TABLE seats (name text PRIMARY KEY);
    CREATE TABLE counters (name text PRIMARY KEY, value int NOT NULL);
    INSERT INTO counters VALUES ('orders', 0);
"""
publisher = Publisher("shop", generation=0)  # each request sends the same statements


class Order(BaseModel):
    """What is ordered, and how it shall go."""

    sku: str = Field(min_length=1)
    seconds: float = 0  # that it takes
    status: int = 201
    error: str | None = None
    size: int = 0
    seat: str | None = None
    count: bool = False
    sql: str | None = None


class Shop:
    """The application and what it has opened."""

    def __init__(
        self,
        dsn: str,
        driver: str = "asyncpg",
        isolation: str | None = None,
        application: str = "",
        pool: int = 8,
        outside: str | None = None,
        **settings: Any,
    ) -> None:
        self.dsn, self.driver = dsn, driver
        self.synchronous = driver.endswith("-sync")
        self.application, self.pool, self._outside = application, pool, outside or dsn
        self.isolation = isolation or "read committed"
        self.facts: list[Fact] = []
        self.settings = IdempotencySettings(**settings)
        self.idempotency = Idempotency(
            self.connect,
            {1: SECRET},
            scope=tenant,
            settings=self.settings,
            observe=self.facts.append,
        )
        self._connect: Any = None
        self.app = FastAPI(lifespan=self.lifespan)
        self.app.state.shop = self
        self.idempotency.install(self.app)
        self._declare()

    def connect(self) -> Any:
        return self._connect()

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        escaped = self.isolation.replace(" ", "\\ ")
        libpq = {"options": f"-c default_transaction_isolation={escaped}", "application_name": self.application}
        settings = {"default_transaction_isolation": self.isolation, "application_name": self.application}
        size = self.pool
        self.outside = await asyncpg.create_pool(
            self._outside, min_size=0, max_size=2, server_settings={"application_name": self.application}
        )
        try:
            match self.driver:
                case "asyncpg":
                    async with asyncpg.create_pool(
                        self.dsn, min_size=0, max_size=size, server_settings=settings
                    ) as pool:
                        self._connect = pool.acquire
                        yield
                case "psycopg":
                    pool = psycopg_pool.AsyncConnectionPool(
                        self.dsn, min_size=0, max_size=size, open=False, kwargs=libpq
                    )
                    async with pool:
                        self._connect = pool.connection
                        yield
                case "psycopg-sync":
                    with psycopg_pool.ConnectionPool(
                        self.dsn, min_size=0, max_size=size, open=True, kwargs=libpq
                    ) as threads:
                        self._connect = threads.connection
                        yield
                case "sqlalchemy" | "sqlalchemy-core" | "sqlalchemy-core-begin":
                    engine = create_async_engine(
                        self.dsn.replace("postgresql://", "postgresql+asyncpg://"),
                        connect_args={"server_settings": settings},
                        pool_size=size,
                        max_overflow=0,
                    )
                    ways = {"sqlalchemy-core": engine.connect, "sqlalchemy-core-begin": engine.begin}
                    self._connect = ways.get(self.driver) or async_sessionmaker(engine)
                    yield
                    await engine.dispose()
                case "sqlalchemy-sync" | "sqlalchemy-core-begin-sync":
                    url = self.dsn.replace("postgresql://", "postgresql+psycopg://")
                    sync = create_engine(url, connect_args=libpq, pool_size=size, max_overflow=0)
                    self._connect = sessionmaker(sync) if self.driver == "sqlalchemy-sync" else sync.begin
                    yield
                    sync.dispose()
        finally:
            await self.outside.close()

    async def ran(self, name: str) -> None:
        await self.outside.execute("INSERT INTO runs (name) VALUES ($1)", name)

    async def execute(self, tx: Any, statement: str, **values: Any) -> None:
        """One statement in the transaction, whatever it is."""
        match self.driver:
            case "asyncpg":
                for n, name in enumerate(values, 1):
                    statement = statement.replace(f":{name}", f"${n}")
                await tx.execute(statement, *values.values())
            case "psycopg" | "psycopg-sync":
                for name in values:
                    statement = statement.replace(f":{name}", f"%({name})s")
                await self._called(tx.execute, statement, values)
            case _:
                await self._called(tx.execute, text(statement), values)

    async def _called(self, function: Any, *arguments: Any) -> None:
        if self.synchronous:
            await asyncio.to_thread(function, *arguments)
        else:
            await function(*arguments)

    async def place(self, tx: Any, order: Order) -> Response:
        await self.ran(order.sku)
        await self.execute(tx, "INSERT INTO effects (name) VALUES (:name)", name=order.sku)
        await self._called(publisher.publish, tx, "order.placed", {"sku": order.sku})
        if order.count:
            await self.execute(tx, "UPDATE counters SET value = value + 1 WHERE name = :name", name="orders")
        if order.seconds:
            await asyncio.sleep(order.seconds)
        if order.error == "exception":
            raise RuntimeError("the shop is broken")
        if order.error == "aborted":
            try:
                await self.execute(tx, "SELECT 1 / (1 - 1)")
            except Exception:
                return PlainTextResponse("as if nothing had happened", 201)
        if order.sql:
            await self.execute(tx, order.sql)
        if order.error and len(order.error) == 5:
            await self.execute(tx, f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{order.error}'; END $$")
        if order.seat:
            try:
                await self.execute(tx, "INSERT INTO seats VALUES (:seat)", seat=order.seat)
            except Exception:
                raise HTTPException(409, "the seat is taken") from None
        headers = {
            "Location": f"/orders/{order.sku}",
            "ETag": '"1"',
            "Link": '</terms>; rel="terms"',
            "X-Request-ID": f"request-{time.monotonic_ns()}",
            "Set-Cookie": "session=secret",
            "X-Internal": "not for replays",
            "Cache-Control": "max-age=60",
        }
        if order.status == 204:
            return Response(status_code=204, headers=headers)
        if order.status >= 400:
            raise HTTPException(order.status, "as you wished", headers={"Retry-After": "7"})
        body = {"sku": order.sku, "at": time.monotonic_ns(), "filling": "x" * order.size}
        return JSONResponse(body, order.status, headers)

    def _declare(self) -> None:
        app = self.app
        Required = Annotated[Any, Depends(self.idempotency.required)]
        Optional = Annotated[Any, Depends(self.idempotency.optional)]

        @app.post("/orders", status_code=201)
        async def place_order(order: Order, tx: Required) -> Response:
            return await self.place(tx, order)

        @app.post("/gifts", status_code=201)
        async def place_gift(order: Order, tx: Required) -> Response:
            return await self.place(tx, order)

        @app.patch("/orders/{sku}")
        async def change_order(sku: str, order: Order, tx: Required) -> Response:
            return await self.place(tx, order)

        @app.post("/notes", status_code=201)
        async def place_note(order: Order, tx: Optional) -> Response:
            return await self.place(tx, order)

        @app.post("/late-guard", dependencies=[])
        async def guarded(order: Order, tx: Required, admin: Annotated[None, Depends(only_admins)]) -> Response:
            return await self.place(tx, order)

        @app.post("/images", status_code=201)
        async def place_image(request: Request, tx: Required) -> Response:
            await self.ran("image")
            body = await request.body()
            await self.execute(tx, "INSERT INTO effects (name) VALUES (:name)", name="image")
            return Response(bytes(reversed(body)), 201, media_type="application/octet-stream")

        @app.post("/plain", status_code=201)
        async def plain() -> dict[str, str]:
            return {"plain": "yes"}

        @app.get("/orders")
        async def list_orders() -> dict[str, int]:
            return {"effects": await self.outside.fetchval("SELECT count(*) FROM effects")}


async def tenant(authorization: Annotated[str | None, Header()] = None) -> str:
    """Who is calling. `Bearer NAME` is NAME, and nobody may call himself mallory."""
    if authorization is None or not authorization.startswith("Bearer "):
        raise HTTPException(401, "who are you?", headers={"WWW-Authenticate": "Bearer"})
    name = authorization.removeprefix("Bearer ")
    if name == "mallory":
        raise HTTPException(403, "not you")
    return name


async def only_admins(x_admin: Annotated[str | None, Header()] = None) -> None:
    if x_admin is None:
        raise HTTPException(403, "admins only")
