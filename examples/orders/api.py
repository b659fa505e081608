"""The orders API. It stores orders; events that are recorded on them are published with them, in the transaction that
also remembers the answer, for a customer who asks again with the same Idempotency-Key.
"""

import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any
from uuid import UUID

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from examples.orders.database import connect
from examples.orders.handlers import registry
from examples.orders.model import Order, Sale
from examples.orders.telemetry import tracing
from holdfast import Publisher, Reactions
from holdfast.integrations.fastapi import Idempotency
from holdfast.integrations.sqlalchemy import DomainEvents
from holdfast.worker.supervisor import end_with_parent

publisher = Publisher(source="orders", tracing=tracing)


class NewOrder(BaseModel):
    customer: str = Field(min_length=1, max_length=200)
    total_cents: int = Field(gt=0, le=100_000_000)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    dsn = os.environ["HOLDFAST_DSN"]
    engine, sessions = connect(dsn)
    async with Reactions(dsn, registry, transactions=sessions, tracing=tracing) as reactions:
        DomainEvents(publisher, reactions).attach(sessions)
        app.state.sessions = sessions
        yield
    await engine.dispose()


def caller() -> str:
    """Whose keys they are. A shop would authenticate its customers here; this one has a single counter."""
    return "counter"


app = FastAPI(title="Orders", lifespan=lifespan)
# By it a request is recognised: with one of its own, a process does not know the requests of another.
secret = os.environ.get("ORDERS_SECRET") or secrets.token_hex(32)
idempotency = Idempotency(lambda: app.state.sessions(), secrets={1: secret}, scope=caller, tracing=tracing)
idempotency.install(app)
Session = Annotated[AsyncSession, Depends(idempotency.optional)]


@app.post("/orders", status_code=201)
async def place_order(order: NewOrder, session: Session) -> dict[str, Any]:
    placed = Order.place(order.customer, order.total_cents)
    # The order, the news of it and this answer commit together: there is never one without the others.
    session.add(placed)
    return {"order_id": str(placed.id)}


@app.get("/orders/{order_id}")
async def get_order(order_id: UUID, request: Request) -> dict[str, Any]:
    async with request.app.state.sessions() as session:
        order = await session.get(Order, order_id)
        if order is None:
            raise HTTPException(404, "there is no such order")
        entries = await session.scalar(select(func.count()).where(Sale.order_id == order_id))
    return {
        "id": order.id,
        "customer": order.customer,
        "total_cents": order.total_cents,
        "placed_at": order.placed_at,
        "ledger_entries": entries,
    }


def main(listening: int, lifeline: int) -> None:
    """Serve on a socket that the demo has opened, until the demo is gone."""
    config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=3600, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True

    end_with_parent(lifeline, stop, patience=5)
    server.run(sockets=[socket.socket(fileno=listening)])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
