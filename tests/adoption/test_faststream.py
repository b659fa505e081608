"""Subscribers of faststream-outbox on Holdfast: the same module, with another import."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from faststream import BaseMiddleware
from faststream.exceptions import StopConsume
from faststream_outbox import ConstantRetry, NoRetry, OutboxRouter, TestOutboxBroker
from faststream_outbox.annotations import OutboxMessage
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from holdfast import Operator, Worker
from holdfast.errors import ConfigurationError, FieldError, TransientHandlerError
from holdfast.integrations.faststream import OutboxBroker
from holdfast.retry import classify
from tests.adoption.bare import Installed
from tests.adoption.test_frameworks import FOLDER, run, saved
from tests.worker.support import until

pytestmark = pytest.mark.timeout(300)

PAGE = FOLDER / "faststream.md"
MAILS = [f"Dear Ada, your order {number} is here" for number in (1, 2, 3)]


class Order(BaseModel):
    number: int


@pytest.fixture
def engine(dsn: str) -> AsyncEngine:
    return create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://", 1))


def mails(printed: str) -> list[str]:
    return sorted(line for line in printed.splitlines() if line.startswith("Dear"))


@pytest.mark.slow
async def test_the_service_of_the_page(empty_dsn: str, tmp_path: Path, installed: Installed) -> None:
    """Parsed, injected and retried by FastStream; claimed and settled by Holdfast (LSN-4)."""
    printed = run(PAGE, empty_dsn, tmp_path, installed)
    assert mails(printed) == MAILS and "shop.send_mail" in printed
    connection = await asyncpg.connect(empty_dsn)
    rows = await connection.fetch("SELECT payload->>'order_id', attempts, status FROM core.outbox ORDER BY 1")
    await connection.close()
    assert [tuple(row) for row in rows] == [("1", 1, "delivered"), ("2", 2, "delivered"), ("3", 1, "delivered")]


@pytest.mark.slow
def test_it_is_a_module_of_faststream_outbox(empty_dsn: str, tmp_path: Path) -> None:
    """With the import that the page replaces, it does the same with faststream-outbox."""
    saved(PAGE, tmp_path)
    text = (tmp_path / "shop.py").read_text()
    tables = (
        "async def create() -> None:\n    async with engine.begin() as connection:\n"
        "        await connection.run_sync(metadata.create_all)\n\n\napp.on_startup(create)\n"
    )
    for new, old in (
        ("from holdfast.integrations.faststream import OutboxBroker", "from faststream_outbox import OutboxBroker"),
        (', source="shop")', ")"),
        ("registry = broker.registry()  # for holdfast worker shop:registry\n", tables),
    ):
        assert new in text
        text = text.replace(new, old)
    assert "holdfast." not in text
    (tmp_path / "shop.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "shop.py"],
        cwd=tmp_path,
        env={**os.environ, "HOLDFAST_DSN": empty_dsn},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert mails(done.stdout) == MAILS, done.stderr


async def test_bodies_headers_and_timers(engine: AsyncEngine, dsn: str, conn: asyncpg.Connection) -> None:
    """What is published is what a subscriber gets, whatever its type (PUB-1)."""
    got: list[Any] = []
    broker = OutboxBroker(engine, source="shop", event_types={"text": "shop.text"})

    @broker.subscriber("text")
    async def text(body: str, message: OutboxMessage) -> None:
        got.append((body, message.correlation_id, message.headers["tenant"]))

    @broker.subscriber(["models", "lists"])
    async def several(body: Any) -> None:
        got.append(body)

    router = OutboxRouter()
    publisher = router.publisher("fields")

    @router.subscriber("fields")
    async def fields(number: int, name: str) -> None:
        got.append((number, name))

    broker.include_router(router)
    registry = broker.registry()
    assert sorted(handler.name for handler in registry) == ["shop.fields", "shop.models", "shop.text"]
    await Worker(dsn, registry).drain()  # subscribes
    async with AsyncSession(engine) as session, session.begin():
        await broker.publish("5", queue="text", session=session, headers={"tenant": "t"}, correlation_id="c-1")
        await broker.publish(Order(number=1), queue="models", session=session)
        await broker.publish_batch([1], [2], queue="lists", session=session)
        await publisher.publish({"number": 1, "name": "a"}, session=session)
        later = timedelta(hours=1)
        first = await broker.publish({}, queue="fields", session=session, activate_in=later, timer_id="t")
        assert isinstance(first, int)
        assert await broker.publish({}, queue="fields", session=session, activate_in=later, timer_id="t") is None
        assert await broker.cancel_timer(queue="fields", timer_id="t", session=session)
        assert not await broker.cancel_timer(queue="fields", timer_id="t", session=session)
        with pytest.raises(FieldError, match="timer_conflict"):
            await broker.publish({}, queue="fields", session=session, timer_id="t", timer_conflict="extend")
        with pytest.raises(FieldError, match="bytes that are not text"):
            await broker.publish(b"\xff", queue="fields", session=session)
    await Worker(dsn, registry).drain()
    await engine.dispose()
    assert sorted(map(str, got)) == sorted(map(str, [("5", "c-1", "t"), {"number": 1}, [1], [2], (1, "a")]))
    types = {row[0] for row in await conn.fetch("SELECT event_type FROM core.outbox WHERE status = 'delivered'")}
    assert types == {"shop.text", "models", "lists", "fields"}


async def test_failures_are_dead_letters_as_the_subscriber_decides(
    engine: AsyncEngine, dsn: str, conn: asyncpg.Connection
) -> None:
    """ERR: a strategy that gives up, a reject and a model that does not fit; middlewares see each attempt."""
    seen: list[str] = []

    class Seeing(BaseMiddleware):
        async def consume_scope(self, call_next: Any, message: Any) -> Any:
            seen.append(message.raw_message.queue)
            return await call_next(message)

    broker = OutboxBroker(engine, source="shop", middlewares=[Seeing])

    @broker.subscriber("twice", retry_strategy=ConstantRetry(delay_seconds=0.01, max_attempts=2))
    async def twice(body: dict[str, Any]) -> None:
        raise LookupError("no address")

    @broker.subscriber("rejected")
    async def rejected(body: dict[str, Any], message: OutboxMessage) -> None:
        await message.reject()

    @broker.subscriber("misfit", retry_strategy=NoRetry())
    async def misfit(body: Order) -> None:
        raise AssertionError("it was called")

    async def failed() -> bool:
        count: int = await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'failed'")
        return count == 3

    async with broker:
        async with AsyncSession(engine) as session, session.begin():
            for queue in ("twice", "rejected", "misfit"):
                await broker.publish({"a": 1}, queue=queue, session=session)
        await until(failed, what="all have failed")
        assert await broker.ping()
    await engine.dispose()
    rows = await conn.fetch("SELECT handler_name, status, failure_reason, attempts FROM core.outbox ORDER BY 1")
    assert [tuple(row) for row in rows] == [
        ("shop.misfit", "failed", "retry_terminal", 1),
        ("shop.rejected", "failed", "rejected", 1),
        ("shop.twice", "failed", "retry_terminal", 2),
    ]
    assert sorted(seen) == ["misfit", "rejected", "twice", "twice"]
    async with Operator(dsn, actor="test") as operator:
        groups = (await operator.failed.groups()).groups
    [twice_failed] = [group for group in groups if group.handler_name == "shop.twice"]
    assert str(twice_failed.sample_error) == "LookupError: no address"
    assert "test_faststream.py" in str(twice_failed.raised_at)
    assert not any("holdfast" in str(group.sample_error) for group in groups)


@pytest.mark.filterwarnings("ignore:Duplicate subscriber")  # of faststream-outbox, where they would compete
async def test_a_stopped_subscriber_leaves_its_events(engine: AsyncEngine, dsn: str, conn: asyncpg.Connection) -> None:
    """ERR: what comes after StopConsume waits for a subscriber that runs; two of one queue are two handlers."""
    got: list[int] = []
    broker = OutboxBroker(engine, source="shop")

    @broker.subscriber("orders")
    async def order(body: Order) -> None:
        raise StopConsume

    @broker.subscriber("orders")
    async def count(body: Order) -> None:
        got.append(body.number)

    async def stopped() -> bool:
        return len(got) == 4 and sum(each.running for each in broker.subscribers) == 1

    async with broker:
        for number in (1, 2, 3, 4):
            async with AsyncSession(engine) as session, session.begin():
                await broker.publish(Order(number=number), queue="orders", session=session)
            await until(partial(_seen, got, number), what="it is counted")
        await until(stopped, what="the subscriber has stopped")
    await engine.dispose()
    rows = await conn.fetch(
        "SELECT handler_name, status, count(*) FROM core.outbox WHERE handler_name <> '*' GROUP BY 1, 2 ORDER BY 1, 2"
    )
    found = {(row[0], row[1]): row[2] for row in rows}
    assert found["shop.orders_count", "delivered"] == 4
    assert found.get(("shop.orders_order", "failed"), 0) <= 1 and found["shop.orders_order", "pending"] >= 3


async def _seen(got: list[int], number: int) -> bool:
    return number in got


async def test_the_test_broker_of_faststream_outbox_works(engine: AsyncEngine) -> None:
    got: list[int] = []
    broker = OutboxBroker(engine, source="shop")

    @broker.subscriber("orders")
    async def order(body: Order) -> None:
        got.append(body.number)

    async with TestOutboxBroker(broker) as testing, AsyncSession(engine) as session:
        await testing.publish(Order(number=7), queue="orders", session=session)
    assert got == [7]


def test_a_broker_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="engine is missing"):
        OutboxBroker(source="shop")
    with pytest.raises(ConfigurationError, match="engine is str, not AsyncEngine"):
        OutboxBroker("postgresql://localhost/shop", source="shop")  # type: ignore[arg-type]


def test_a_retry_waits_for_as_long_as_the_strategy_says(engine: AsyncEngine) -> None:
    """Neither jitter nor the longest wait of a policy changes what the strategy has decided."""
    broker = OutboxBroker(engine, source="shop")

    @broker.subscriber("orders", retry_strategy=ConstantRetry(delay_seconds=3600))
    async def order(body: Order) -> None: ...

    [handler] = broker.registry()
    assert handler.retry.delay(1) <= 0.001, "comes on top of the wait"
    assert classify(TransientHandlerError(retry_after=3600.0), handler.retry).retry_after == 3600.0
