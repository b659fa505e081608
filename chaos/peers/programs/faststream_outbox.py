"""faststream-outbox: with what its production checklist asks for."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from faststream import FastStream
from faststream_outbox import OutboxBroker, make_dlq_table, make_outbox_table
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from chaos.peers import story
from chaos.peers.story import ATTEMPTS, CONCURRENCY, DSN, POISON_ATTEMPTS, Effects, Payload

LEASE = 30.0
URL = DSN.replace("postgresql://", "postgresql+asyncpg://", 1)
BUSINESS = text("INSERT INTO business (key) VALUES (:key)")

metadata = MetaData()
outbox = make_outbox_table(metadata, table_name="outbox")
failed = make_dlq_table(metadata, table_name="outbox_dlq")
engine = create_async_engine(URL, pool_size=CONCURRENCY + 4)  # a connection for each handler, and one for each fetch
producers = create_async_engine(URL, poolclass=NullPool)
broker = OutboxBroker(engine, outbox_table=outbox, dlq_table=failed)
effects = Effects()


@broker.subscriber("order", max_workers=CONCURRENCY, lease_ttl_seconds=LEASE, max_deliveries=ATTEMPTS)
async def order(body: dict[str, Any]) -> None:
    await story.handle(body, effects.write)


@broker.subscriber("poison", lease_ttl_seconds=LEASE, max_deliveries=POISON_ATTEMPTS)
async def poison(body: dict[str, Any]) -> None:
    await story.handle(body, effects.write)


class Transaction:
    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def business(self, key: str) -> None:
        await self._connection.execute(BUSINESS, {"key": key})

    async def publish(self, payload: Payload) -> None:
        queue = "poison" if payload["kind"] == "exit" else "order"
        await broker.publish(payload, queue=queue, session=self._connection)


class Producer:
    async def connect(self) -> AsyncConnection:
        return await producers.connect()

    @asynccontextmanager
    async def transaction(self, connection: AsyncConnection) -> AsyncIterator[Transaction]:
        async with connection.begin():
            yield Transaction(connection)


async def install() -> None:
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()


async def work() -> None:
    await FastStream(broker).run()


if __name__ == "__main__":
    story.main(install, Producer(), work)
