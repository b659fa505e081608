"""Aggregates, their events and the answer to the request in one transaction: all of it once, or none of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from examples.orders.model import Order
from holdfast import EventEnvelope, HandlerRegistry, Publisher, Reactions
from holdfast.integrations.fastapi import Idempotency
from holdfast.integrations.sqlalchemy import DomainEvents

SCHEMA = Path("examples/orders/schema.sql")


def shop(sessions: Any) -> FastAPI:
    app = FastAPI()
    idempotency = Idempotency(sessions, {1: "a secret of the tests, long enough"}, scope=lambda: "ada")
    idempotency.install(app)
    transaction = Depends(idempotency.required)

    @app.post("/orders", status_code=201)
    async def place(total: int, session: Any = transaction) -> dict[str, str]:
        placed = Order.place("Ada", total)
        session.add(placed)
        if total > 1_000:
            raise HTTPException(409, "too much")
        return {"id": str(placed.id)}

    return app


@pytest.fixture(params=["async", "sync"])
async def reacted(
    request: pytest.FixtureRequest, dsn: str, conn: asyncpg.Connection
) -> AsyncIterator[tuple[httpx.AsyncClient, list[str], Reactions]]:
    """The shop's client, and what reacted in its process."""
    await conn.execute(SCHEMA.read_text())
    registry, seen = HandlerRegistry(), []

    @registry.handler("order.placed", name="storefront.count", via="in_process")
    async def count(event: EventEnvelope) -> None:
        seen.append(event.payload["order_id"])

    engine: Any
    if request.param == "async":
        engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://"))
        sessions: Any = async_sessionmaker(engine)
    else:
        engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
        sessions = sessionmaker(engine)
    async with Reactions(dsn, registry) as reactions:
        DomainEvents(Publisher("shop"), reactions).attach(sessions)
        transport = httpx.ASGITransport(shop(sessions))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            yield client, seen, reactions
    if request.param == "async":
        await engine.dispose()
    else:
        engine.dispose()


async def counted(conn: asyncpg.Connection) -> tuple[int, int]:
    row = await conn.fetchrow("SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM core.outbox)")
    return tuple(row)


async def test_once(reacted: tuple[httpx.AsyncClient, list[str], Reactions], conn: asyncpg.Connection) -> None:
    """Asked twice, there is one order, one event, one reaction, and the same answer (IDM-1, IDM-3, PUB-4)."""
    client, seen, reactions = reacted
    first, again = [await client.post("/orders?total=7", headers={"Idempotency-Key": "k"}) for _ in range(2)]
    await reactions.drain()
    assert (first.status_code, first.json()) == (again.status_code, again.json())
    assert again.headers["Idempotent-Replayed"] == "true"
    assert seen == [first.json()["id"]]
    assert await counted(conn) == (1, 1)


async def test_a_refusal_undoes_what_was_recorded(
    reacted: tuple[httpx.AsyncClient, list[str], Reactions], conn: asyncpg.Connection
) -> None:
    """IDM-1 (row 8), PUB-4: the answer is kept; the order, its event and its reaction are not."""
    client, seen, reactions = reacted
    for replayed in (None, "true"):
        answer = await client.post("/orders?total=2000", headers={"Idempotency-Key": "k"})
        assert (answer.status_code, answer.headers.get("Idempotent-Replayed")) == (409, replayed)
    assert (await client.post("/orders?total=8", headers={"Idempotency-Key": "other"})).status_code == 201
    await reactions.drain()
    assert len(seen) == 1
    assert await counted(conn) == (1, 1)
