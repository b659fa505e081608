"""A generation is begun, used and retired by commands, and nothing strands without a word about it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, WorkerSettings
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Refused
from holdfast.postgres import publishing
from holdfast.worker import maintenance
from tests.operator.support import HANDLER, beat
from tests.worker.support import Facts, drained, running, settled, until

pytestmark = pytest.mark.newcomer

VARIABLE = "HOLDFAST_GENERATION"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
async def operator(dsn: str) -> AsyncIterator[Operator]:
    async with Operator(dsn, actor="ann@example.org") as operator:
        yield operator


async def published(conn: asyncpg.Connection, publisher: Publisher | None = None) -> list[tuple[int, str]]:
    """Generation and channel of an event by each way of publishing."""
    publisher = publisher or Publisher("shop")
    async with conn.transaction():
        await conn.execute("DELETE FROM core.outbox")
        await publisher.publish(conn, "order.placed", {})
        await publisher.publish(conn, "order.placed", {}, priority=0)
        await publisher.publish_many(conn, [NewEvent("order.placed", {}), NewEvent("order.placed", {}, delay=60)])
        rows = await conn.fetch("SELECT generation, channel FROM core.outbox")
    assert len(rows) == 4
    return sorted({(row["generation"], row["channel"]) for row in rows})


# --- beginning ---


async def command(dsn: str, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "holdfast", *arguments,
        env={**os.environ, "HOLDFAST_DSN": dsn, "HOLDFAST_ACTOR": "ann"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_a_deployment_is_begun_by_a_command(dsn: str, conn: asyncpg.Connection) -> None:
    """The number alone is printed, for a script to take (GEN-3)."""
    assert await command(dsn, "generations", "begin", "--label", "v1.4.2") == "1\n"
    assert json.loads(await command(dsn, "generations", "begin", "--json")) == {"generation": 2, "label": None}
    rows = await conn.fetch("SELECT generation, label, retired_at FROM core.deployments ORDER BY 1")
    assert [tuple(row) for row in rows] == [(1, "v1.4.2", None), (2, None, None)]
    lines = await conn.fetch("SELECT actor, action, (arguments->>'generation')::int FROM core.audit ORDER BY id")
    assert [tuple(line) for line in lines] == [("ann", "generation.begin", 1), ("ann", "generation.begin", 2)]


async def test_two_that_begin_at_once_get_two_numbers(dsn: str) -> None:
    """GEN-3."""

    async def begin() -> int:
        async with Operator(dsn, actor="ann") as operator:
            return await operator.generations.begin()

    assert sorted(await asyncio.gather(*(begin() for _ in range(4)))) == [1, 2, 3, 4]


async def test_a_number_that_is_in_use_is_left_out(conn: asyncpg.Connection, operator: Operator) -> None:
    """By a worker or by events, without a deployment; and retired ones are not used again (GEN-3)."""
    await conn.execute("INSERT INTO core.deployments (generation, retired_at) VALUES (4, now())")
    await beat(conn, "by hand", HANDLER, generation=5)
    async with conn.transaction():
        await Publisher("shop", generation=6).publish(conn, "order.placed", {})
    assert await operator.generations.begin() == 7


async def test_the_last_number_is_refused(conn: asyncpg.Connection, operator: Operator) -> None:
    """With a sentence, instead of an overflow (GEN-3)."""
    await conn.execute("INSERT INTO core.deployments (generation) VALUES (9223372036854775807)")
    with pytest.raises(asyncpg.NumericValueOutOfRangeError, match="no generation after"):
        await operator.generations.begin()


@pytest.mark.parametrize("label", ["", "a\x00b", "a\nb", "x" * 3_000, 7])
async def test_a_bad_label_is_refused(operator: Operator, conn: asyncpg.Connection, label: str) -> None:
    """GEN-3."""
    with pytest.raises(ConfigurationError, match="label"):
        await operator.generations.begin(label)
    assert await conn.fetchval("SELECT count(*) FROM core.deployments") == 0


# --- whose generation a publisher takes ---


async def test_without_deployments_everything_is_generation_0(conn: asyncpg.Connection) -> None:
    """Newcomers never meet the idea (GEN-3)."""
    assert await published(conn) == [(0, "outbox_default")]
    assert WorkerSettings().generation == 0


async def test_a_script_without_a_number_takes_the_database_s(
    conn: asyncpg.Connection, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current one, by a publisher that was made before; it asks once a second at most (GEN-3)."""
    publisher = Publisher("shop")
    monkeypatch.setattr(publishing, "_CURRENT_FOR", 0.0)
    assert await published(conn, publisher) == [(0, "outbox_default")]
    await operator.generations.begin()
    assert await published(conn, publisher) == [(1, "outbox_gen_1")]
    monkeypatch.setattr(publishing, "_CURRENT_FOR", 1.0)
    await operator.generations.begin()
    assert await published(conn, publisher) == [(2, "outbox_gen_2")]
    assert await published(conn, Publisher("shop", channel="hot")) == [(2, "hot")]
    asked = "SELECT calls FROM pg_stat_xact_user_functions WHERE funcname = 'current_generation'"
    publisher = Publisher("shop")
    async with conn.transaction():
        await conn.execute("SET LOCAL track_functions = 'all'")
        for _ in range(50):
            await publisher.publish(conn, "order.placed", {})
        assert await conn.fetchval(asked) < 25


async def test_the_environment_comes_before_the_database(
    conn: asyncpg.Connection, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod of the old deployment publishes for its own workers, while the next one begins (GEN-3)."""
    assert await operator.generations.begin() == 1
    monkeypatch.setenv(VARIABLE, "1")
    publisher = Publisher("shop")
    assert await operator.generations.begin() == 2
    assert await published(conn, publisher) == [(1, "outbox_gen_1")]
    assert WorkerSettings().generation == 1
    assert await published(conn, Publisher("shop", generation=2)) == [(2, "outbox_gen_2")]


async def test_the_worker_comes_before_the_environment(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its handlers publish, and what requests beside it publish, its own generation handles (GEN-3)."""
    monkeypatch.setenv(VARIABLE, "7")
    publisher, registry = Publisher("shop"), HandlerRegistry()
    seen: list[str] = []

    @registry.handler("order.*", name="billing.charge")
    async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        seen.append(event.event_type)
        if event.event_type == "order.placed":
            await publisher.publish(tx, "order.charged", {})

    async with running(dsn, registry, generation=3, poll_interval=0.2):
        async with conn.transaction():
            await publisher.publish(conn, "order.placed", {})
        await until(lambda: len(seen) == 2, what="both are handled")
        await drained(conn)
        assert await conn.fetchval("SELECT array_agg(DISTINCT generation) FROM core.outbox") == [3]
        # Beside a worker of another deployment, each handler's events stay with its own worker.
        async with running(dsn, registry, generation=4, poll_interval=0.2):
            async with conn.transaction():
                await Publisher("shop", generation=4).publish(conn, "order.placed", {})
            await until(lambda: len(seen) == 4, what="both are handled there")
            await drained(conn)
            assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE generation = 4") == 2
            assert await published(conn, publisher) == [(7, "outbox_gen_7")]
    assert await published(conn, publisher) == [(7, "outbox_gen_7")]


@pytest.mark.parametrize("value", ["v1", "-1", "1.0", " 1", "9223372036854775808", "¹", "1\n"])
def test_a_bad_number_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """By publishers and workers alike, before anything is written (GEN-3)."""
    monkeypatch.setenv(VARIABLE, value)
    for make in (lambda: Publisher("shop"), WorkerSettings):
        with pytest.raises(ConfigurationError, match=VARIABLE):
            make()
    assert WorkerSettings(generation=1).generation == 1


# --- nothing strands without a word ---


async def test_a_worker_names_events_that_nobody_serves(
    dsn: str, conn: asyncpg.Connection, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stale pod, of a retired generation, and of a deployment that has begun without workers (GEN-3)."""
    monkeypatch.setattr(maintenance, "_INTERVAL", 0.1)
    for _ in range(3):
        await operator.generations.begin()
    await operator.generations.retire(1)
    registry, facts = HandlerRegistry(), Facts()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None: ...

    async with conn.transaction():
        for generation in (1, 3):
            await Publisher("shop", generation=generation).publish(conn, "order.placed", {})
    async with running(dsn, registry, facts, generation=2, poll_interval=0.2):
        await until(lambda: len(facts.notices("channel_unserved")) == 2, what="both are named")
        old, new = facts.notices("channel_unserved")
        assert (old.details["generation"], new.details["generation"]) == (1, 3)
        assert "correct HOLDFAST_GENERATION where they are published" in str(old.details["remedy"])
        assert "holdfast generations move 1 --to 2" in str(old.details["remedy"])
        assert "if that deployment was given up: holdfast generations retire 3 --force" in str(new.details["remedy"])
        # What the log says works.
        assert (await operator.generations.move(1, 2)).moved == 1
        await operator.generations.retire(3, force=True)
        assert (await operator.generations.move(3, 2)).moved == 1
        await drained(conn)
        assert await published(conn) == [(2, "outbox_gen_2")]


async def test_a_rollback_makes_the_generation_before_it_current(conn: asyncpg.Connection, operator: Operator) -> None:
    """Writers that name none publish for the workers that are there; without such workers it is refused (GEN-3)."""
    for _ in range(2):
        await operator.generations.begin()
    with pytest.raises(Refused, match="no living worker serves generation 1"):
        await operator.generations.retire(2, force=True)
    await beat(conn, "old", HANDLER, generation=1)
    with pytest.raises(Refused, match="is the current one"):
        await operator.generations.retire(2)
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="2 is the current one"):
        await conn.fetch("SELECT core.generation_retire(2, false, 'ann')")
    await operator.generations.retire(2, force=True, reason="it was broken")
    assert await published(conn) == [(1, "outbox_gen_1")]
    with pytest.raises(Refused, match="is the current one"):
        await operator.generations.retire(1, force=True)


async def test_the_first_deployment_leaves_nothing_behind(
    dsn: str, conn: asyncpg.Connection, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From none to 1: workers of generation 0 finish their own, and then nothing knows 0 (GEN-3)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge")
    async def charge(event: EventEnvelope) -> None: ...

    async with running(dsn, registry, poll_interval=0.2):
        async with conn.transaction():
            old = await Publisher("shop").publish(conn, "order.placed", {})
        monkeypatch.setenv(VARIABLE, str(await operator.generations.begin()))
        await settled(conn, old.event_id)
    async with running(dsn, registry, poll_interval=0.2):
        async with conn.transaction():
            new = await Publisher("shop").publish(conn, "order.placed", {})
        assert (await settled(conn, new.event_id))["generation"] == 1
    assert [each.generation for each in await operator.generations.all()] == [1]
