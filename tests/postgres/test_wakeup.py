"""The bell and the sleeper, without workers: who is notified when, and who holds which lock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from uuid import uuid4

import asyncpg
import pytest

from holdfast.postgres.connection import Address, ReservedConnection
from holdfast.postgres.queries import Queries
from holdfast.postgres.wakeup.sleeper import Sleeper

pytestmark = pytest.mark.both_postgres

CHANNEL = "outbox_default"
INSERT = "INSERT INTO core.outbox (event_type, source, payload) VALUES ('order.placed', 'shop', '{}')"
ELSEWHERE = (
    "INSERT INTO core.outbox (event_type, source, payload, channel) VALUES ('order.placed', 'shop', '{}', 'cold')"
)


async def until(condition: Callable[[], object], within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.005)


class Bell:
    """Notifications on two channels, in order."""

    def __init__(self, listener: asyncpg.Connection, speaker: asyncpg.Connection) -> None:
        self._listener = listener
        self._speaker = speaker
        self._heard: list[tuple[str, str]] = []

    async def listen(self) -> None:
        for channel in (CHANNEL, "cold"):
            await self._listener.add_listener(
                channel, lambda _c, _p, channel, hint: self._heard.append((channel, hint))
            )

    async def rung(self) -> list[tuple[str, str]]:
        """What was heard since the last time. Notifications come in the order of commits: a last one ends them."""
        mark = str(uuid4())
        await self._speaker.execute("SELECT pg_notify('cold', $1)", mark)
        await until(lambda: ("cold", mark) in self._heard)
        heard, self._heard = self._heard[: self._heard.index(("cold", mark))], []
        return heard


@pytest.fixture
async def conn(shared_dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(shared_dsn)
    await connection.execute("TRUNCATE core.outbox")
    yield connection
    await connection.close()


@pytest.fixture
async def bell(shared_dsn: str, conn: asyncpg.Connection) -> AsyncIterator[Bell]:
    listener = await asyncpg.connect(shared_dsn)
    bell = Bell(listener, conn)
    await bell.listen()
    yield bell
    await listener.close()


class SleepingWorker:
    """A sleeper as a worker would have it."""

    def __init__(self, dsn: str) -> None:
        self.asked_to_look = 0
        self.id = uuid4()
        self.sleeper = Sleeper(ReservedConnection(Address(dsn), "sleeper"), Queries(), self.id, self._look)
        self.sleeper.hear(True)

    def _look(self) -> None:
        self.asked_to_look += 1


@pytest.fixture
async def sleepers(shared_dsn: str) -> AsyncIterator[list[SleepingWorker]]:
    made = [SleepingWorker(shared_dsn) for _ in range(2)]
    yield made
    for each in made:
        await each.sleeper.close()


async def advisory(conn: asyncpg.Connection, *, granted: bool = True) -> int:
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted = $1"
    return int(await conn.fetchval(query, granted))


async def test_nobody_sleeps_nobody_is_notified(conn: asyncpg.Connection, bell: Bell) -> None:
    """Commits that wake nobody send nothing, and keep no lock (B17)."""
    for _ in range(5):
        await conn.execute(INSERT)
    assert await bell.rung() == []
    assert await advisory(conn) == 0


async def test_one_notification_per_transaction_and_channel(
    conn: asyncpg.Connection, bell: Bell, sleepers: list[SleepingWorker]
) -> None:
    """With a sleeper each committing transaction rings once, however many rows it wrote and however (P4, D3)."""
    assert await sleepers[0].sleeper.fall_asleep(CHANNEL)
    assert [hint for _, hint in await bell.rung()] == [f"asleep {sleepers[0].id}"]
    async with conn.transaction():
        await conn.execute(
            "INSERT INTO core.outbox (event_type, source, payload) "
            "SELECT 'order.placed', 'shop', '{}' FROM generate_series(1, 5000)"
        )
        await conn.copy_records_to_table(
            "outbox",
            schema_name="core",
            columns=["event_type", "source", "payload", "idempotency_key"],
            records=[("order.placed", "shop", "{}", str(n)) for n in range(100)],
        )
        async with conn.transaction():
            await conn.execute(INSERT)
        await conn.execute(ELSEWHERE)
    assert await bell.rung() == [(CHANNEL, "")]  # nobody sleeps on the other channel
    for _ in range(3):
        await conn.execute(INSERT)
    assert len(await bell.rung()) == 3


async def test_what_is_rolled_back_rings_for_nobody(
    conn: asyncpg.Connection, bell: Bell, sleepers: list[SleepingWorker]
) -> None:
    """Neither a transaction that is rolled back nor a savepoint; what stays after a savepoint still rings (E6)."""
    await sleepers[0].sleeper.fall_asleep(CHANNEL)
    await bell.rung()
    with pytest.raises(RuntimeError):
        async with conn.transaction():
            await conn.execute(INSERT)
            raise RuntimeError
    async with conn.transaction():
        with pytest.raises(RuntimeError):
            async with conn.transaction():
                await conn.execute(INSERT)
                raise RuntimeError
    assert await bell.rung() == []
    async with conn.transaction():
        with pytest.raises(RuntimeError):
            async with conn.transaction():
                await conn.execute(INSERT)
                raise RuntimeError
        await conn.execute(INSERT)
    assert len(await bell.rung()) == 1
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == 1


async def test_producers_may_opt_out(conn: asyncpg.Connection, bell: Bell, sleepers: list[SleepingWorker]) -> None:
    """With holdfast.notify = off a transaction neither notifies nor takes the lock (E6)."""
    await sleepers[0].sleeper.fall_asleep(CHANNEL)
    await bell.rung()
    async with conn.transaction():
        await conn.execute("SET LOCAL holdfast.notify = 'off'")
        await conn.execute(INSERT)
    assert await bell.rung() == []
    await conn.execute(INSERT)
    assert len(await bell.rung()) == 1


async def test_one_sleeper_per_channel(conn: asyncpg.Connection, bell: Bell, sleepers: list[SleepingWorker]) -> None:
    """The second worker, the deputy, relies on the first one's locks, and takes over when it gets up or dies (P4)."""
    one, two = (each.sleeper for each in sleepers)
    assert await one.fall_asleep(CHANNEL)
    assert one.asleep(CHANNEL) and one.chosen
    assert not await one.fall_asleep(CHANNEL), "it is asleep already: there is nothing to look for"
    assert not await two.fall_asleep(CHANNEL)
    assert two.deputy and two.chosen
    assert not await two.fall_asleep(CHANNEL), "the sleeper lives"
    assert await advisory(conn) == 3
    await one.get_up()
    assert not one.chosen
    assert await advisory(conn) == 1
    assert await two.fall_asleep(CHANNEL)
    assert not two.deputy
    assert not await one.fall_asleep(CHANNEL)
    assert one.deputy
    await two.close()
    await until_left(conn, 1)
    assert await one.fall_asleep(CHANNEL)
    assert await advisory(conn) == 2
    assert [hint.split()[0] for _, hint in await bell.rung()] == ["asleep", "awake", "asleep", "asleep"]


async def test_a_sleeper_that_does_not_sleep(
    conn: asyncpg.Connection, bell: Bell, sleepers: list[SleepingWorker]
) -> None:
    """One that died between its two locks rings no bell; its deputy has every worker look, until it is gone (P4)."""
    (_, two), name = (each.sleeper for each in sleepers), f"core.{CHANNEL}/sleeper"
    await conn.execute("SELECT pg_advisory_lock(hashtextextended($1, 0))", name)
    assert not await two.fall_asleep(CHANNEL)
    assert await two.fall_asleep(CHANNEL), "as the deputy it looks itself"
    assert [hint.split()[0] for _, hint in await bell.rung()] == ["awake"]
    await conn.execute("SELECT pg_advisory_unlock_all()")
    assert await two.fall_asleep(CHANNEL)
    assert two.asleep(CHANNEL) and not two.deputy


async def until_left(conn: asyncpg.Connection, locks: int) -> None:
    deadline = time.monotonic() + 5
    while await advisory(conn) > locks:
        assert time.monotonic() < deadline, "a lock outlived its holder"
        await asyncio.sleep(0.01)


async def test_each_channel_has_its_own_sleeper(conn: asyncpg.Connection, sleepers: list[SleepingWorker]) -> None:
    """Different workers may sleep on different channels, and one worker several (OBX-4)."""
    one, two = (each.sleeper for each in sleepers)
    assert await one.fall_asleep(CHANNEL)
    assert await two.fall_asleep("cold")
    assert not await two.fall_asleep(CHANNEL)
    assert await one.fall_asleep("hot")
    assert await advisory(conn) == 7
    await one.get_up()
    assert await advisory(conn) == 3
    assert two.asleep("cold") and two.deputy


async def test_commits_under_way_are_waited_for(
    shared_dsn: str, conn: asyncpg.Connection, bell: Bell, sleepers: list[SleepingWorker]
) -> None:
    """A commit that saw nobody asleep is waited for; everybody who comes after it already rings (P4, E4)."""
    worker = sleepers[0]
    producer = await asyncpg.connect(shared_dsn)
    async with producer.transaction():
        await producer.execute("SET CONSTRAINTS ALL IMMEDIATE")  # as if it were in the middle of its commit
        await producer.execute(INSERT)
        assert not await worker.sleeper.fall_asleep(CHANNEL)
        assert worker.sleeper.chosen and not worker.sleeper.asleep(CHANNEL)
        deadline = time.monotonic() + 5
        while not await advisory(conn, granted=False):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await conn.execute(INSERT)
        assert [channel for channel, _ in await bell.rung()] == [CHANNEL]
        assert worker.asked_to_look == 0
        # It cannot be given up half-way, and must not be asked to.
        await worker.sleeper.get_up()
        await worker.sleeper.ping()
        assert not await worker.sleeper.fall_asleep("cold")
    await producer.close()
    await until(lambda: worker.asked_to_look == 1)
    assert worker.sleeper.asleep(CHANNEL)
    assert [hint.split()[0] for _, hint in await bell.rung()] == ["asleep"]
    await worker.sleeper.get_up()
    assert await advisory(conn) == 0


async def test_sleeper_that_waits_can_be_closed(
    shared_dsn: str, conn: asyncpg.Connection, sleepers: list[SleepingWorker]
) -> None:
    """Closing does not wait for the producer, and the lock does not outlive it (P5)."""
    producer = await asyncpg.connect(shared_dsn)
    async with producer.transaction():
        await producer.execute("SET CONSTRAINTS ALL IMMEDIATE")
        await producer.execute(INSERT)
        await sleepers[0].sleeper.fall_asleep(CHANNEL)
        started = time.monotonic()
        await sleepers[0].sleeper.close()
        assert time.monotonic() - started < 1
    await producer.close()
    await until_left(conn, 0)


@pytest.mark.parametrize("how", ["terminated", "reset"])
async def test_lost_connection_is_noticed(conn: asyncpg.Connection, sleepers: list[SleepingWorker], how: str) -> None:
    """When the sleeper's connection ends, the worker looks again, and can fall asleep again (B1)."""
    worker = sleepers[0]
    await worker.sleeper.fall_asleep(CHANNEL)
    if how == "terminated":
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holdfast sleeper'"
        await conn.execute(query + " AND datname = current_database()")
    else:
        worker.sleeper.reset()
    await until(lambda: worker.asked_to_look == 1)
    assert not worker.sleeper.chosen
    await until_left(conn, 0)
    assert await worker.sleeper.fall_asleep(CHANNEL)
    assert worker.asked_to_look == 1


async def test_deaf_worker_does_not_fall_asleep(
    conn: asyncpg.Connection, bell: Bell, sleepers: list[SleepingWorker]
) -> None:
    """A bell that the worker itself would not hear is not rung for it (LSN-2)."""
    worker = sleepers[0]
    worker.sleeper.hear(False)
    assert not await worker.sleeper.fall_asleep(CHANNEL)
    await conn.execute(INSERT)
    assert await bell.rung() == []
    worker.sleeper.hear(True)
    assert await worker.sleeper.fall_asleep(CHANNEL)


async def test_sleeper_without_a_database(sleepers: list[SleepingWorker]) -> None:
    """No connection is no sleeper, and no error (LSN-2)."""
    nowhere = SleepingWorker("postgresql://nobody@127.0.0.1:1/none")
    assert not await nowhere.sleeper.fall_asleep(CHANNEL)
    await nowhere.sleeper.ping()
    await nowhere.sleeper.get_up()
    assert not nowhere.sleeper.chosen
    assert nowhere.asked_to_look == 0
    await nowhere.sleeper.close()


@pytest.mark.slow
async def test_no_commit_slips_through(shared_dsn: str, conn: asyncpg.Connection) -> None:
    """At every moment around falling asleep, a commit either rings or is seen by the look that follows.

    One worker falls asleep and gets up as fast as it can, producers commit as fast as they can. What a look has not
    seen and no notification has announced by the time the worker sleeps is lost; nothing may be (P4).
    """
    worker, listener = SleepingWorker(shared_dsn), await asyncpg.connect(shared_dsn)
    # The bell says nothing about what was committed; here it has to.
    bell = await conn.fetchval("SELECT pg_get_functiondef('core.outbox_notify()'::regprocedure)")
    await conn.execute(bell.replace("pg_notify(NEW.channel, '')", "pg_notify(NEW.channel, NEW.id::pg_catalog.text)"))
    announced: set[str] = set()
    await listener.add_listener(CHANNEL, lambda *arguments: announced.add(arguments[3]))
    stop = time.monotonic() + 3
    committed: list[str] = []

    async def produce() -> None:
        connection = await asyncpg.connect(shared_dsn)
        while time.monotonic() < stop:
            committed.append(str(await connection.fetchval(INSERT + " RETURNING id")))
            await asyncio.sleep(0)
        await connection.close()

    producers = [asyncio.create_task(produce()) for _ in range(3)]
    seen: set[str] = set()
    naps = 0
    while time.monotonic() < stop:
        looks = worker.asked_to_look
        if not await worker.sleeper.fall_asleep(CHANNEL):
            await until(lambda: worker.asked_to_look > looks)  # noqa: B023
        # Asleep: the one look that is allowed. From here on only the bell may tell.
        seen |= {str(each["id"]) for each in await conn.fetch("SELECT id FROM core.outbox")}
        naps += 1
        known = list(committed)  # returned from their commits by now, before or after the look
        await asyncio.sleep(0.002)
        async with asyncio.timeout(5):
            while missed := set(known) - seen - announced:
                # A notification may still be on its way to the listening session, a wake-up that was never sent not.
                await listener.execute("SELECT 1")
                if set(known) - seen - announced == missed:
                    await asyncio.sleep(0.05)
                    await listener.execute("SELECT 1")
                    assert not set(known) - seen - announced, f"nobody was told of {missed}, nap {naps}"
        await worker.sleeper.get_up()
    await asyncio.gather(*producers)
    await worker.sleeper.close()
    await listener.close()
    await conn.execute(bell)
    assert naps > 20
    assert len(committed) > 200
    assert announced & set(committed), "no commit ever met a sleeper"
