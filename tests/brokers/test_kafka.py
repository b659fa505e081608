"""What is special about Kafka: groups that rebalance, offsets that must not skip anything, and producers that die."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import CommitFailedError, OutOfOrderSequenceNumber
from aiokafka.structs import TopicPartition

from holdfast.brokers.engine import BrokerUnavailable, Confirmed, Interest, Outgoing, Received, Unanswered
from holdfast.brokers.kafka import KafkaEngine
from holdfast.brokers.kafka.cluster import Cluster
from holdfast.brokers.kafka.offsets import Offsets
from holdfast.brokers.kafka.sink import KafkaSink
from holdfast.brokers.kafka.source import KafkaSource
from holdfast.brokers.kafka.start import fix_start, retire
from holdfast.errors import ConfigurationError
from servers.kafka import KafkaMock, kafka_server
from tests.brokers import messages
from tests.brokers.messages import number_of, numbers, sent, taken

_channels = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaMock]:
    with kafka_server() as server:
        yield server


class Case:
    """An engine, the interest of one test in a topic of its own, and all that the test has opened."""

    def __init__(self, server: KafkaMock) -> None:
        self.engine = KafkaEngine(server.address)
        self.cluster = Cluster(server.address)
        self.interest: Interest = replace(messages.interest(), channel=f"k{time.time_ns()}_{next(_channels)}")
        self.opened: list[Any] = []

    def events(self, *given: int, **changes: Any) -> list[Outgoing]:
        return [messages.outgoing(number, channel=self.interest.channel, **changes) for number in given]

    async def sink(self) -> KafkaSink:
        self.opened.append(sink := self.engine.sink(lease=10))
        await sink.open()
        return sink

    async def source(self) -> KafkaSource:
        self.opened.append(source := self.engine.source(self.interest, lease=10))
        await source.open()
        return source


@pytest.fixture
async def case(server: KafkaMock) -> AsyncIterator[Case]:
    case = Case(server)
    yield case
    for each in case.opened:
        await each.close()


def test_only_what_is_acknowledged_from_the_beginning_on_is_committed() -> None:
    """No offset is committed behind which something is open, also where offsets have gaps (SCL-2)."""
    offsets, partition = Offsets(), TopicPartition("t", 0)
    for offset in (3, 4, 7, 9):
        offsets.take(partition, offset)
    offsets.acknowledge(partition, 4)
    offsets.acknowledge(partition, 9)
    assert offsets.committable() == {}
    offsets.acknowledge(partition, 3)
    assert offsets.committable() == {partition: 5}
    offsets.committed({partition: 5})
    offsets.acknowledge(partition, 7)
    assert offsets.committable() == {partition: 10}
    offsets.forget([partition])
    offsets.acknowledge(partition, 9)
    assert offsets.committable() == {}


@pytest.mark.parametrize("address", ["kafka://", "nats://host", "kafka://host?partitions=0", "kafka://host?unknown=1"])
def test_wrong_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigurationError):
        KafkaEngine(address)


def test_logins_and_encryption_come_from_the_address() -> None:
    mechanism = "-".join(("SCRAM", "SHA", "256"))  # which would look like the id of a requirement
    options = Cluster(f"kafkas://me:se%40cret@one:1,two:2?sasl_mechanism={mechanism}").options
    assert options["bootstrap_servers"] == ["one:1", "two:2"]
    assert (options["security_protocol"], options["sasl_mechanism"]) == ("SASL_SSL", mechanism)
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("me", "se@cret")


@pytest.mark.nightly("several brokers or consumers")
@pytest.mark.slow
async def test_three_consumers_join_and_leave_under_load(case: Case) -> None:
    """Nothing is lost or unexpected, and each key is first delivered in order (SCL-1, SCL-2)."""
    sink = await case.sink()
    confirmed: set[int] = set()
    first_seen: dict[int, list[int]] = defaultdict(list)
    seen: set[int] = set()
    stop = asyncio.Event()

    async def publish() -> None:
        for wave in itertools.count():
            if stop.is_set():
                return
            # One of each key in a batch, and the next when they are confirmed.
            batch = [case.events(wave * 10 + key, key=f"k{key}")[0] for key in range(10)]
            await sent(sink, batch, seconds=30)
            confirmed.update(range(wave * 10, wave * 10 + 10))
            await asyncio.sleep(0.02)

    async def listen(source: KafkaSource, leave: asyncio.Event) -> None:
        while not leave.is_set():
            with suppress(BrokerUnavailable):
                got = await source.take(20, wait=0.2)
                for message in got:
                    note(message)
                await source.acknowledge(got)
        await source.close()

    def note(message: Received) -> None:
        number = number_of(message)
        if number not in seen:
            seen.add(number)
            first_seen[number % 10].append(number)

    members: list[tuple[asyncio.Task[None], asyncio.Event]] = []

    async def join() -> None:
        leave = asyncio.Event()
        members.append((asyncio.create_task(listen(await case.source(), leave)), leave))

    await join()
    publishing = asyncio.create_task(publish())
    for change in ("join", "join", "leave", "join", "leave"):
        await asyncio.sleep(4)
        assert not publishing.done(), publishing.exception()
        if change == "join":
            await join()
        else:
            task, leave = members.pop(0)
            leave.set()
            await task
    stop.set()
    await publishing
    deadline = time.monotonic() + 40
    while not confirmed <= seen:
        assert time.monotonic() < deadline, f"{len(confirmed - seen)} of {len(confirmed)} are lost"
        await asyncio.sleep(0.1)
    for task, leave in members:
        leave.set()
        await task
    assert len(confirmed) > 500 and seen == confirmed
    assert all(order == sorted(order) for order in first_seen.values())


@pytest.mark.slow
async def test_what_a_crashed_member_did_not_commit_comes_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what it acknowledged in its last moment; the inbox knows that (SCL-2)."""
    source, sink = await case.source(), await case.sink()
    await sent(sink, case.events(*range(20)))

    async def refused(*_: object) -> None:
        raise CommitFailedError

    monkeypatch.setattr(AIOKafkaConsumer, "commit", refused)
    assert sorted(numbers(await taken(source, 20))) == list(range(20))
    await source.close()
    monkeypatch.undo()
    again = await case.source()
    assert sorted(numbers(await taken(again, 20, seconds=30))) == list(range(20))


@pytest.mark.slow
async def test_a_commit_that_is_refused_is_made_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is at the end of what was acknowledged, and later, not only when more comes (SCL-2)."""
    source, sink = await case.source(), await case.sink()
    await sent(sink, case.events(*range(5)))
    commit, refusals = AIOKafkaConsumer.commit, itertools.count(1)

    async def refused_twice(self: Any, offsets: Any = None) -> None:
        if next(refusals) <= 2:
            raise CommitFailedError
        await commit(self, offsets)

    monkeypatch.setattr(AIOKafkaConsumer, "commit", refused_twice)
    await taken(source, 5)
    await messages.until(lambda: _waits_for(case, 0))
    assert next(refusals) > 3


@pytest.mark.slow
async def test_a_later_acknowledgement_does_not_skip_an_open_event(case: Case) -> None:
    """The events of one partition, all but the first acknowledged, all come again (SCL-2)."""
    source, sink = await case.source(), await case.sink()
    await sent(sink, case.events(*range(6), key="one"))
    found = await taken(source, 6, acknowledge=False)
    assert numbers(found) == list(range(6))
    await source.acknowledge(found[1:])
    await source.close()
    again = await case.source()
    assert numbers(await taken(again, 6, seconds=30)) == list(range(6))


@pytest.mark.slow
async def test_what_is_being_handled_is_not_given_out_twice_after_a_rebalance(case: Case) -> None:
    """A member that gets its partition back still knows what it holds (SCL-2)."""
    source, sink = await case.source(), await case.sink()
    await sent(sink, case.events(1, key="one"))
    held = await taken(source, 1, acknowledge=False)
    other = await case.source()
    # Both take part in the group, and then the first is alone again.
    while not _assigned(other):
        await source.take(1, wait=0.2)
        await other.take(1, wait=0.2)
    await other.close()
    deadline = time.monotonic() + 15
    found: list[Received] = []
    while len(_assigned(source)) < 4 and time.monotonic() < deadline:
        found += await source.take(5, wait=0.2)
    found += await source.take(5, wait=2)
    assert found == []
    await source.acknowledge(held)
    await messages.until(lambda: _waits_for(case, 0))


@pytest.mark.slow
async def test_a_rebalance_waits_for_handlers_that_end_soon(case: Case) -> None:
    """What is acknowledged while partitions are revoked is committed, and waits no longer than it has to (SCL-2)."""
    source, sink = await case.source(), await case.sink()
    await sent(sink, case.events(1, key="one"))
    held = await taken(source, 1, acknowledge=False)
    partitions = frozenset(_assigned(source))
    revoking = asyncio.create_task(source.revoke(partitions))
    await asyncio.sleep(0.2)
    assert not revoking.done()
    await source.acknowledge(held)
    await asyncio.wait_for(revoking, 2)
    assert await _waits_for(case, 0)
    source.assigned()


@pytest.mark.slow
async def test_a_rebalance_does_not_wait_for_handlers_that_take_long(case: Case) -> None:
    """The whole group stands still meanwhile, so the wait has an end (SCL-2)."""
    source, sink = await case.source(), await case.sink()
    await sent(sink, case.events(1, key="one"))
    await taken(source, 1, acknowledge=False)
    started = time.monotonic()
    await source.revoke(frozenset(_assigned(source)))
    assert time.monotonic() - started < 5.5
    assert await _waits_for(case, 1)


async def test_a_producer_with_a_fatal_error_is_replaced(case: Case) -> None:
    """The events are not answered for, and the next ones are confirmed by a new producer (SCL-1)."""
    sink = await case.sink()
    assert await sink.send(case.events(1), timeout=10) == [Confirmed()]
    dead: Any = sink._producer
    dead._message_accumulator.fail_all(OutOfOrderSequenceNumber())
    answers = await sink.send(case.events(2), timeout=10)
    assert isinstance(answers[0], Unanswered)
    assert await sink.send(case.events(3), timeout=10) == [Confirmed()]
    assert sink._producer is not dead and dead._closed


@pytest.mark.slow
async def test_a_group_begins_where_it_was_first_opened_whatever_happens_then(case: Case) -> None:
    """A member that ends before it has taken anything moves the beginning for nobody (SCL-2)."""
    sink = await case.sink()
    await sent(sink, case.events(0, key="one"))
    first = await case.source()
    await first.close()
    await sent(sink, case.events(1, 2, key="one"))
    second = await case.source()
    assert numbers(await taken(second, 2, seconds=30)) == [1, 2]


async def test_a_group_that_was_retired_begins_anew(case: Case) -> None:
    """Where it had been does not matter to a handler that comes back (SCL-2)."""
    sink = await case.sink()
    await sent(sink, case.events(0, key="one"))
    later = replace(case.interest, since=datetime.now(UTC) + timedelta(hours=1))
    await fix_start(case.cluster, later, f"hf.{later.channel}", 5)
    await sent(sink, case.events(1, 2, key="one"))
    assert await _waits_for(case, 2)
    await fix_start(case.cluster, later, f"hf.{later.channel}", 5)
    assert await _waits_for(case, 2)
    await retire(case.cluster, later, f"hf.{later.channel}", 5)
    assert await _waits_for(case, None)
    await fix_start(case.cluster, later, f"hf.{later.channel}", 5)
    assert await _waits_for(case, 0)


async def test_a_topic_has_replicas(case: Case) -> None:
    """Nothing is wrong with a topic that was made on three brokers (OPS-5)."""
    await case.sink()
    assert await case.engine.weaknesses([case.interest.channel], timeout=5) == []


async def _waits_for(case: Case, count: int | None) -> bool:
    return (await case.engine.backlogs([case.interest], timeout=5))[0].waiting == count


def _assigned(source: KafkaSource) -> set[TopicPartition]:
    consumer: Any = source._consumer
    return set() if consumer is None else set(consumer.assignment())
