"""Requests that commit: one endpoint, with the idempotency of Holdfast and without, served by uvicorn.

It is written twice: with the asynchronous sessions and the mapped classes of SQLAlchemy, as most FastAPI applications
are, and with asyncpg and nothing else (`--kind asyncpg`), where what a key costs shows most. It takes an order as shops
do: the customer is looked up, the products are locked and taken from stock, order and lines are written, and an event.

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
from sqlalchemy import BigInteger, select
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from benchmarks.counters import difference, snapshot
from benchmarks.systems.harness import ORDERS, check, settle
from benchmarks.systems.process import DSN_VARIABLE, database_of
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE, PAYLOAD, quantile
from holdfast import Publisher
from holdfast.integrations.fastapi import Idempotency

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 200
CUSTOMER = "SELECT discount FROM customers WHERE name = $1"
PRODUCTS = "SELECT sku, cents FROM products WHERE sku = ANY($1::text[]) ORDER BY sku FOR UPDATE"
TAKE = "UPDATE products SET stock = stock - 1 WHERE sku = ANY($1::text[])"
ORDER = "INSERT INTO orders (note) VALUES ($1) RETURNING id"
LINES = "INSERT INTO order_lines SELECT $1, sku, cents FROM unnest($2::text[], $3::int[]) line(sku, cents)"
ON_OFFER = 3_000  # so many products that the orders of all clients are kept apart
TABLES = """
CREATE TABLE customers (name text PRIMARY KEY, discount int NOT NULL);
INSERT INTO customers SELECT CASE n WHEN 1 THEN 'ada' ELSE 'customer ' || n END, 10 FROM generate_series(1, 1000) n;
CREATE TABLE products (sku text PRIMARY KEY, cents int NOT NULL, stock int NOT NULL);
INSERT INTO products SELECT 'sku-' || n, 1000 + n, 1000000 FROM generate_series(0, 2999) n;
CREATE TABLE order_lines (order_id bigint, sku text, cents int, PRIMARY KEY (order_id, sku));
"""


class NewOrder(BaseModel):
    customer: str
    note: str
    skus: list[str]


class PlacedOrder(BaseModel):
    order: int
    customer: str
    cents: int


class Table(DeclarativeBase):
    pass


class Customer(Table):
    __tablename__ = "customers"
    name: Mapped[str] = mapped_column(primary_key=True)
    discount: Mapped[int]


class Order(Table):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    note: Mapped[str]


class Product(Table):
    __tablename__ = "products"
    sku: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int]
    stock: Mapped[int]


class Line(Table):
    __tablename__ = "order_lines"
    order_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    sku: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int]


async def tenant(authorization: Annotated[str, Header()]) -> str:
    return authorization.removeprefix("Bearer ")


class WithAsyncpg:
    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with asyncpg.create_pool(self._dsn, min_size=8, max_size=8) as self._pool:
            yield

    def connect(self) -> Any:
        return self._pool.acquire()

    async def transaction(self, who: Annotated[str, Depends(tenant)]) -> AsyncIterator[Any]:
        async with self._pool.acquire() as tx, tx.transaction():
            yield tx

    async def place(self, tx: Any, order: NewOrder) -> PlacedOrder:
        discount = await tx.fetchval(CUSTOMER, order.customer)
        products = await tx.fetch(PRODUCTS, order.skus)
        number = await tx.fetchval(ORDER, order.note)
        prices = [product["cents"] * (100 - discount) // 100 for product in products]
        await tx.execute(LINES, number, [product["sku"] for product in products], prices)
        await tx.execute(TAKE, order.skus)
        return PlacedOrder(order=number, customer=order.customer, cents=sum(prices))


class WithSqlalchemy:
    def __init__(self, dsn: str) -> None:
        engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://"), pool_size=8)
        self.connect = async_sessionmaker(engine, expire_on_commit=False)
        self._engine = engine

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        yield
        await self._engine.dispose()

    async def transaction(self, who: Annotated[str, Depends(tenant)]) -> AsyncIterator[Any]:
        async with self.connect.begin() as session:
            yield session

    async def place(self, session: Any, order: NewOrder) -> PlacedOrder:
        customer = await session.get_one(Customer, order.customer)
        wanted = select(Product).where(Product.sku.in_(order.skus)).order_by(Product.sku).with_for_update()
        products = (await session.scalars(wanted)).all()
        placed = Order(note=order.note)
        session.add(placed)
        await session.flush()
        total = 0
        for product in products:
            product.stock -= 1
            cents = product.cents * (100 - customer.discount) // 100
            session.add(Line(order_id=placed.id, sku=product.sku, cents=cents))
            total += cents
        await session.flush()
        return PlacedOrder(order=placed.id, customer=customer.name, cents=total)


def application(dsn: str, idempotent: bool, kind: str = "") -> FastAPI:
    publisher = Publisher("shop")
    shop = WithAsyncpg(dsn) if kind == "asyncpg" else WithSqlalchemy(dsn)
    app = FastAPI(lifespan=shop.lifespan)
    if idempotent:
        idempotency = Idempotency(shop.connect, {1: "a secret of the benchmark"}, scope=tenant)
        idempotency.install(app)
        dependency = Depends(idempotency.required)
    else:
        # As FastAPI recommends it: committed when the endpoint has returned, before the response goes.
        dependency = Depends(shop.transaction, scope="function")

    @app.post("/orders", status_code=201)
    async def place_order(order: NewOrder, tx: Annotated[Any, dependency]) -> PlacedOrder:
        placed = await shop.place(tx, order)
        await publisher.publish(tx, EVENT_TYPE, PAYLOAD)
        return placed

    return app


async def measure(options: argparse.Namespace, idempotent: bool) -> dict[str, Any]:
    observer = await prepare(options.dsn, due=0)
    await observer.execute(ORDERS + ";" + TABLES)
    orders = count()
    with serving(options, idempotent) as (port, pid):
        clients = [await connect(port) for _ in range(options.connections)]
        waits: list[float] = []

        async def ask(client: tuple[asyncio.StreamReader, asyncio.StreamWriter], until: float, most: int) -> None:
            reader, writer = client
            for _ in range(most):
                began = time.perf_counter()
                if began > until:
                    return
                writer.write(request(next(orders)))
                await answer(reader)
                waits.append(time.perf_counter() - began)

        async def everybody(seconds: float, most: int) -> None:
            until = time.perf_counter() + seconds
            await asyncio.gather(*(ask(client, until, most) for client in clients))

        await everybody(30, WARM_UP // options.connections)
        before_orders = await observer.fetchval("SELECT count(*) FROM orders")
        waits.clear()
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


def request(number: int) -> bytes:
    skus = ", ".join(f'"sku-{(3 * number + n) % ON_OFFER}"' for n in range(3))
    body = f'{{"customer": "ada", "note": "leave it at the door", "skus": [{skus}]}}'.encode()
    return (
        b"POST /orders HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer acme\r\nContent-Type: application/json\r\n"
        b"Idempotency-Key: %d-%d\r\nContent-Length: %d\r\n\r\n%b" % (time.time_ns(), number, len(body), body)
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
        command = [sys.executable, "-m", "benchmarks.systems.requests"]
        command += [str(listening.fileno()), str(int(idempotent)), options.kind]
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


def main(listening: int, idempotent: bool, kind: str) -> None:
    app = application(os.environ[DSN_VARIABLE], idempotent, kind)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    server.run(sockets=[socket.socket(fileno=listening)])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3])
