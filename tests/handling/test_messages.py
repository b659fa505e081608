"""First mistakes whose message has to name the mistake: what is in the wrong place, and what to write instead."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import asyncpg
import asyncpg.pool
import psycopg
import pytest
from pydantic import BaseModel
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher
from holdfast.brokers.engines import engine_of
from holdfast.errors import ConfigurationError, FieldError, TerminalHandlerError

pytestmark = pytest.mark.newcomer

PUBLISHER = Publisher("shop")


class OrderPlaced(BaseModel):
    event_type: ClassVar[str] = "order.placed"
    order_id: int = 17


ORDER = OrderPlaced()


# --- publishing -----------------------------------------------------------------------------------------


async def test_publish_event_takes_an_object_of_an_event_class(conn: asyncpg.Connection) -> None:
    async with conn.transaction():
        event = await PUBLISHER.publish_event(conn, ORDER)
    assert (event.event_type, event.payload) == ("order.placed", {"order_id": 17})


@pytest.mark.parametrize(
    ("call", "field", "words"),
    [
        (lambda tx: PUBLISHER.publish(tx, ORDER, {"a": 1}), "payload", "beside an object of OrderPlaced"),
        (lambda tx: PUBLISHER.publish(tx, NewEvent("a.b", {}), {}), "payload", "beside an object of NewEvent"),
        (lambda tx: PUBLISHER.publish_alone(tx, ORDER, {"a": 1}), "payload", "beside an object of OrderPlaced"),
        (lambda tx: PUBLISHER.publish("order.placed", {}), "tx", "missing; write publish(tx, event_type, payload)"),  # type: ignore[call-overload]
        (lambda tx: PUBLISHER.publish_many(tx, ORDER), "events", "for one event, use publish"),
        (lambda tx: PUBLISHER.publish_many(tx, NewEvent("a.b", {})), "events", "for one event, use publish"),
        (lambda tx: PUBLISHER.publish_many(tx, {"order_id": 1}), "events", "pass a list of NewEvent"),
    ],
)
async def test_what_stands_in_the_wrong_place(
    conn: asyncpg.Connection, call: Callable[[Any], Any], field: str, words: str
) -> None:
    async with conn.transaction():
        with pytest.raises(FieldError) as refused:
            await call(conn)
    assert refused.value.field == field and words in str(refused.value)


def test_a_connection_to_another_database_is_told() -> None:
    """By its name, before any SQL (PUB-3)."""
    with create_engine("sqlite://").begin() as connection, pytest.raises(FieldError, match="connection of sqlite"):
        PUBLISHER.publish(connection, "order.placed", {})


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("natss://h:4222", "substrate 'natss' is not a broker that Holdfast knows; write nats://"),
        ("nats://h:4222/?replica=3", "substrate has the option 'replica', which is unknown; use one of"),
    ],
)
def test_an_address_of_a_broker_with_what_is_unknown(address: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        engine_of(address)
    assert words in str(refused.value)


def test_a_synchronous_connection_is_told_of_with(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection, pytest.raises(FieldError) as refused:
        PUBLISHER.publish(connection, "order.placed", {})
    assert "`with connection.transaction():`" in refused.value.remedy


@pytest.mark.parametrize(
    ("forgotten", "name"),
    [
        (lambda tx: PUBLISHER.publish(tx, "order.placed", {}), "publish"),
        (lambda tx: PUBLISHER.publish_many(tx, [ORDER]), "publish_many"),
        (lambda tx: PUBLISHER.cancel(tx, "k"), "cancel"),
    ],
)
async def test_a_forgotten_await_is_named(conn: asyncpg.Connection, forgotten: Callable[[Any], Any], name: str) -> None:
    """Python's warning is all that tells of it: the transaction commits without the event."""
    async with conn.transaction():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            forgotten(conn)
            gc.collect()
    assert [str(each.message).partition("\n")[0] for each in caught] == [f"coroutine '{name}' was never awaited"]


FORGETFUL = """
import asyncio
from holdfast.cli import logs

async def write(): ...

async def handler():
    write()

logs.configure()
asyncio.run(handler())
logs.flush()
"""


def test_a_forgotten_await_is_a_line_of_the_log() -> None:
    """The log of a command is JSON in every line, also where Python warns (OBS-1)."""
    done = subprocess.run([sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=60, check=True)
    (entry,) = map(json.loads, done.stderr.splitlines())
    assert "RuntimeWarning: coroutine 'write' was never awaited" in entry["event"]
    assert (entry["level"], entry["logger"]) == ("warning", "py.warnings")


# --- handlers -------------------------------------------------------------------------------------------


def registered(function: Any) -> HandlerRegistry:
    registry = HandlerRegistry()
    registry.handler("order.placed", name="shop.ship")(function)
    return registry


async def pool_as_tx(event: EventEnvelope, tx: asyncpg.Pool) -> None: ...
async def envelope_as_payload(event: EventEnvelope, payload: EventEnvelope) -> None: ...
async def typed_envelope_as_payload(event: EventEnvelope, payload: EventEnvelope[OrderPlaced]) -> None: ...
async def list_as_payload(event: EventEnvelope, payload: list[int]) -> None: ...
async def number_as_payload(event: EventEnvelope[int]) -> None: ...
async def undefined_event(event: Nope) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def undefined_tx(event: EventEnvelope, tx: Connectoin) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def undefined_payload(event: EventEnvelope, payload: Nope) -> None: ...  # type: ignore[name-defined]  # noqa: F821


async def session_by_its_name(event: EventEnvelope, session: AsyncSession) -> None: ...
async def conn_by_its_name(event: EventEnvelope, conn: asyncpg.Connection) -> None: ...


class Service:
    async def method(self, event: EventEnvelope) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (pool_as_tx, "shop.ship.tx is annotated with asyncpg.pool.Pool, which it is not; annotate it with asyncpg.Con"),
        (envelope_as_payload, "shop.ship.payload is annotated with EventEnvelope, and a payload is an object"),
        (typed_envelope_as_payload, "shop.ship.payload is annotated with EventEnvelope[OrderPlaced], and a payload"),
        (list_as_payload, "shop.ship.payload is annotated with list[int], and a payload is an object"),
        (number_as_payload, "shop.ship.event is annotated with int, and a payload is an object"),
        (undefined_event, "shop.ship.event is annotated with Nope, which is not defined"),
        (undefined_tx, "shop.ship.tx is annotated with Connectoin, which is not defined"),
        (undefined_payload, "shop.ship.payload is annotated with Nope, which is not defined"),
        (session_by_its_name, "cannot fill; name it tx: tx: sqlalchemy.ext.asyncio.AsyncSession"),
        (conn_by_its_name, "cannot fill; name it tx: tx: asyncpg.Connection"),
        (Service.method, "shop.ship is a method without its object: it gets the event as self"),
    ],
)
def test_a_handler_that_could_not_work_is_refused(function: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        registered(function)
    assert words in str(refused.value)


async def imported_for_types(event: hf.EventEnvelope, tx: hf.Connection[Any]) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def of_a_pool(event: EventEnvelope, tx: asyncpg.pool.PoolConnectionProxy) -> None: ...
async def optional(event: EventEnvelope, payload: OrderPlaced | None) -> None: ...
async def mapping(event: EventEnvelope[dict[str, int]]) -> None: ...


@pytest.mark.parametrize("function", [imported_for_types, of_a_pool, optional, mapping, Service().method])
def test_a_handler_that_works_is_accepted(function: Any) -> None:
    assert len(registered(function)) == 1


def test_types_and_function_in_the_wrong_order() -> None:
    with pytest.raises(ConfigurationError, match="got of_a_pool instead of event types"):
        HandlerRegistry().add("shop.ship", of_a_pool, ("order.placed",))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="got OrderPlaced instead of event types"):
        HandlerRegistry().add("shop.ship", OrderPlaced, of_a_pool)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Shop.ship", "a b.c", "shop.Ship", "shop..ship"])
def test_a_name_with_a_dot_has_a_domain_context(name: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        HandlerRegistry().handler("order.placed", name=name)(of_a_pool)
    assert "has no domain context" not in str(refused.value) and "in lower case" in refused.value.remedy


async def other() -> None: ...


async def returns_coroutine(event: EventEnvelope) -> Any:
    return other()


def returns_coroutine_in_thread(event: EventEnvelope) -> Any:
    return other()


async def returns_future(event: EventEnvelope) -> Any:
    return asyncio.ensure_future(other())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (returns_coroutine, "returned the coroutine other, which was not awaited; write await before the call"),
        (returns_future, "returned an object of Task, which was not awaited; write await before the call"),
        (returns_coroutine_in_thread, "which was not awaited; make the handler async def, and await it"),
    ],
)
async def test_a_handler_that_forgets_await(function: Any, words: str) -> None:
    handler = registered(function)["shop.ship"]
    result = function(None)
    with pytest.raises(TerminalHandlerError) as refused:
        handler.outcome_of(await result if handler.asynchronous else result)
    assert words in str(refused.value)
