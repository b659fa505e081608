"""Requests that commit: one endpoint, with the idempotency of Holdfast and without, served by uvicorn.

The server is a process of its own; the clients are keep-alive connections that send one request after the other, each
with a key of its own.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import asyncpg
import uvicorn
from fastapi import Depends, FastAPI, Header
from pydantic import BaseModel

from benchmarks.counters import difference, snapshot
from benchmarks.systems.harness import ORDERS, check, settle
from benchmarks.systems.process import DSN_VARIABLE, database_of
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE, PAYLOAD, quantile
from holdfast import Publisher
from holdfast.integrations.fastapi import Idempotency

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 200
BODY = b'{"customer": "ada", "total_cents": 4200, "note": "leave it at the door", "skus": ["tea", "milk", "salt"]}'
CUSTOMER = "SELECT discount FROM customers WHERE name = $1"
BUSINESS = "INSERT INTO orders (note) VALUES ($1) RETURNING id"
LINES = "INSERT INTO order_lines (order_id, sku, cents) SELECT $1, sku, $3 FROM unnest($2::text[]) sku"
TABLES = """
CREATE TABLE customers (name text PRIMARY KEY, discount int NOT NULL);
INSERT INTO customers SELECT CASE n WHEN 1 THEN 'ada' ELSE 'customer ' || n END, 10 FROM generate_series(1, 1000) n;
CREATE TABLE order_lines (order_id bigint, sku text, cents int, PRIMARY KEY (order_id, sku));
"""


class Order(BaseModel):
    customer: str
    total_cents: int
    note: str
    skus: list[str]


async def tenant(authorization: Annotated[str, Header()]) -> str:
    return authorization.removeprefix("Bearer ")


def application(dsn: str, idempotent: bool, bare: bool = False) -> FastAPI:
    publisher, pools = Publisher("shop"), []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with asyncpg.create_pool(dsn, min_size=8, max_size=8) as pool:
            pools.append(pool)
            yield

    app = FastAPI(lifespan=lifespan)

    async def place(tx: Any, order: Order) -> dict[str, Any]:
        discount = 0 if bare else await tx.fetchval(CUSTOMER, order.customer)
        number = await tx.fetchval(BUSINESS, order.note)
        if not bare:
            await tx.execute(LINES, number, order.skus, order.total_cents * (100 - discount) // 100)
        await publisher.publish(tx, EVENT_TYPE, PAYLOAD)
        return {"order": number, "customer": order.customer}

    async def transaction(who: Annotated[str, Depends(tenant)]) -> AsyncIterator[Any]:
        async with pools[0].acquire() as tx, tx.transaction():
            yield tx

    if idempotent:
        idempotency = Idempotency(lambda: pools[0].acquire(), {1: "a secret of the benchmark"}, scope=tenant)
        idempotency.install(app)
        dependency = Depends(idempotency.required)
    else:
        # As FastAPI recommends it: committed when the endpoint has returned, before the response goes.
        dependency = Depends(transaction, scope="function")

    @app.post("/orders", status_code=201)
    async def place_order(order: Order, tx: Annotated[Any, dependency]) -> dict[str, Any]:
        return await place(tx, order)

    return app


async def measure(options: argparse.Namespace, idempotent: bool) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=0)
    await observer.execute(ORDERS + ";" + TABLES)
    keys = (b"%d-%d" % (time.time_ns(), n) for n in count())
    with serving(options, idempotent) as (port, pid):
        clients = [await connect(port) for _ in range(options.connections)]
        waits: list[float] = []

        async def ask(client: tuple[asyncio.StreamReader, asyncio.StreamWriter], until: float, most: int) -> None:
            reader, writer = client
            for _ in range(most):
                began = time.perf_counter()
                if began > until:
                    return
                writer.write(request(next(keys)))
                await answer(reader)
                waits.append(time.perf_counter() - began)

        async def everybody(seconds: float, most: int) -> None:
            until = time.perf_counter() + seconds
            await asyncio.gather(*(ask(client, until, most) for client in clients))

        await everybody(30, WARM_UP // options.connections)
        before_orders, _ = await observer.fetchval("SELECT count(*) FROM orders"), waits.clear()
        await settle(observer)
        database, spent = database_of(options.dsn), cpu(pid)
        before = await snapshot(observer, database)
        await everybody(options.seconds, 10**9)
        after = await snapshot(observer, database)
        spent = cpu(pid) - spent
        for _, writer in clients:
            writer.close()
    check("orders", await observer.fetchval("SELECT count(*) FROM orders") - before_orders, len(waits))
    result = await difference(observer, before, after, len(waits))
    await observer.close()
    return result | {
        "python_us": round(spent * 1e6 / len(waits), 1),  # the server's; what the clients need is not its cost
        "p50_ms": round(quantile(waits, 0.5) * 1e3, 2),
        "p99_ms": round(quantile(waits, 0.99) * 1e3, 2),
    }


def request(key: bytes) -> bytes:
    return (
        b"POST /orders HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer acme\r\nContent-Type: application/json\r\n"
        b"Idempotency-Key: %b\r\nContent-Length: %d\r\n\r\n%b" % (key, len(BODY), BODY)
    )


async def answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 201 "):
        raise SystemExit(f"the server answered {head.splitlines()[0].decode()}")
    (length,) = (line.partition(b":")[2] for line in head.lower().splitlines() if line.startswith(b"content-length:"))
    await reader.readexactly(int(length))


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(600):
        with contextlib.suppress(OSError):
            return await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.05)
    raise SystemExit("the server did not start")


@contextlib.contextmanager
def serving(options: argparse.Namespace, idempotent: bool) -> Any:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        flags = [str(int(flag)) for flag in (idempotent, options.bare)]
        command = [sys.executable, "-m", "benchmarks.systems.requests", str(listening.fileno()), *flags]
        environment = os.environ | {DSN_VARIABLE: options.dsn}
        server = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[listening.fileno()])
        try:
            yield listening.getsockname()[1], server.pid
        finally:
            server.terminate()
            server.wait()


def cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(listening: int, idempotent: bool, bare: bool) -> None:
    app = application(os.environ[DSN_VARIABLE], idempotent, bare)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    server.run(sockets=[socket.socket(fileno=listening)])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3] == "1")
