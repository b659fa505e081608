"""A worker on other event loops than asyncio's own works, or is refused with a line (OPS-6, T31)."""

from __future__ import annotations

import asyncio
import threading

import asyncpg
import pytest
import uvloop

from holdfast import EventEnvelope, HandlerRegistry, Worker, WorkerSettings
from holdfast.errors import ConfigurationError
from tests.worker.support import publish, until

pytestmark = pytest.mark.trust


def _registry(seen: list[str]) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        seen.append(event.event_type)

    return registry


@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, asyncio.SelectorEventLoop])
async def test_worker_on_a_loop_of_its_own(dsn: str, conn: asyncpg.Connection, loop_factory: object) -> None:
    """In a thread beside the loop of a service, as a program on trio or in a notebook would run it (T31)."""
    seen: list[str] = []
    for _ in range(2):
        await publish(conn, "order.placed")

    def work() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:  # type: ignore[arg-type]
            runner.run(Worker(dsn, _registry(seen), WorkerSettings(poll_interval=1)).drain())

    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive() and seen == ["order.placed"] * 2


async def test_two_workers_on_one_loop(dsn: str, conn: asyncpg.Connection) -> None:
    """As in a notebook whose cell was run twice (T31)."""
    seen: list[str] = []
    await publish(conn, "order.placed")
    async with Worker(dsn, _registry(seen)), Worker(dsn, _registry(seen)):
        await until(lambda: seen, what="the event is handled")
    assert seen == ["order.placed"]


@pytest.mark.parametrize("how", ["run", "aenter"])
def test_without_asyncio_it_is_refused(how: str) -> None:
    """Trio drives coroutines itself; the worker says what it needs before it does anything (T31)."""
    worker = Worker("postgresql://localhost/shop", _registry([]))
    work = worker.run() if how == "run" else worker.__aenter__()
    with pytest.raises(ConfigurationError, match=r"outside a running asyncio event loop.*asyncio\.run"):
        work.send(None)
