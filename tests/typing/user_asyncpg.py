"""An application with asyncpg: connections, and connections of a pool."""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type
from uuid import UUID

import asyncpg

from holdfast import EventEnvelope, EventPublisher, NewEvent, Publisher

publisher = Publisher("shop")


async def with_a_connection(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    async with connection.transaction():
        publishing = assert_type(
            publisher.publish(connection, "order.placed", {"n": 1}), Coroutine[Any, Any, EventEnvelope]
        )
        assert_type(await publishing, EventEnvelope)
        assert_type(await publisher.publish_event(connection, NewEvent("order.placed", {})), EventEnvelope)
        assert_type(await publisher.publish_many(connection, [NewEvent("order.placed", {})]), list[UUID])
        assert_type(await publisher.cancel(connection, "k-1"), bool)
        assert_type(await publisher.reschedule(connection, "k-1", delay=60), bool)
        bound: EventPublisher = publisher.bind(connection)
        await bound.publish(await publisher.publish(connection, "order.placed", {}))


async def with_a_pool(pool: asyncpg.Pool) -> None:
    async with pool.acquire() as connection, connection.transaction():
        assert_type(await publisher.publish(connection, "order.placed", {}), EventEnvelope)
        assert_type(await publisher.publish_many(connection, ()), list[UUID])


async def with_options(connection: asyncpg.Connection) -> None:
    await publisher.publish(
        connection,
        "order.remind",
        {},
        delay=timedelta(days=1),
        expires_at=datetime(2100, 1, 1, tzinfo=UTC),
        key="order-1",
        on_duplicate="reschedule",
        priority=2,
        headers={"tenant": "acme"},
    )
