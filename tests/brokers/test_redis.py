"""What is special to Redis: WAIT and appendfsync, claims, trimmed entries, groups that vanish, consumers that go."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast.brokers.addresses import address_of
from holdfast.brokers.engine import BrokerUnavailable, Confirmed, Unanswered
from holdfast.brokers.redis import RedisEngine
from holdfast.brokers.redis.link import Link
from holdfast.brokers.redis.scripts import DELETE_EMPTY, TRIM_READ, owner_of
from holdfast.errors import ConfigurationError
from servers.valkey import DURABLE, ValkeyServer, proxied, valkey_with_replica
from tests.brokers.messages import CHANNEL, interest, number_of, numbers, outgoing, sent, taken, until

STREAM = "hf:{events}:0"
GROUP = "billing.charge"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path / "valkey", *DURABLE) as started:
        yield started


@pytest.mark.parametrize(
    "address",
    ["nats://h", "redis://", "redis://h?replica=1", "redis://h?fsync=2", "redis://h?keep=0", "redis://h/name"],
)
def test_wrong_addresses_are_refused(address: str) -> None:
    """A mistyped option is named, not ignored (SCL-2)."""
    with pytest.raises(ConfigurationError, match="substrate"):
        RedisEngine(address)


async def test_what_was_confirmed_survives_kill_9(server: ValkeyServer) -> None:
    """With appendfsync always, a confirmation is true, and position and pending entries survive as well (SCL-1)."""
    engine = RedisEngine(server.address)
    sink, source = engine.sink(lease=30), engine.source(interest(), lease=1)
    batch = [outgoing(number) for number in range(450)]
    assert set(await sink.send(batch, timeout=10)) == {Confirmed()}
    await taken(source, 100)
    unsettled = await source.take(5, wait=2)
    server.restart()
    got: set[int] = set()
    async with asyncio.timeout(20):
        while len(got) < 350:
            try:
                messages = await source.take(100, wait=0.5)
                await source.acknowledge(messages)
            except BrokerUnavailable:
                continue
            got.update(numbers(messages))
    assert got == set(range(100, 450))
    assert set(numbers(unsettled)) <= got
    await sink.close()
    await source.close()


async def test_one_answer_eaten_is_one_copy_more_and_no_loss(server: ValkeyServer) -> None:
    """When the answer is lost the event is sent again by the relay, never by the client (SCL-1)."""
    with proxied(server.port) as proxy:
        engine = RedisEngine(f"redis://127.0.0.1:{proxy.port}")
        sink = engine.sink(lease=30)
        assert list(await sink.send([outgoing(0)], timeout=5)) == [Confirmed()]
        proxy.swallow_answers.set()
        batch = [outgoing(number) for number in range(1, 11)]
        answers = await sink.send(batch, timeout=1)
        assert {type(answer) for answer in answers} == {Unanswered}
        proxy.swallow_answers.clear()
        async with server.client() as client:
            assert await client.xlen(STREAM) == 11
        await sent(sink, batch)
        async with server.client() as client:
            assert await client.xlen(STREAM) == 21
        await sink.close()


@pytest.mark.slow
async def test_a_replica_that_is_promoted_has_what_was_confirmed(tmp_path: Path) -> None:
    """With replicas=1 nothing counts as sent that the replica lacks, so that its promotion loses nothing (SCL-1)."""
    with valkey_with_replica(tmp_path) as (primary, replica, proxy):

        async def follows() -> bool:
            async with primary.client() as client:
                (_, _, replicas) = await client.execute_command("ROLE")
                return len(replicas) == 1

        await until(follows)
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{replica.port}"
        engine = RedisEngine(f"redis://{hosts}?replicas=1")
        sink = engine.sink(lease=30)
        assert set(await sink.send([outgoing(number) for number in range(200)], timeout=10)) == {Confirmed()}
        proxy.swallow_answers.set()
        answers = await sink.send([outgoing(number) for number in range(200, 300)], timeout=1)
        assert {type(answer) for answer in answers} == {Unanswered}
        careless = RedisEngine(f"redis://{hosts}").sink(lease=30)
        assert list(await careless.send([outgoing(999)], timeout=5)) == [Confirmed()]
        primary.kill()
        async with replica.client() as client:
            await client.execute_command("REPLICAOF", "NO", "ONE")
            stored = await client.xlen(STREAM)
        assert stored == 200
        source = RedisEngine(f"redis://{hosts}").source(interest(), lease=30)
        assert numbers(await taken(source, 200)) == list(range(200))
        alone = RedisEngine(f"redis://{hosts}").sink(lease=30)
        assert list(await alone.send([outgoing(300)], timeout=5)) == [Confirmed()]
        for each in (sink, careless, source, alone):
            await each.close()


def test_a_connection_that_was_reset_is_an_outage_with_uvloop(server: ValkeyServer) -> None:
    """The loop of workers refuses to write to it with an error of its own, and the next try connects anew (SCL-2)."""
    import uvloop

    async def ask() -> None:
        link = Link(address_of(server.address, ("redis",), ()), "test")
        await link.open()
        assert link._connection is not None and link._connection._writer is not None
        link._connection._writer.transport.abort()
        await asyncio.sleep(0.05)  # until the loop has closed it
        with pytest.raises(BrokerUnavailable):
            await link.ask("PING")
        assert await link.ask("PING") == b"PONG"
        await link.close()

    uvloop.run(ask())


async def test_fsync_waits_for_the_disk(tmp_path: Path) -> None:
    """fsync=1 makes a confirmation true with appendfsync everysec; without an AOF nothing is confirmed (SCL-1)."""
    with ValkeyServer(tmp_path / "a", "--appendonly", "yes", "--appendfsync", "everysec") as server:
        sink = RedisEngine(f"{server.address}?fsync=1").sink(lease=30)
        assert set(await sink.send([outgoing(number) for number in range(20)], timeout=10)) == {Confirmed()}
        await sink.close()
    with ValkeyServer(tmp_path / "b", "--appendonly", "no") as server:
        sink = RedisEngine(f"{server.address}?fsync=1").sink(lease=30)
        (answer,) = await sink.send([outgoing(0)], timeout=5)
        assert isinstance(answer, Unanswered)
        await sink.close()


async def test_a_full_server_answers_each_event_and_drops_none(tmp_path: Path) -> None:
    """Out of memory is no failure of an event: its row stays, and is sent when there is room (SCL-1)."""
    with ValkeyServer(tmp_path / "full", *DURABLE, "--maxmemory-policy", "noeviction") as server:
        sink = RedisEngine(server.address).sink(lease=30)
        await sent(sink, [outgoing(0)])
        async with server.client() as client:
            await client.config_set("maxmemory", "1")
            (answer,) = await sink.send([outgoing(1)], timeout=5)
            assert isinstance(answer, Unanswered) and "maxmemory" in answer.error
            await client.config_set("maxmemory", "0")
            await sent(sink, [outgoing(1)])
            assert await client.xlen(STREAM) == 2
        await sink.close()


@pytest.mark.slow
async def test_a_frozen_server_costs_the_timeout_and_no_more(server: ValkeyServer) -> None:
    """Answers come within the timeout, and takers learn that nobody is there (SCL-1)."""
    engine = RedisEngine(server.address)
    sink, source = engine.sink(lease=30), engine.source(interest(), lease=30)
    await sent(sink, [outgoing(0)])
    await taken(source, 1)
    loop = asyncio.get_running_loop()
    with server.frozen():
        began = loop.time()
        answers = await sink.send([outgoing(number) for number in range(1, 250)], timeout=1)
        assert {type(answer) for answer in answers} == {Unanswered}
        with pytest.raises(BrokerUnavailable):
            await source.take(1, wait=0.5)
        with pytest.raises(BrokerUnavailable):
            await sink.send([outgoing(1)], timeout=1)
        assert loop.time() - began < 12
    await sent(sink, [outgoing(500)])
    found: list[int] = []
    async with asyncio.timeout(15):
        while 500 not in found:
            found += numbers(await taken(source, 1))
    await sink.close()
    await source.close()


@pytest.mark.slow
async def test_entries_of_a_dead_consumer_are_claimed_and_counted(server: ValkeyServer) -> None:
    """What a dead worker held comes to another after the lease, with its number of deliveries (SCL-2)."""
    engine = RedisEngine(server.address)
    sink, dead = engine.sink(lease=30), engine.source(interest(), lease=1)
    alive = engine.source(interest(), lease=1)
    await sent(sink, [outgoing(number) for number in range(3)])
    held = await taken(dead, 3, acknowledge=False)
    assert [message.deliveries for message in held] == [1, 1, 1]
    # It is gone without a goodbye, except that one entry is kept alive for a while.
    deadline = asyncio.get_running_loop().time() + 2.5
    came = []
    while asyncio.get_running_loop().time() < deadline:
        await dead.keep_alive(held[:1])
        got = await alive.take(10, wait=0.2)
        await alive.keep_alive(came)
        came += got
    assert sorted(numbers(came)) == [1, 2]
    assert {message.deliveries for message in came} == {2}
    last = await taken(alive, 1)
    assert numbers(last) == [0]
    for each in (sink, dead, alive):
        await each.close()


async def test_keeping_alive_does_not_steal_back(server: ValkeyServer) -> None:
    """A worker that was frozen past its lease cannot take its events back from who has them now (SCL-2)."""
    engine = RedisEngine(server.address)
    sink, frozen = engine.sink(lease=30), engine.source(interest(), lease=0.3)
    other = engine.source(interest(), lease=30)
    await sent(sink, [outgoing(0)])
    held = await taken(frozen, 1, acknowledge=False)
    quick = engine.source(interest(), lease=0.3)
    claimed = await taken(quick, 1, acknowledge=False)
    async with server.client() as client:
        (row,) = await client.xpending_range(STREAM, GROUP, "-", "+", 10)
        owner = row["consumer"]
        await frozen.keep_alive(held)
        await frozen.give_back(held)
        (row,) = await client.xpending_range(STREAM, GROUP, "-", "+", 10)
        assert row["consumer"] == owner
    await quick.acknowledge(claimed)
    for each in (sink, frozen, other, quick):
        await each.close()


@pytest.mark.slow
async def test_a_worker_stopped_past_its_lease(server: ValkeyServer, tmp_path: Path) -> None:
    """SIGSTOP of a consumer: its entry is claimed by another, and its late acknowledgement harms nobody (SCL-2)."""
    engine = RedisEngine(server.address)
    sink = engine.sink(lease=30)
    await sent(sink, [outgoing(7)])
    program = textwrap.dedent(
        """
        import asyncio, sys
        from holdfast.brokers.redis import RedisEngine
        from tests.brokers.messages import interest, taken

        async def main():
            source = RedisEngine(sys.argv[1]).source(interest(), lease=1)
            messages = await taken(source, 1, acknowledge=False)
            print("taken", flush=True)
            sys.stdin.readline()
            await source.acknowledge(messages)
            await source.close()
            print("acknowledged", flush=True)

        asyncio.run(main())
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.Popen(
        [sys.executable, "-c", program, server.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert worker.stdin and worker.stdout
    try:
        assert (await asyncio.to_thread(worker.stdout.readline)).strip() == b"taken"
        os.kill(worker.pid, signal.SIGSTOP)
        source = engine.source(interest(), lease=1)
        (message,) = await taken(source, 1, acknowledge=False)
        assert (number_of(message), message.deliveries) == (7, 2)
        os.kill(worker.pid, signal.SIGCONT)
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        assert (await asyncio.to_thread(worker.stdout.readline)).strip() == b"acknowledged"
        await source.acknowledge([message])
        assert not await source.take(1, wait=1.5)
        await source.close()
    finally:
        worker.kill()
        worker.communicate()
    await sink.close()


async def test_what_is_given_back_comes_soon(server: ValkeyServer) -> None:
    """A worker that stops lets others have what it has not begun, long before the lease ends (SCL-2)."""
    engine = RedisEngine(server.address)
    sink, stopping = engine.sink(lease=60), engine.source(interest(), lease=60)
    await sent(sink, [outgoing(0), outgoing(1)])
    held = await taken(stopping, 2, acknowledge=False)
    await stopping.give_back(held)
    await stopping.close()
    other = engine.source(interest(), lease=60)
    again = await taken(other, 2, seconds=5)
    assert numbers(again) == [0, 1]
    for each in (sink, other):
        await each.close()


async def test_what_a_cancelled_taker_never_saw_comes_soon(server: ValkeyServer) -> None:
    """An event that was on its way to a taker that stopped is not held until the lease ends (SCL-2)."""
    with proxied(server.port) as proxy:
        engine = RedisEngine(f"redis://127.0.0.1:{proxy.port}")
        source = engine.source(interest(), lease=60)
        await source.open()
        taking = asyncio.create_task(source.take(5, wait=1.9))
        await asyncio.sleep(0.3)
        proxy.swallow_answers.set()
        direct = RedisEngine(server.address)
        sink = direct.sink(lease=60)
        await sent(sink, [outgoing(0)])

        async def given() -> bool:
            async with server.client() as client:
                return bool((await client.xpending(STREAM, GROUP))["pending"])

        await until(given)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        proxy.swallow_answers.clear()
        await source.close()
        other = direct.source(interest(), lease=60)
        assert numbers(await taken(other, 1, seconds=5)) == [0]
        for each in (sink, other):
            await each.close()


async def test_a_deleted_stream_has_its_group_back_at_its_start(server: ValkeyServer) -> None:
    """Also while a taker blocks; nothing that comes after the loss is missed (SCL-2)."""
    engine = RedisEngine(server.address)
    sink, source = engine.sink(lease=30), engine.source(interest(), lease=30)
    await sent(sink, [outgoing(0)])
    (first,) = await taken(source, 1)
    async with server.client() as client:
        for number in (1, 2):
            waiting = asyncio.create_task(source.take(5, wait=1.5))
            await asyncio.sleep(0.2)
            await client.delete(STREAM)
            # Sent before the group exists again: one that began at the end would miss it.
            await sent(sink, [outgoing(number)])
            came = numbers(await waiting) or numbers(await taken(source, 1))
            assert came == [number]
        await client.xgroup_destroy(STREAM, GROUP)
        await sent(sink, [outgoing(3)])
        assert numbers(await taken(source, 2)) == [2, 3]
    await source.acknowledge([first])  # of a group that knows nothing of it
    await sink.close()
    await source.close()


async def test_the_past_minute_and_no_more(server: ValkeyServer) -> None:
    """A new handler begins a minute before its subscription: earlier than that is not owed (SCL-2)."""
    engine = RedisEngine(server.address)
    sink = engine.sink(lease=30)
    await sent(sink, [outgoing(0)])
    early = engine.source(interest(handler="billing.early", since=datetime.now(UTC) + timedelta(seconds=30)), lease=30)
    late = engine.source(interest(handler="billing.late", since=datetime.now(UTC) + timedelta(minutes=5)), lease=30)
    assert numbers(await taken(early, 1)) == [0]
    assert not await late.take(1, wait=0.2)
    for each in (sink, early, late):
        await each.close()


async def test_trimming_spares_what_is_unread_or_pending(server: ValkeyServer) -> None:
    """The relay's own trimming removes only what every group has read and acknowledged (SCL-1)."""
    engine = RedisEngine(server.address)
    sink = engine.sink(lease=30)
    fast, slow = engine.source(interest(), lease=30), engine.source(interest(handler="billing.slow"), lease=30)
    async with server.client() as client:
        await sent(sink, [outgoing(0)])
        assert await client.eval(TRIM_READ, 1, STREAM, "99999999999999-0") == 0  # there is no group
        await fast.open()
        await slow.open()
        await sent(sink, [outgoing(number) for number in range(1, 1000)])
        await taken(fast, 1000)
        assert await client.eval(TRIM_READ, 1, STREAM, "99999999999999-0") == 0
        half = await taken(slow, 500, acknowledge=False)
        await slow.acknowledge(half[:300])
        assert 0 < await client.eval(TRIM_READ, 1, STREAM, "99999999999999-0") <= 300
        await slow.acknowledge(half[300:])
        rest = await taken(slow, 500, acknowledge=False)
        assert numbers(rest) == list(range(500, 1000))
        first = (await client.xrange(STREAM, count=1))[0][0]
        assert first <= half[300].token  # type: ignore[operator]
        assert await client.eval(TRIM_READ, 1, STREAM, "1-0") == 0  # nothing is as old as that
    assert not [w for w in await engine.weaknesses([CHANNEL], timeout=5) if "not read" in w.problem]
    for each in (sink, fast, slow):
        await each.close()


async def test_unread_entries_that_somebody_trims_are_noticed(server: ValkeyServer) -> None:
    """The loss has a line in doctor, and what waits is counted without what is gone (OPS-5)."""
    engine = RedisEngine(server.address)
    wanted = interest()
    sink, source = engine.sink(lease=30), engine.source(wanted, lease=30)
    await sent(sink, [outgoing(number) for number in range(7)])
    await taken(source, 2)
    assert not await engine.weaknesses([CHANNEL], timeout=5)
    async with server.client() as client:
        await client.execute_command("XTRIM", STREAM, "MAXLEN", 2)
    (weakness,) = await engine.weaknesses([CHANNEL], timeout=5)
    assert GROUP in weakness.problem and "relay check" in weakness.remedy
    (backlog,) = await engine.backlogs([wanted], timeout=5)
    assert backlog.waiting == 2
    assert numbers(await taken(source, 2)) == [5, 6]
    await sent(sink, [outgoing(7)])
    async with server.client() as client:
        await client.execute_command("XTRIM", STREAM, "MAXLEN", 0)
    assert len(await engine.weaknesses([CHANNEL], timeout=5)) == 1
    await sink.close()
    await source.close()


async def test_pending_entries_that_somebody_trims_stop_nobody(server: ValkeyServer) -> None:
    """An entry that is gone while it was held is no event, and those beside it still come (SCL-2)."""
    engine = RedisEngine(server.address)
    sink, dead = engine.sink(lease=30), engine.source(interest(), lease=0.2)
    await sent(sink, [outgoing(number) for number in range(4)])
    await taken(dead, 4, acknowledge=False)
    async with server.client() as client:
        await client.execute_command("XTRIM", STREAM, "MAXLEN", 1)
    alive = engine.source(interest(), lease=0.2)
    assert numbers(await taken(alive, 1)) == [3]
    for each in (sink, dead, alive):
        await each.close()


async def test_a_consumer_with_pending_entries_is_never_deleted(server: ValkeyServer) -> None:
    """DELCONSUMER drops what is pending, so a consumer goes only when it holds nothing (SCL-2)."""
    engine = RedisEngine(server.address)
    sink, holding = engine.sink(lease=1), engine.source(interest(), lease=1)
    await sent(sink, [outgoing(0)])
    await taken(holding, 1, acknowledge=False)
    async with server.client() as client:
        await holding.close()
        assert len(await client.xinfo_consumers(STREAM, GROUP)) == 1
        assert await client.eval(DELETE_EMPTY, 1, STREAM, GROUP, "", 0) == 0
        other = engine.source(interest(), lease=1)
        assert numbers(await taken(other, 1)) == [0]
        assert await client.eval(DELETE_EMPTY, 1, STREAM, GROUP, "", 0) == 2
        await other.take(1, wait=0.1)
        await other.close()
        assert await client.xinfo_consumers(STREAM, GROUP) == []
    await sink.close()


async def test_unwanted_events_are_passed_over(server: ValkeyServer) -> None:
    """Patterns, targets, and events of others that bring nothing but themselves (SCL-2)."""
    engine = RedisEngine(server.address)
    wanted = interest("order.pl*", "stock.*")
    sink, source = engine.sink(lease=30), engine.source(wanted, lease=30)
    types = ["order.placed", "order.paid", "stock.low.eu", "stocks", "order.plant"]
    batch = [outgoing(number, event_type=event_type) for number, event_type in enumerate(types)]
    batch += [outgoing(5, target="billing"), outgoing(6, target="shipping")]
    await sent(sink, batch)
    async with server.client() as client:
        await client.xadd(STREAM, {"ce": outgoing(7, event_type="order.paid").body})
        await client.xadd(STREAM, {"ce": outgoing(8).body})
        await client.xadd(STREAM, {"ce": "{"})
    found = await taken(source, 6)
    assert numbers(found[:5]) == [0, 2, 4, 5, 8]
    assert found[5].body == b"{"  # somebody has to be told
    (backlog,) = await engine.backlogs([wanted], timeout=5)
    assert (backlog.waiting, backlog.unacknowledged) == (0, 0)
    await sink.close()
    await source.close()


async def test_names_that_no_event_has_are_not_kept(server: ValkeyServer) -> None:
    """Who writes types of megabytes does not fill the memory of those who read them (SCL-2)."""
    source = RedisEngine(server.address).source(interest("*"), lease=30)
    await source.open()
    size = 2_000_000
    async with server.client() as client:
        for n in range(10):
            names = {"hf-type": f"{n}{'t' * size}"} if n % 2 else {"hf-type": "order.placed", "hf-target": "t" * size}
            await client.xadd(STREAM, {"ce": outgoing(n).body, **names})
        await client.xadd(STREAM, {"ce": outgoing(10).body, "hf-type": "order.placed"})
    tracemalloc.start()
    try:
        assert numbers(await taken(source, 1)) == [10]
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < size
    finally:
        tracemalloc.stop()
    await source.close()


async def test_a_stream_for_each_type_does_not_fill_the_relay(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it remembers of the streams that it has trimmed has an end (SCL-2)."""
    monkeypatch.setattr("holdfast.brokers.redis.sink._MOST_STREAMS", 10)
    sink = RedisEngine(f"{server.address}?stream={{channel}}.{{type}}").sink(lease=30)
    await sent(sink, [outgoing(n, event_type=f"order.t{n}") for n in range(35)])
    assert len(sink._trimmed) <= 10
    await sink.close()


async def test_ordered_handlers_have_one_taker(server: ValkeyServer) -> None:
    """Order is kept by one owner at a time, and the next begins with what the last has left (SCL-2)."""
    engine = RedisEngine(server.address)
    wanted = interest(ordered=True)
    sink = engine.sink(lease=30)
    one, other = (engine.source(wanted, lease=1) for _ in range(2))
    await sent(sink, [outgoing(number) for number in range(6)])
    held = await taken(one, 3, acknowledge=False)
    assert numbers(held) == [0, 1, 2]
    for _ in range(3):
        assert not await other.take(10, wait=0.3)
        await one.keep_alive(held)
    await one.acknowledge(held[:1])
    # From here on the owner is silent, as one that was killed.
    rest = await taken(other, 5)
    assert numbers(rest) == [1, 2, 3, 4, 5]
    async with server.client() as client:
        assert await client.exists(owner_of(STREAM, wanted.handler_name)) == 1
        await other.close()
        assert await client.exists(owner_of(STREAM, wanted.handler_name)) == 0
    for each in (sink, one):
        await each.close()


async def test_doctor_names_what_would_lose_events(tmp_path: Path) -> None:
    """Each setting that drops unread or confirmed events has a line with its remedy (OPS-5)."""
    careless = ("--appendonly", "no", "--maxmemory-policy", "allkeys-lru")
    with ValkeyServer(tmp_path / "careless", *careless) as server:
        found = await RedisEngine(f"{server.address}?replicas=1").weaknesses([CHANNEL], timeout=5)
        text = " / ".join(weakness.problem for weakness in found)
        for part in ("memory only", "allkeys-lru", "wants 1"):
            assert part in text
    with ValkeyServer(tmp_path / "everysec", "--appendonly", "yes", "--appendfsync", "everysec") as server:
        (weakness,) = await RedisEngine(server.address).weaknesses([CHANNEL], timeout=5)
        assert "everysec" in weakness.problem
        (weakness,) = await RedisEngine(f"{server.address}?fsync=1").weaknesses([CHANNEL], timeout=5)
        assert "also with fsync=1" in weakness.problem  # what WAITAOF answers beside everysec is not true


async def test_doctor_names_what_others_have_trimmed(server: ValkeyServer) -> None:
    """A MAXLEN of somebody else drops what a handler has not read; one that leaves that drops nothing of it (OPS-5)."""
    engine = RedisEngine(server.address)
    sink, source = engine.sink(lease=30), engine.source(interest(), lease=30)
    await source.open()
    await sent(sink, [outgoing(number) for number in range(10)])
    assert numbers(await taken(source, 4)) == [0, 1, 2, 3]
    async with server.client() as client:
        await client.xtrim(STREAM, maxlen=7, approximate=False)
        assert not await engine.weaknesses([CHANNEL], timeout=5)
        await client.xtrim(STREAM, maxlen=2, approximate=False)
        (weakness,) = await engine.weaknesses([CHANNEL], timeout=5)
        assert weakness.problem == "events were removed that billing.charge has not read"
        await client.config_set("maxmemory-policy", "volatile-lru")
    problems = " / ".join(each.problem for each in await engine.weaknesses([CHANNEL], timeout=5))
    assert "volatile-lru: it may drop keys that keep the order" in problems
    await sink.close()
    await source.close()


async def test_what_is_kept_is_compared_with_the_inbox_alone(server: ValkeyServer) -> None:
    """Unread entries are never trimmed, so a short time loses nothing; one beyond the inbox repeats (OPS-5)."""
    day, minutes = 86_400.0, 3 * 24 * 60
    engine = RedisEngine(f"{server.address}?keep={minutes}")
    assert not await engine.weaknesses([CHANNEL], remembered=4 * day, timeout=5)
    (weakness,) = await engine.weaknesses([CHANNEL], remembered=2 * day, timeout=5)
    assert "for 3 days (keep), and the inbox knows what was handled for 2 days" in weakness.problem


async def test_a_key_that_is_no_stream_is_named(server: ValkeyServer) -> None:
    """Events wait, and the doctor says which key is in the way (OPS-5, SCL-1)."""
    engine = RedisEngine(server.address)
    sink = engine.sink(lease=30)
    async with server.client() as client:
        await client.set("hf:{events}:0", "somebody else's")
    (answer,) = await sink.send([outgoing()], timeout=5)
    assert isinstance(answer, Unanswered)
    assert answer.told
    (found,) = [each for each in await engine.weaknesses([CHANNEL], timeout=5) if each.subject == "key hf:{events}:0"]
    assert "RENAME" in found.remedy
    await sink.close()


async def test_a_stream_whose_ids_are_used_up(server: ValkeyServer) -> None:
    """It is named with the way back, which works (OPS-5)."""
    engine = RedisEngine(server.address)
    sink, source = engine.sink(lease=30), engine.source(interest(), lease=30)
    await source.open()
    await sent(sink, [outgoing(1)])
    assert not await engine.weaknesses([CHANNEL], timeout=5)
    largest = 2**64 - 1
    async with server.client() as client:
        await client.xadd(STREAM, {"ce": outgoing(2).body}, id=f"{largest}-{largest}")
        (answer,) = await sink.send([outgoing(3)], timeout=5)
        assert isinstance(answer, Unanswered)
        assert answer.told
        (weakness,) = await engine.weaknesses([CHANNEL], timeout=5)
        assert "takes no event" in weakness.problem
        assert "RENAME" in weakness.remedy
        await client.rename(STREAM, "away")
    await sent(sink, [outgoing(4)])
    assert numbers(await taken(source, 1)) == [4]
    await sink.close()
    await source.close()


async def test_backlogs_are_counted_and_a_retired_handler_leaves_no_group(server: ValkeyServer) -> None:
    """What waits, what is held and what came again is seen; a retired handler leaves no group (OPS-5)."""
    engine = RedisEngine(server.address)
    wanted = interest()
    sink, source = engine.sink(lease=30), engine.source(wanted, lease=0.2)
    (unknown,) = await engine.backlogs([wanted], timeout=5)
    assert (unknown.waiting, unknown.unacknowledged) == (None, None)
    await engine.remove(wanted)
    await source.open()
    await sent(sink, [outgoing(number) for number in range(5)])
    await taken(source, 2, acknowledge=False)
    (backlog,) = await engine.backlogs([wanted], timeout=5)
    assert (backlog.handler_name, backlog.waiting, backlog.unacknowledged, backlog.redelivered) == (GROUP, 3, 2, 0)
    assert len(await taken(source, 2, acknowledge=False)) == 2

    async def came_again() -> bool:
        await source.take(2, wait=0.1)
        (backlog,) = await engine.backlogs([wanted], timeout=5)
        return bool(backlog.redelivered)

    await until(came_again)
    await source.close()
    await engine.remove(wanted)
    await engine.remove(wanted)
    async with server.client() as client:
        assert await client.xinfo_groups(STREAM) == []
    await sink.close()
