"""The outbox of a test, on Postgres (TST-1, TST-2)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy, Snooze, WorkerSettings
from holdfast.embedded import EmbeddedPostgres
from holdfast.errors import ConfigurationError
from holdfast.testing import AsyncOutbox, Outbox, OutboxContract
from holdfast.testing.databases import TestDatabase, copy_template, make_template
from holdfast.testing.loop import kit_loop
from tests.docs.support import ROOT
from tests.servers import servers_by_major


def registry_of(calls: list[str]) -> HandlerRegistry:
    """One handler of each kind that a worker runs in its own way."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="kinds.plain")
    async def plain(event: EventEnvelope) -> None:
        calls.append("plain")

    @registry.handler("order.placed", name="kinds.thread")
    def thread(event: EventEnvelope) -> None:
        assert threading.current_thread() is not threading.main_thread()
        calls.append("thread")

    @registry.handler("order.placed", name="kinds.tx")
    async def tx(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        calls.append("tx")
        await tx.execute("INSERT INTO core.deployments (generation, label) VALUES (1, 'effect')")

    return registry


# How often a handler is called, and with `tx` how often its effect happens.
FAULTS = {
    "crash_after_effect": {"plain": 2, "thread": 2, "tx": 2},
    "lose_commit_answer": {"plain": 1, "thread": 1, "tx": 1},
    "duplicate_delivery": {"plain": 2, "thread": 2, "tx": 1},
    "expire_lease": {"plain": 2, "thread": 2, "tx": 1},
}


@pytest.mark.parametrize("kind", ["plain", "thread", "tx"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_every_kind_of_handler(outbox: Outbox, fault: str, kind: str) -> None:
    """The delivery ends well, the others are not touched, and only what may happen twice does (TST-2)."""
    calls: list[str] = []
    outbox.publish("order.placed", {})
    getattr(outbox, fault)(f"kinds.{kind}")
    outbox.drain(registry_of(calls))
    outbox.assert_all_delivered()
    assert calls.count(kind) == FAULTS[fault][kind]
    for other in {"plain", "thread", "tx"} - {kind}:
        # A worker that dies has its other deliveries in flight as well.
        assert calls.count(other) in ((1, 2) if fault == "crash_after_effect" else (1,))
    assert len(outbox.fetch("SELECT FROM core.deployments")) == 1
    assert outbox.faults_left == []


@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_in_an_asynchronous_test(async_outbox: AsyncOutbox, fault: str) -> None:
    """TST-2."""
    calls: list[str] = []
    async_outbox.publish("order.placed", {})
    getattr(async_outbox, fault)("kinds.tx")
    await async_outbox.drain(registry_of(calls))
    async_outbox.assert_all_delivered()
    assert len(async_outbox.fetch("SELECT FROM core.deployments")) == 1


def test_dead_letters_can_be_archived(holdfast_database: TestDatabase) -> None:
    """And are found there (TST-1)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="mail.confirm", retry=RetryPolicy(max_attempts=2))
    async def confirm(event: EventEnvelope) -> None:
        raise TimeoutError("no answer")

    outbox = Outbox(holdfast_database, registry, WorkerSettings(dead_letters="archive"))
    outbox.publish("order.placed", {"order_id": "o-1"})
    outbox.drain()
    assert outbox.assert_failed("mail.confirm", {"order_id": "o-1"}, error="no answer", attempts=2).archived
    outbox.assert_published("order.placed", times=1)
    with pytest.raises(AssertionError, match=r"mail.confirm  archived \(retry_terminal, attempt 2: .*no answer"):
        outbox.assert_nothing_failed()


def test_backoff_is_the_policys(outbox: Outbox) -> None:
    """On a frozen clock, to the second (TST-1)."""
    registry, at = HandlerRegistry(), list[datetime]()
    policy = RetryPolicy(max_attempts=4, base_delay=100, max_delay=100, strategy="constant")

    @registry.handler("order.placed", name="mail.confirm", retry=policy)
    def confirm(event: EventEnvelope) -> None:
        at.append(outbox.now)
        raise TimeoutError

    start = outbox.freeze("2026-01-01T00:00:00+00:00")
    outbox.publish("order.placed", {})
    outbox.drain(registry)
    assert at[0] == start and len(at) == 4 and outbox.now == at[-1]
    assert all(timedelta(0) < later - earlier <= timedelta(seconds=100) for earlier, later in pairwise(at))


def test_what_is_put_off_for_ever_ends_the_drain(outbox: Outbox) -> None:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="mail.confirm")
    async def confirm(event: EventEnvelope) -> Snooze:
        return Snooze(60)

    outbox.publish("order.placed", {})
    with pytest.raises(AssertionError, match="put off a hundred times"):
        outbox.drain(registry)


async def test_misuse_of_the_outbox_is_refused_with_a_remedy(outbox: Outbox, async_outbox: AsyncOutbox) -> None:
    """With what to do instead (TST-1)."""
    registry = registry_of([])
    with pytest.raises(ConfigurationError, match="called in an asynchronous test; use the fixture async_outbox"):
        outbox.drain(registry)
    with pytest.raises(ConfigurationError, match="registry is not known; pass drain"):
        await async_outbox.drain()
    with pytest.raises(ConfigurationError, match="registry has no handlers"):
        await async_outbox.drain(HandlerRegistry())
    with pytest.raises(ConfigurationError, match=r"freeze\.at"):
        outbox.freeze("2026-01-01T00:00:00")
    with pytest.raises(ConfigurationError, match="the clock goes forward only"):
        outbox.move_clock(hours=-1)


@pytest.mark.parametrize("milliseconds", [5, 15, 25])
def test_what_becomes_due_before_the_next_look_is_delivered(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, milliseconds: int
) -> None:
    """The clock goes on between a delivery and the look for the next one (TST-1)."""
    registry, calls, fetch = HandlerRegistry(), [], TestDatabase.fetch

    async def slowly(self: TestDatabase, name: str, **values: object) -> Any:
        if name == "due":
            await asyncio.sleep(0.02)
        return await fetch(self, name, **values)

    @registry.handler("order.placed", name="mail.confirm")
    async def confirm(event: EventEnvelope) -> Snooze | None:
        calls.append(event)
        await asyncio.sleep(0.03)
        return Snooze(milliseconds / 1000) if len(calls) < 3 else None

    monkeypatch.setattr(TestDatabase, "fetch", slowly)
    outbox.publish("order.placed", {})
    outbox.drain(registry)
    outbox.assert_all_delivered()
    assert len(calls) == 3


def test_what_workers_report_is_shown(outbox: Outbox) -> None:
    """An error that is no handler's must not be silent in a test (TST-1)."""

    @asynccontextmanager
    async def resources() -> AsyncIterator[None]:
        yield
        raise RuntimeError("cannot be closed")

    registry = HandlerRegistry(lifespan=resources)
    registry.add("books.note", ("order.placed",), print)
    outbox.drain(registry)
    assert "Notice: lifespan_failed" in outbox.describe() and "cannot be closed" in outbox.describe()


def test_a_handler_in_a_thread_may_ask_the_outbox(outbox: Outbox) -> None:
    """And what it publishes carries the ids of the event that it handles (TST-1)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="books.note")
    def note(event: EventEnvelope) -> None:
        outbox.publish("order.noted", {})

    placed = outbox.publish("order.placed", {})
    outbox.drain(registry)
    noted = outbox.assert_published("order.noted", headers={"causation_id": str(placed.event_id)})
    assert noted.occurred_at >= placed.occurred_at


def test_nothing_of_the_kit_is_in_the_schema() -> None:
    """A clock that can be moved is no part of what production runs."""
    for file in Path(ROOT / "src" / "holdfast" / "postgres").rglob("*"):
        if file.suffix in (".py", ".sql"):
            assert "holdfast_testing" not in file.read_text()


def test_the_clock_of_another_database_is_the_servers(outbox: Outbox, holdfast_dsn: str) -> None:
    """Only the database of the tests has one that can be moved."""
    outbox.freeze("2030-01-01T00:00:00+00:00")

    async def ask() -> Any:
        connection = await asyncpg.connect(holdfast_dsn, database="postgres")
        try:
            return await connection.fetchval("SELECT clock_timestamp()")
        finally:
            await connection.close()

    assert kit_loop().run(ask()).year < 2030 and outbox.now == datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.skipif(15 not in servers_by_major(), reason="there is no Postgres 15 on this machine")
class TestOldestPostgres(OutboxContract):
    """The contract on the oldest server that is supported, in another schema."""

    @pytest.fixture(scope="class")
    @classmethod
    def database(cls) -> Any:
        with EmbeddedPostgres(binaries=servers_by_major()[15]) as server:
            kit_loop().run(make_template(server.dsn, "holdfast_test_t", (), "events"))
            kit_loop().run(copy_template(server.dsn, "holdfast_test_c", "holdfast_test_t"))
            yield TestDatabase(server.dsn, "holdfast_test_c", "holdfast_test_t", "events")
            kit_loop().run(Outbox.warm.close())

    @pytest.fixture
    def substrate(self, database: TestDatabase) -> Any:
        yield Outbox(database)
        assert kit_loop().run(database.reset()) is None
