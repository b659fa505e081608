"""An application with event classes, lifespans and middleware."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, ClassVar, assert_type
from uuid import UUID

import asyncpg
import psycopg
from pydantic import BaseModel
from sqlalchemy.orm import Session

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, NewEvent, Publisher
from holdfast.domain_events import RecordsEvents
from holdfast.middleware import CallNext
from holdfast.outcome import Outcome

publisher = Publisher("shop")


class OrderPlaced(BaseModel):
    event_type: ClassVar[str] = "order.placed"

    order_id: UUID
    total: Decimal


@dataclass(frozen=True)
class OrderShipped:
    event_type: ClassVar[str] = "order.shipped"

    order_id: UUID


@dataclass
class Untyped:
    order_id: UUID


@dataclass
class Resources:
    rate: Decimal


@asynccontextmanager
async def resources() -> AsyncGenerator[Resources, None]:
    yield Resources(Decimal("0.19"))


async def timing(event: EventEnvelope, context: HandlerContext, call_next: CallNext) -> Outcome:
    return await call_next(event)


registry = HandlerRegistry(lifespan=resources, middleware=[timing])


@registry.handler(OrderPlaced, name="billing.charge")
async def charge(event: EventEnvelope[OrderPlaced], state: Resources) -> None:
    assert_type(event.payload, OrderPlaced)
    assert_type(event.payload.total, Decimal)
    assert_type(event.event_id, UUID)
    assert_type(state.rate, Decimal)
    event.payload.totl  # mistake  # noqa: B018


@registry.handler(OrderShipped, "order.sent", name="billing.note")
def note(event: EventEnvelope[OrderShipped]) -> None:
    assert_type(event.payload, OrderShipped)


@registry.handler("order.*", name="billing.all")
async def everything(event: EventEnvelope) -> None:
    assert_type(event.payload, dict[str, Any])


async def publishing(connection: asyncpg.Connection, blocking: psycopg.Connection[Any], session: Session) -> None:
    placed, shipped = OrderPlaced(order_id=UUID(int=1), total=Decimal(1)), OrderShipped(UUID(int=1))
    awaited = assert_type(publisher.publish(connection, placed), Coroutine[Any, Any, EventEnvelope])
    assert_type(await awaited, EventEnvelope)
    assert_type(await publisher.publish(connection, shipped, delay=60), EventEnvelope)
    assert_type(publisher.publish(blocking, placed), EventEnvelope)
    assert_type(publisher.publish(session, shipped, priority=0), EventEnvelope)
    assert_type(await publisher.publish(connection, "order.placed", placed), EventEnvelope)
    assert_type(publisher.publish(session, "order.shipped", shipped), EventEnvelope)
    assert_type(await publisher.publish_many(connection, [placed, NewEvent.of(shipped)]), list[UUID])
    await publisher.publish(connection, "order.placed", {"at": datetime.now(UTC), "total": Decimal(1)})
    assert_type(await publisher.publish_alone(connection, placed), EventEnvelope)
    assert_type(publisher.publish_alone(blocking, "order.placed", {}, priority=0), EventEnvelope)
    NewEvent("order.placed", placed)
    RecordsEvents().record(placed)
    RecordsEvents().record(lambda: shipped)


async def alone(pool: asyncpg.Pool) -> None:
    assert_type(await publisher.publish_alone(pool, OrderShipped(UUID(int=1))), EventEnvelope)
    publisher.publish_alone(pool, "order.placed", {})  # mistake
    await publisher.publish_alone("dsn", "order.placed", {})  # mistake


async def mistakes(connection: asyncpg.Connection, session: Session) -> None:
    untyped = Untyped(UUID(int=1))
    await publisher.publish(connection, untyped)  # mistake
    publisher.publish(session, untyped)  # mistake
    await publisher.publish(connection, OrderShipped(UUID(int=1)), dealy=60)  # mistake
    publisher.publish(connection, OrderShipped(UUID(int=1)))  # mistake
    await publisher.publish(connection, "order.placed")  # mistake
    NewEvent.of(untyped)  # mistake
    registry.handler(Untyped, name="billing.untyped")  # mistake
    registry.handler(7, name="billing.seven")  # mistake
    HandlerRegistry(lifespan=7)  # mistake
    HandlerRegistry(middleware=[7])  # mistake
    await publisher.publish(connection, "order.placed", 7)  # mistake
