"""Event classes are published, recorded and handled (PUB-6)."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from typing import Any, ClassVar
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
from pydantic import BaseModel, ConfigDict
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, NewEvent, Publisher, Reactions, Worker
from holdfast.domain_events import RecordsEvents
from holdfast.errors import ConfigurationError, FieldError, PayloadError
from holdfast.integrations.sqlalchemy import DomainEvents

pytestmark = pytest.mark.newcomer

PUBLISHER = Publisher("shop")


class OrderPlaced(BaseModel):
    event_type: ClassVar[str] = "order.placed"
    event_version: ClassVar[int] = 2

    order_id: UUID
    total: Decimal


@dataclasses.dataclass(frozen=True)
class OrderShipped:
    event_type: ClassVar[str] = "order.shipped"

    order_id: UUID
    weight: Decimal


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, ser_json_bytes="base64", val_json_bytes="base64")
    event_type: ClassVar[str] = "strict.thing"

    order_id: UUID
    total: Decimal
    raw: bytes


PLACED = OrderPlaced(order_id=uuid4(), total=Decimal("9.90"))
SHIPPED = OrderShipped(uuid4(), Decimal("1.50"))


async def stored(conn: asyncpg.Connection) -> list[tuple[str, int, Any]]:
    rows = await conn.fetch("SELECT event_type, event_version, payload FROM core.outbox ORDER BY seq")
    return [(row[0], row[1], json.loads(row[2])) for row in rows]


async def test_every_way_to_publish_takes_an_event_object(conn: asyncpg.Connection, dsn: str) -> None:
    """With every driver, with options, many at once, and recorded on an aggregate (PUB-6)."""
    placed = ("order.placed", 2, {"order_id": str(PLACED.order_id), "total": "9.90"})
    shipped = ("order.shipped", 1, {"order_id": str(SHIPPED.order_id), "weight": "1.50"})
    async with conn.transaction():
        envelope = await PUBLISHER.publish(conn, PLACED)
        assert envelope.payload == placed[2] and envelope.event_version == 2
        await PUBLISHER.publish(conn, SHIPPED, priority=0)
        await PUBLISHER.publish(conn, "order.placed", PLACED)
        await PUBLISHER.publish_event(conn, NewEvent.of(SHIPPED, headers={"tenant": "acme"}))
        await PUBLISHER.publish_many(conn, [PLACED, NewEvent("order.shipped", SHIPPED)])
    with psycopg.connect(dsn) as connection:
        assert PUBLISHER.publish(connection, SHIPPED).payload == shipped[2]
    plain = (*placed[:1], 1, placed[2])
    assert await stored(conn) == [placed, shipped, plain, shipped, placed, shipped, shipped]


async def test_events_recorded_on_an_aggregate(conn: asyncpg.Connection, dsn: str) -> None:
    """PUB-6, IDM-3."""

    class Base(DeclarativeBase): ...

    class Order(RecordsEvents, Base):
        __tablename__ = "typed_orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        DomainEvents(PUBLISHER).attach(session)
        order = Order(id=1)
        order.record(PLACED)
        order.record(lambda: SHIPPED)
        session.add(order)
    engine.dispose()
    assert [row[0] for row in await stored(conn)] == ["order.placed", "order.shipped"]


async def test_handlers_of_every_kind_get_the_object_and_the_envelope(conn: asyncpg.Connection, dsn: str) -> None:
    """Asynchronous, in a thread and in a transaction (PUB-6)."""
    registry, seen = HandlerRegistry(), {}

    @registry.handler(OrderPlaced, name="a.plain")
    async def plain(event: EventEnvelope[OrderPlaced]) -> None:
        seen["plain"] = event

    @registry.handler(OrderPlaced, name="a.threaded")
    def threaded(event: EventEnvelope[OrderPlaced], context: HandlerContext) -> None:
        seen["threaded"] = event

    @registry.handler(OrderPlaced, name="a.transactional")
    async def transactional(event: EventEnvelope[OrderPlaced], tx: asyncpg.Connection, payload: OrderPlaced) -> None:
        assert payload == event.payload and tx.is_in_transaction()
        seen["transactional"] = event

    @registry.handler(OrderShipped, Strict, name="a.several")
    async def several(event: EventEnvelope[OrderShipped | Strict]) -> None:
        seen[type(event.payload).__name__] = event

    strict = Strict(order_id=uuid4(), total=Decimal("0.10"), raw=b"\xff\x00")
    await Worker(dsn, registry).drain()
    async with conn.transaction():
        published = await PUBLISHER.publish(conn, PLACED)
        await PUBLISHER.publish(conn, SHIPPED)
        await PUBLISHER.publish(conn, strict)
    await Worker(dsn, registry).drain()
    assert set(seen) == {"plain", "threaded", "transactional", "OrderShipped", "Strict"}
    for name in ("plain", "threaded", "transactional"):
        event = seen[name]
        assert event.payload == PLACED and isinstance(event, EventEnvelope)
        assert (event.event_id, event.source, event.event_version) == (published.event_id, "shop", 2)
    assert seen["OrderShipped"].payload == SHIPPED
    assert seen["Strict"].payload == strict
    # What was received can be published again.
    async with conn.transaction():
        again = await PUBLISHER.publish_event(conn, NewEvent.from_envelope(seen["plain"], event_id=uuid4()))
    assert again.payload == published.payload


async def test_reactions_get_it_too(conn: asyncpg.Connection, dsn: str) -> None:
    registry, seen = HandlerRegistry(), []

    @registry.handler(OrderShipped, name="a.react", via="in_process")
    async def react(event: EventEnvelope[OrderShipped]) -> None:
        seen.append(event.payload)

    async with Reactions(dsn, registry) as reactions:
        async with conn.transaction():
            event = await PUBLISHER.publish(conn, SHIPPED)
        reactions.react(event)
        await reactions.drain(30)
    assert seen == [SHIPPED]


async def test_a_payload_that_does_not_fit_is_terminal(conn: asyncpg.Connection, dsn: str) -> None:
    """The dead letter names the fields, and quotes no value (PUB-6)."""
    registry = HandlerRegistry()

    @registry.handler(OrderPlaced, name="a.typed")
    async def typed(event: EventEnvelope[OrderPlaced]) -> None:
        raise AssertionError("never called")

    await Worker(dsn, registry).drain()
    async with conn.transaction():
        await PUBLISHER.publish(conn, "order.placed", {"order_id": "canary-" * 5_000, "more": 1})
    await Worker(dsn, registry).drain()
    row = await conn.fetchrow("SELECT attempts, failure_reason, last_error, traceback FROM core.failed")
    assert (row["attempts"], row["failure_reason"]) == (1, "retry_terminal")
    # Lists show the first line, and the place.
    assert row["last_error"].partition("\n")[0].endswith("2 invalid in OrderPlaced: order_id, total")
    assert "total: Field required" in row["last_error"]
    assert "test_typed_events.py" in row["traceback"] and "pydantic" not in row["traceback"]
    assert "canary" not in row["last_error"] and len(row["last_error"]) < 1_000


class OrderCancelled(BaseModel):
    """Looks like any other event of an order."""

    event_type: ClassVar[str] = "order.cancelled"

    order_id: UUID


@dataclasses.dataclass
class OrderReopened:
    event_type: ClassVar[str] = "order.reopened"

    order_id: UUID


async def test_of_several_classes_the_type_decides(conn: asyncpg.Connection, dsn: str) -> None:
    """Not the fields, which may be the same (PUB-6)."""
    registry, seen = HandlerRegistry(), []

    @registry.handler(OrderCancelled, OrderReopened, name="a.typed")
    async def typed(event: EventEnvelope[OrderCancelled | OrderReopened]) -> None:
        seen.append(event.payload)

    @registry.handler("order.*", name="a.payload")
    def payload(event: EventEnvelope, payload: OrderCancelled | OrderReopened) -> None:
        seen.append(payload)

    events = [OrderCancelled(order_id=uuid4()), OrderReopened(uuid4())]
    await Worker(dsn, registry).drain()
    async with conn.transaction():
        await PUBLISHER.publish_many(conn, events)
    await Worker(dsn, registry).drain()
    assert len(seen) == 4 and all(seen.count(event) == 2 for event in events)


@pytest.mark.parametrize("wrong", [EventEnvelope[OrderPlaced], EventEnvelope[OrderPlaced | OrderShipped]])
def test_a_class_of_another_type_cannot_be_registered(wrong: Any) -> None:
    async def handler(event: Any) -> None: ...

    handler.__annotations__["event"] = wrong
    with pytest.raises(ConfigurationError, match=r"registered for order\.cancelled, and takes events of order\.placed"):
        HandlerRegistry().add("a.b", (OrderCancelled,), handler)
    HandlerRegistry().add("a.b", ("order.*",), handler)


class Undeclared(BaseModel):
    order_id: int


class AsField(BaseModel):
    event_type: str = "order.placed"


@dataclasses.dataclass
class AsDataclassField:
    event_type: str = "order.placed"


class NoModel:
    event_type: ClassVar[str] = "order.placed"


class BadName(BaseModel):
    event_type: ClassVar[str] = "order placed"


class BadVersion(BaseModel):
    event_type: ClassVar[str] = "order.placed"
    event_version: ClassVar[int] = 0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (Undeclared(order_id=1), "ClassVar"),
        (AsField(), "a field of AsField"),
        (AsDataclassField(), "a field of AsDataclassField"),
        (NoModel(), "neither a pydantic model nor a dataclass"),
        (BadName(), "event_type"),
        (BadVersion(), "event_version"),
        (OrderPlaced, "pass an object"),
        ({"a": 1}, "dict"),
        (None, "NoneType"),
        ("order.placed", "payload is missing"),
        (NewEvent("a.b", {}), "publish_event"),
    ],
)
async def test_what_is_no_event_is_refused_before_any_sql(conn: asyncpg.Connection, given: Any, text: str) -> None:
    """PUB-6, PUB-3."""
    async with conn.transaction():
        with pytest.raises(FieldError, match=text) as refused:
            await PUBLISHER.publish(conn, given)
        assert refused.value.remedy
        with pytest.raises(FieldError, match="dealy"):
            await PUBLISHER.publish(conn, PLACED, dealy=1)  # type: ignore[call-overload]
        await conn.execute("SELECT 1")


async def test_a_bad_value_in_an_event_object_is_refused_by_path(conn: asyncpg.Connection) -> None:
    async with conn.transaction():
        with pytest.raises(PayloadError) as refused:
            await PUBLISHER.publish(conn, OrderShipped(uuid4(), Decimal("NaN")))
        assert refused.value.field == "payload.weight"
        await conn.execute("SELECT 1")


@pytest.mark.parametrize("wrong", [Undeclared, AsField, NoModel, BadName, int])
def test_a_class_without_a_type_cannot_be_registered(wrong: Any) -> None:
    async def handler(event: EventEnvelope) -> None: ...

    with pytest.raises(ConfigurationError) as refused:
        HandlerRegistry().add("a.b", (wrong,), handler)
    assert refused.value.remedy
