"""What a test leaves behind when its end fails, when it is interrupted, or when it would never end (TST-1, TST-2)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psycopg
import pytest

from holdfast import HandlerRegistry
from holdfast.testing import MemoryOutbox, Outbox, delivering
from tests.testing.test_plugin import passed, run, server
from tests.worker.support import until

__all__ = ["server"]

BEHIND_AN_ERROR = """
import pytest

@pytest.fixture
def broken():
    yield
    raise RuntimeError("the end of a fixture")

def test_with_a_fault_that_nothing_meets(outbox):
    outbox.publish("order.placed", {"order_id": "o-1"})
    outbox.execute("INSERT INTO sales (order_id) VALUES ('x')")
    outbox.move_clock(days=30)
    outbox.crash_after_effect("ledger.record")

def test_after_it(outbox):
    assert outbox.published() == []
    assert outbox.fetch("SELECT count(*) AS n, clock_timestamp() - now() < interval '1 day' FROM sales")[0]["n"] == 0

def test_with_a_fixture_that_fails(outbox, broken):
    outbox.publish("order.placed", {"order_id": "o-1"})

def test_after_that(outbox):
    assert outbox.published() == []
"""

INTERRUPTED = """
import signal, threading, os
import pytest

class Interrupted(Exception):
    pass

def interrupt(*_):
    raise Interrupted

def test_that_is_interrupted(outbox):
    import asyncio
    from holdfast import HandlerRegistry
    registry = HandlerRegistry()

    @registry.handler("order.stuck", name="ledger.stick")
    async def stick(event):
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(60)

    signal.signal(signal.SIGUSR1, interrupt)
    outbox.publish("order.stuck")
    with pytest.raises(Interrupted):
        outbox.drain(registry)

def test_after_it(outbox):
    outbox.publish("order.placed", {"order_id": "o-2"})
    assert outbox.drain().delivered == 1
"""

POOLS = """
import pytest
import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from holdfast import HandlerRegistry

registry = HandlerRegistry()

@registry.handler("order.kept", name="ledger.keep")
def keep(event, tx: psycopg.Connection):
    tx.execute("INSERT INTO sales (order_id) VALUES ('sync')")

@registry.handler("order.kept", name="ledger.keep_too")
async def keep_too(event, tx: psycopg.AsyncConnection):
    await tx.execute("INSERT INTO sales (order_id) VALUES ('async')")

@pytest.fixture
def holdfast_registry():
    return registry

@pytest.fixture
def holdfast_transactions(holdfast_dsn):
    return [
        ConnectionPool(holdfast_dsn, open=False, min_size=1), AsyncConnectionPool(holdfast_dsn, open=False, min_size=1)
    ]

@pytest.mark.parametrize("name", ["ledger.keep", "ledger.keep_too"])
def test_plain(outbox, name):
    outbox.crash_after_effect(name)
    outbox.publish("order.kept")
    outbox.drain()
    outbox.publish("order.kept")
    outbox.drain()
    assert outbox.fetch("SELECT count(*) AS n FROM sales")[0]["n"] == 4

@pytest.mark.parametrize("name", ["ledger.keep", "ledger.keep_too"])
async def test_asynchronous(async_outbox, name):
    async_outbox.crash_after_effect(name)
    async_outbox.publish("order.kept")
    await async_outbox.drain()
    async_outbox.publish("order.kept")
    await async_outbox.drain()
    assert async_outbox.fetch("SELECT count(*) AS n FROM sales")[0]["n"] == 4
"""


@pytest.mark.slow
def test_an_error_at_the_end_of_a_test_leaves_nothing_behind(tmp_path: Path, server: str) -> None:
    """The database is clean for the next test, whatever has failed (TST-1)."""
    result = run(tmp_path, BEHIND_AN_ERROR, "--holdfast-dsn", server)
    assert "4 passed, 2 errors" in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
def test_a_drain_that_is_interrupted_ends(tmp_path: Path, server: str) -> None:
    """A time limit of pytest's ends the drain too, which would deliver the events of the next test (TST-1)."""
    assert passed(run(tmp_path, INTERRUPTED, "--holdfast-dsn", server), 2)


@pytest.mark.slow
def test_a_pool_that_is_not_open_outlives_a_crash(tmp_path: Path, server: str) -> None:
    """Psycopg's pools, made as the documentation shows them, in plain and asynchronous tests (TST-2, LSN-13)."""
    assert passed(run(tmp_path, POOLS, "--holdfast-dsn", server), 4)


def test_a_crash_waits_for_the_locks_of_the_dead(outbox: Outbox, holdfast_dsn: str) -> None:
    """A server that is slow to end a transaction of the application's keeps nothing from being delivered (TST-2)."""
    registry, runs, locked = HandlerRegistry(), [], threading.Event()

    def hold_the_row() -> None:
        with psycopg.connect(holdfast_dsn) as connection:
            connection.execute("SELECT FROM core.outbox FOR UPDATE")  # when the killed transaction is rolled back
            locked.set()
            time.sleep(0.5)

    holding = threading.Thread(target=hold_the_row)

    @registry.handler("order.kept", name="ledger.keep")
    async def keep(event, tx) -> None:  # type: ignore[no-untyped-def]
        runs.append(event.event_id)
        if len(runs) == 1:
            holding.start()
            waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"
            await until(lambda: tx.fetchval(waits), what="the other session waits for the row")

    outbox.crash_after_effect("ledger.keep")
    outbox.publish("order.kept")
    try:
        drained = outbox.drain(registry)
    finally:
        holding.join()
    assert drained.delivered == 1 and len(runs) == 2 and locked.is_set()


async def test_events_that_follow_events_without_end() -> None:
    """A handler that publishes what it handles ends a drain with an error which says so (TST-2)."""
    memory = MemoryOutbox(registry := HandlerRegistry())
    publisher = memory.publisher("shop")

    @registry.handler("order.again", name="ledger.repeat")
    async def repeat(event, tx) -> None:  # type: ignore[no-untyped-def]
        await publisher.publish(tx, "order.again", {})

    memory.publish("order.again")
    with pytest.raises(AssertionError, match=r"order\.again was published 10,\d\d\d times"):
        await memory.drain()


def test_events_that_follow_events_without_end_in_postgres(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the real outbox, and with a limit that is reached sooner (TST-2)."""
    monkeypatch.setattr(delivering, "MOST_FOLLOWING", 1_000)
    monkeypatch.setattr(delivering, "MOST_FOR_EACH", 20)
    from holdfast import Publisher

    registry, publisher = HandlerRegistry(), Publisher("shop")

    @registry.handler("order.again", name="ledger.repeat")
    async def repeat(event, tx) -> None:  # type: ignore[no-untyped-def]
        await publisher.publish(tx, "order.again", {})

    for _ in range(50):
        outbox.publish("order.again")
    with pytest.raises(AssertionError, match=r"without end: order\.again was published"):
        outbox.drain(registry)


async def test_what_a_transaction_in_memory_is_not() -> None:
    """A handler that was written for a session of SQLAlchemy fails, and the outbox is as it was (TST-2)."""
    memory = MemoryOutbox(registry := HandlerRegistry())

    @registry.handler("order.placed", name="ledger.record")
    async def record(event, tx) -> None:  # type: ignore[no-untyped-def]
        tx.add(object())

    memory.publish("order.placed")
    await memory.drain()
    memory.assert_failed("ledger.record", error="tx of a MemoryOutbox has no add")
