"""A worker beside a FastAPI application, served by a real uvicorn (LSN-4, LSN-5)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request

from holdfast import EventEnvelope, HandlerRegistry, Publisher, Worker, WorkerSettings
from holdfast.errors import SchemaMismatch
from holdfast.integrations.fastapi import worker_lifespan
from tests.worker.support import until


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """The application on a free port, shut down in order at the end."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await until(lambda: server.started or serving.done(), what="uvicorn started")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}") as client:
            yield client
    finally:
        server.should_exit = True
        await serving
        listening.close()


async def test_a_worker_runs_beside_the_application_and_stops_with_it(dsn: str, conn: asyncpg.Connection) -> None:
    """Inside the application's own lifespan, and a running handler is allowed to finish (LSN-4)."""
    story: list[str] = []
    registry = HandlerRegistry()
    running = asyncio.Event()

    @registry.handler("order.placed", name="billing.charge_card")
    async def charge_card(event: EventEnvelope) -> None:
        running.set()
        await asyncio.sleep(0.3)
        story.append(f"handled {event.payload['order']}")

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        async with asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool:
            story.append("opened")
            yield {"pool": pool}
            story.append("closed")

    def make() -> Worker:
        return Worker(dsn, registry, WorkerSettings(name="beside"))

    app = FastAPI(lifespan=worker_lifespan(make, own))
    publisher = Publisher("shop")

    @app.post("/orders/{number}", status_code=201)
    async def place(number: int, request: Request) -> None:
        async with request.state.pool.acquire() as tx, tx.transaction():
            await publisher.publish(tx, "order.placed", {"order": number})

    async with served(app) as client:
        assert (await client.post("/orders/17")).status_code == 201
        await until(running.is_set, what="the handler runs")
    assert story == ["opened", "handled 17", "closed"]
    row = await conn.fetchrow("SELECT status, attempts FROM core.outbox")
    assert tuple(row) == ("delivered", 1)
    assert await conn.fetchval("SELECT stopped_at IS NOT NULL FROM core.workers WHERE name = 'beside'")

    # Once more with the same application: a new worker each time.
    async with served(app) as client:
        assert (await client.post("/orders/18")).status_code == 201
        await until(lambda: conn.fetchval("SELECT count(*) = 2 FROM core.event_handled"), what="handled")


async def test_an_application_does_not_start_on_a_schema_of_another_version(empty_dsn: str) -> None:
    """It says so at its start, not with the first event (OBX-3)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge_card")
    async def charge_card(event: EventEnvelope) -> None: ...

    lifespan = worker_lifespan(lambda: Worker(empty_dsn, registry))
    with pytest.raises(SchemaMismatch):
        async with lifespan(FastAPI()):
            pass
