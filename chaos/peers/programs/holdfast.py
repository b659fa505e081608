"""Holdfast: the effect is in the transaction in which the event is settled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from chaos.peers import story
from chaos.peers.story import ATTEMPTS, DSN, EFFECT, POISON_ATTEMPTS, Payload
from holdfast import EventEnvelope, HandlerRegistry, Publisher, RetryPolicy
from holdfast.postgres import migrate

registry = HandlerRegistry()
publisher = Publisher("shop")
_watches: set[asyncio.Task[None]] = set()


@registry.handler("order.placed", name="shop.order", retry=RetryPolicy(max_attempts=ATTEMPTS))
@registry.handler("order.poisoned", name="shop.poison", retry=RetryPolicy(max_attempts=POISON_ATTEMPTS))
async def order(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    async def effect(key: str) -> None:
        await tx.execute(EFFECT, key)

    await story.handle(dict(event.payload), effect, die_when_visible)


async def die_when_visible(key: str) -> None:
    """No code of a handler runs between its commit and the acknowledgement: they are one. So, at the commit."""

    async def watch() -> None:
        while not await connection.fetchval("SELECT count(*) FROM effects WHERE key = $1", key):
            await asyncio.sleep(0)
        await story.die(key)

    connection = await asyncpg.connect(DSN)
    _watches.add(asyncio.create_task(watch()))


class Transaction:
    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def business(self, key: str) -> None:
        await self._connection.execute("INSERT INTO business (key) VALUES ($1)", key)

    async def publish(self, payload: Payload) -> None:
        event_type = "order.poisoned" if payload["kind"] == "exit" else "order.placed"
        await publisher.publish(self._connection, event_type, payload, idempotency_key=payload["key"])


class Producer:
    async def connect(self) -> asyncpg.Connection:
        return await asyncpg.connect(DSN)

    @asynccontextmanager
    async def transaction(self, connection: asyncpg.Connection) -> AsyncIterator[Transaction]:
        async with connection.transaction():
            yield Transaction(connection)


async def install() -> None:
    await migrate.apply(DSN)


if __name__ == "__main__":
    story.main(install, Producer())
