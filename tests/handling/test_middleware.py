"""Middleware around handlers (LSN-14)."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import pytest

from holdfast import Done, EventEnvelope, HandlerContext, HandlerRegistry, Publisher, Reactions, Reject, Worker
from holdfast.errors import ConfigurationError
from tests.worker.support import Facts, drained, publish, running, until

pytestmark = pytest.mark.newcomer

PUBLISHER = Publisher("shop")
tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")


def noting(log: list[str], name: str) -> Any:
    async def middleware(event: EventEnvelope, call_next: Any) -> Any:
        log.append(f"before {name}")
        outcome = await call_next(event)
        log.append(f"after {name}")
        return outcome

    return middleware


async def run(dsn: str, conn: asyncpg.Connection, registry: HandlerRegistry, **payload: Any) -> None:
    """Publish one event, and handle it once."""
    await Worker(dsn, registry, observers=()).drain()
    async with conn.transaction():
        await PUBLISHER.publish(conn, "order.placed", payload)
    await Worker(dsn, registry, observers=()).drain()


async def failure(conn: asyncpg.Connection) -> tuple[str, str]:
    row = await conn.fetchrow("SELECT failure_reason, last_error FROM core.failed")
    return row["failure_reason"], row["last_error"]


async def test_they_run_in_order_around_every_kind_of_handler(dsn: str, conn: asyncpg.Connection) -> None:
    """The first is outermost, and those of an including registry are outside of all (LSN-14)."""
    log: list[str] = []

    async def contextual(call_next: Any, event: EventEnvelope, context: HandlerContext) -> Any:
        tenant.set(f"{context.handler_name} {context.attempt}")
        return await call_next(event)

    inner = HandlerRegistry(middleware=[noting(log, "one"), noting(log, "two"), contextual])
    outer = HandlerRegistry(middleware=(noting(log, "outer"),))
    kinds: list[Any] = []

    @inner.handler("order.placed", name="a.asynchronous")
    async def asynchronous(event: EventEnvelope) -> None:
        kinds.append(tenant.get())
        log.append("handler")

    @inner.handler("order.shipped", name="a.threaded")
    def threaded(event: EventEnvelope) -> None:
        kinds.append(tenant.get())
        log.append("handler")

    @inner.handler("order.paid", name="a.transactional")
    async def transactional(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        kinds.append(tenant.get())
        log.append("handler")

    outer.include(inner)
    async with running(dsn, outer):
        for event_type in ("order.placed", "order.shipped", "order.paid"):
            log.clear()
            await publish(conn, event_type)
            await drained(conn)
            assert log == [
                "before outer",
                "before one",
                "before two",
                "handler",
                "after two",
                "after one",
                "after outer",
            ]
    assert kinds == ["a.asynchronous 1", "a.threaded 1", "a.transactional 1"]
    assert tenant.get() == "none"


async def test_reactions_run_them(dsn: str, conn: asyncpg.Connection) -> None:
    log: list[str] = []
    registry = HandlerRegistry(middleware=[noting(log, "m")])

    @registry.handler("order.placed", name="a.b", via="in_process")
    async def handler(event: EventEnvelope) -> None:
        log.append("handler")

    async with Reactions(dsn, registry) as reactions:
        async with conn.transaction():
            event = await PUBLISHER.publish(conn, "order.placed", {})
        reactions.react(event)
        await reactions.drain(30)
    assert log == ["before m", "handler", "after m"]


async def test_they_get_the_state_and_may_replace_the_event(dsn: str, conn: asyncpg.Connection) -> None:
    """For example to bring an old payload up to date before it is validated (LSN-14)."""
    seen: list[Any] = []

    @asynccontextmanager
    async def rates() -> AsyncIterator[dict[str, int]]:
        yield {"EUR": 2}

    async def upcast(event: EventEnvelope, call_next: Any, state: dict[str, int]) -> Any:
        payload = {"price": event.payload["price"] * state["EUR"]}
        return await call_next(event.model_copy(update={"payload": payload}))

    registry = HandlerRegistry(lifespan=rates, middleware=[upcast])

    @registry.handler("order.placed", name="a.b")
    async def handler(event: EventEnvelope) -> None:
        seen.append(event.payload)

    await run(dsn, conn, registry, price=3)
    assert seen == [{"price": 6}]


async def test_inside_the_transaction(dsn: str, conn: asyncpg.Connection) -> None:
    """An error after the handler takes its writes back (LSN-14, LSN-5)."""
    await conn.execute("CREATE TABLE ledger (n int)")

    async def failing(event: EventEnvelope, call_next: Any) -> Any:
        await call_next(event)
        raise ValueError("after the handler")

    registry = HandlerRegistry(middleware=[failing])

    @registry.handler("order.placed", name="a.b", on_error="reject")
    async def handler(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger VALUES (1)")

    await run(dsn, conn, registry)
    assert await conn.fetchval("SELECT count(*) FROM ledger") == 0
    assert (await failure(conn))[1].startswith("ValueError: after the handler")


async def test_what_a_middleware_returns_is_the_outcome(dsn: str, conn: asyncpg.Connection) -> None:
    """Nothing leaves the handler's own outcome, also when `return` is forgotten (LSN-14)."""

    async def forgetful(event: EventEnvelope, call_next: Any) -> None:
        await call_next(event)

    registry = HandlerRegistry(middleware=[forgetful])

    @registry.handler("order.placed", name="a.b")
    async def handler(event: EventEnvelope) -> Reject:
        return Reject("by the handler")

    await run(dsn, conn, registry)
    assert await failure(conn) == ("rejected", "by the handler")


async def test_a_middleware_may_skip_the_handler(dsn: str, conn: asyncpg.Connection) -> None:
    async def skip(event: EventEnvelope, call_next: Any) -> Done:
        return Done()

    registry = HandlerRegistry(middleware=[skip])

    @registry.handler("order.placed", name="a.b")
    async def handler(event: EventEnvelope) -> None:
        raise AssertionError("never called")

    await run(dsn, conn, registry)
    assert await conn.fetchval("SELECT status FROM core.outbox") == "delivered"


async def _nothing(event: EventEnvelope, call_next: Any) -> None: ...
async def _swallows(event: EventEnvelope, call_next: Any) -> None:
    with suppress(ValueError):
        await call_next(event)


async def _returns(event: EventEnvelope, call_next: Any) -> Any:
    await call_next(event)
    return 7


async def _passes_nothing(event: EventEnvelope, call_next: Any) -> Any:
    return await call_next(None)


@pytest.mark.parametrize("wrong", [_nothing, _swallows, _returns, _passes_nothing], ids=lambda each: each.__name__)
async def test_a_mistake_is_a_dead_letter_that_names_it(dsn: str, conn: asyncpg.Connection, wrong: Any) -> None:
    """An event is never taken for handled because of a middleware that forgot it (LSN-14)."""
    registry = HandlerRegistry(middleware=[wrong])

    @registry.handler("order.placed", name="a.b")
    async def handler(event: EventEnvelope) -> None:
        if wrong is _swallows:
            raise ValueError

    await run(dsn, conn, registry)
    reason, error = await failure(conn)
    assert reason == "retry_terminal" and wrong.__name__ in error


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("threaded", [False, True])
async def test_the_time_limit_includes_them(dsn: str, conn: asyncpg.Connection, where: str, threaded: bool) -> None:
    """A middleware that hangs is cancelled, also around a handler in a thread (LSN-14, LSN-9)."""

    async def hanging(event: EventEnvelope, call_next: Any) -> Any:
        if where == "after":
            await call_next(event)
        await asyncio.Event().wait()

    registry, facts = HandlerRegistry(middleware=[hanging]), Facts()

    def in_thread(event: EventEnvelope) -> None: ...

    async def on_loop(event: EventEnvelope) -> None: ...

    registry.add("a.b", ("order.placed",), in_thread if threaded else on_loop, timeout=0.3, on_error="reject")
    started = time.monotonic()
    async with running(dsn, registry, facts):
        await publish(conn, "order.placed")
        await until(lambda: conn.fetchval("SELECT count(*) FROM core.failed"))
    assert time.monotonic() - started < 20
    assert "longer than its limit" in (await failure(conn))[1]


def _sync(event: Any, call_next: Any) -> None: ...
async def _no_next(event: Any) -> None: ...
async def _unknown(event: Any, call_next: Any, request: Any) -> None: ...
async def _generator(event: Any, call_next: Any) -> Any:
    yield


@pytest.mark.parametrize("wrong", [[_sync], [_no_next], [_unknown], [_generator], [7], 7, _sync])
def test_what_is_no_middleware_is_refused_by_the_constructor(wrong: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        HandlerRegistry(middleware=wrong)
    assert refused.value.remedy


def test_nothing_changes_for_handlers_without() -> None:
    """The short way of most events stays (LSN-14)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="a.b")
    async def handler(event: EventEnvelope) -> None: ...

    other = HandlerRegistry()
    other.include(registry)
    assert registry["a.b"].plain and other["a.b"] is registry["a.b"]
    around = HandlerRegistry(middleware=[_nothing])
    around.include(registry)
    assert not around["a.b"].plain
