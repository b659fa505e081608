"""The parameters of first handlers: what is refused when a handler is registered, and not when it runs (LSN-14)."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional, Protocol, TypeVar

import asyncpg
import pytest
from asyncpg.pool import PoolConnectionProxy
from pydantic import BaseModel

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, Publisher, Worker
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from asyncpg import Connection

pytestmark = pytest.mark.newcomer


class Executes(Protocol):
    """What a handler needs, for its own tests."""


class Mine(asyncpg.Connection):  # type: ignore[misc]
    """A connection class of the application's."""


class OrderPlaced(BaseModel):
    order_id: int


@dataclass
class OrderShipped:
    order_id: int


class HasType(Protocol):
    event_type: str


T = TypeVar("T")


def registered(function: Any) -> None:
    HandlerRegistry().add("shop.ship", ("order.placed",), function)


@pytest.mark.parametrize("wrong", [asyncpg.Pool, int, dict], ids=lambda kind: kind.__name__)
def test_a_transaction_of_another_library_is_refused(wrong: type) -> None:
    async def handler(event: Any, tx: Any) -> None: ...

    handler.__annotations__["tx"] = wrong
    with pytest.raises(ConfigurationError, match=r"asyncpg\.Connection") as refused:
        registered(handler)
    assert refused.value.field == "shop.ship.tx" and wrong.__name__ in refused.value.problem


@pytest.mark.parametrize("right", [asyncpg.Connection, PoolConnectionProxy, Mine, Executes, Any, object])
def test_every_right_annotation_is_taken(right: Any) -> None:
    async def handler(event: Any, tx: Any) -> None: ...

    handler.__annotations__["tx"] = right
    registered(handler)


def test_an_import_for_type_checkers_alone_is_taken() -> None:
    async def handler(event: Any, tx: Connection) -> None: ...

    async def bare(event: Any, tx) -> None: ...  # type: ignore[no-untyped-def]

    registered(handler)
    registered(bare)


async def payload_first(payload: OrderPlaced) -> None: ...
async def tx_first(tx: asyncpg.Connection) -> None: ...
async def context_first(context: HandlerContext, event: EventEnvelope) -> None: ...
async def state_first(state: Any) -> None: ...
async def a_model(event: OrderPlaced) -> None: ...
async def a_dataclass(order: OrderShipped) -> None: ...
async def a_dict(event: dict[str, Any]) -> None: ...
async def a_bare_dict(event: dict) -> None: ...  # type: ignore[type-arg]
async def a_text(event: str) -> None: ...
async def the_context(event: HandlerContext) -> None: ...
async def several(event: EventEnvelope[OrderPlaced] | EventEnvelope[OrderShipped]) -> None: ...
async def not_imported(event: EventEnvelope[Missing]) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def no_model(event: EventEnvelope, payload: threading.Lock) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def unknown_payload(event: EventEnvelope, payload: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def bare_payload(event: EventEnvelope, payload) -> None: ...  # type: ignore[no-untyped-def]
async def wrong_context(event: EventEnvelope, context: dict) -> None: ...  # type: ignore[type-arg]
async def wrong_union(event: EventEnvelope, tx: int | None) -> None: ...
async def unknown(event: EventEnvelope, client: Any) -> None: ...
async def generator(event: EventEnvelope) -> AsyncIterator[None]:
    yield


def threaded_generator(event: EventEnvelope) -> Iterator[None]:
    yield


def threaded_tx(event: EventEnvelope, tx: Any) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (payload_first, "put the event first: def handler(event: EventEnvelope, payload, ...)"),
        (tx_first, "put the event first"),
        (context_first, "put the event first"),
        (state_first, "put the event first"),
        (a_model, "write event: EventEnvelope[OrderPlaced]"),
        (a_dataclass, "write event: EventEnvelope[OrderShipped]"),
        (a_dict, "write event: EventEnvelope"),
        (a_bare_dict, "write event: EventEnvelope"),
        (a_text, "write event: EventEnvelope"),
        (the_context, "EventEnvelope"),
        (several, "EventEnvelope[A | B]"),
        (not_imported, "import what EventEnvelope[Missing] is"),
        (unknown_payload, "import what Missing is"),
        (bare_payload, "annotate it with your model"),
        (wrong_context, "holdfast.HandlerContext"),
        (wrong_union, "asyncpg.Connection"),
        (unknown, "use payload, tx, context, state, or give the others a default"),
        (generator, "lifespan"),
        (threaded_generator, "lifespan"),
        (threaded_tx, "async def"),
        (functools.partial(payload_first), "put the event first"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_would_get_something_else_is_refused(wrong: Callable[..., Any], remedy: str) -> None:
    """With the line to write instead (LSN-14)."""
    with pytest.raises(ConfigurationError) as refused:
        registered(wrong)
    assert remedy in refused.value.remedy
    assert refused.value.field.startswith("shop.ship")


def test_a_payload_that_pydantic_cannot_validate_is_refused() -> None:
    class Socket: ...

    async def handler(event: Any, payload: Any) -> None: ...

    handler.__annotations__["payload"] = Socket
    with pytest.raises(ConfigurationError, match="cannot validate"):
        registered(handler)


@pytest.mark.parametrize("retry", [3, None, {"max_attempts": 3}, 1.5])
def test_a_retry_policy_that_is_none_is_refused(retry: Any) -> None:
    with pytest.raises(ConfigurationError, match="RetryPolicy"):
        HandlerRegistry().handler("order.placed", name="shop.ship", retry=retry)(a_text)


@pytest.mark.parametrize(
    "right",
    [
        EventEnvelope,
        EventEnvelope[OrderPlaced],
        EventEnvelope[OrderShipped],
        EventEnvelope[OrderPlaced | OrderShipped],
        EventEnvelope[dict[str, Any]],
        EventEnvelope[Any],
        Optional[EventEnvelope],  # noqa: UP045
        EventEnvelope | None,
        HasType,
        BaseModel,
        Any,
        object,
        T,
    ],
    ids=str,
)
def test_every_right_annotation_of_an_event_is_taken(right: Any) -> None:
    async def handler(event: Any) -> None: ...

    handler.__annotations__["event"] = right
    registered(handler)


@pytest.mark.parametrize("right", [HandlerContext, tuple, Any, object, HasType], ids=str)
def test_every_right_annotation_of_a_context_is_taken(right: Any) -> None:
    async def handler(event: Any, context: Any, state: Any) -> None: ...
    async def bare(event, context) -> None: ...  # type: ignore[no-untyped-def]

    handler.__annotations__["context"] = right
    registered(handler)
    registered(bare)


def test_the_name_of_the_event_is_free() -> None:
    async def handler(order: EventEnvelope) -> None: ...
    async def bare(message) -> None: ...  # type: ignore[no-untyped-def]
    async def anything(*args: Any, **options: Any) -> None: ...

    for function in (handler, bare, anything):
        registered(function)


async def test_no_runner_is_lost_to_a_strange_handler(dsn: str, conn: asyncpg.Connection) -> None:
    """What only shows when it runs fails its own event, and the next one is handled (LSN-14)."""
    registry, handled = HandlerRegistry(), []

    def hidden(make: Any) -> Any:
        def handler(event: EventEnvelope) -> Any:
            handled.append(event.event_id)
            return make()

        return handler

    async def coroutine() -> None: ...
    async def asynchronous_generator() -> AsyncIterator[None]:
        yield

    for name, make in {
        "coroutine": coroutine,
        "generator": asynchronous_generator,
        "number": lambda: 7,
        "class": lambda: EventEnvelope,
    }.items():
        registry.add(f"a.{name}", ("order.placed",), hidden(make))
    await Worker(dsn, registry).drain()
    async with conn.transaction():
        for _ in range(5):
            await Publisher("shop").publish(conn, "order.placed", {})
    await Worker(dsn, registry).drain()
    assert len(handled) == 20
    assert await conn.fetchval("SELECT count(*) FROM core.failed WHERE failure_reason = 'retry_terminal'") == 20
