"""The orders API. It does its own work and publishes what happened; it knows nothing of what follows."""

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from holdfast import Publisher
from holdfast.worker.supervisor import end_with_parent

publisher = Publisher(source="orders")


class NewOrder(BaseModel):
    customer: str = Field(min_length=1, max_length=200)
    total_cents: int = Field(gt=0, le=100_000_000)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with asyncpg.create_pool(os.environ["HOLDFAST_DSN"], min_size=2, max_size=8) as pool:
        app.state.pool = pool
        yield


app = FastAPI(title="Orders", lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place_order(order: NewOrder, request: Request) -> dict[str, Any]:
    order_id = uuid4()
    async with request.app.state.pool.acquire() as connection, connection.transaction():
        await connection.execute(
            "INSERT INTO orders (id, customer, total_cents) VALUES ($1, $2, $3)",
            order_id,
            order.customer,
            order.total_cents,
        )
        # The order and the news of it commit together: there is never one without the other.
        event = {"order_id": str(order_id), "customer": order.customer, "total_cents": order.total_cents}
        await publisher.publish(connection, "order.placed", event, domain_id=order_id)
    return {"order_id": str(order_id)}


@app.get("/orders/{order_id}")
async def get_order(order_id: UUID, request: Request) -> dict[str, Any]:
    row = await request.app.state.pool.fetchrow(
        """
        SELECT id, customer, total_cents, placed_at,
               (SELECT count(*) FROM ledger WHERE order_id = orders.id) AS ledger_entries
        FROM orders WHERE id = $1
        """,
        order_id,
    )
    if row is None:
        raise HTTPException(404, "there is no such order")
    return dict(row)


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
