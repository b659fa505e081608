"""One contract for every engine: what its sinks confirm, its sources give out, as often and in the order promised.

An engine is one entry of KINDS, with what its broker cannot do.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.brokers.engine import (
    BrokerUnavailable,
    Confirmed,
    Interest,
    Outgoing,
    Received,
    Refused,
    Sink,
    Source,
    Unanswered,
)
from holdfast.brokers.engines import engine_of
from servers.kafka import REAL, kafka_server
from servers.nats import NatsServer
from servers.rabbitmq import MAX_MESSAGE_BYTES, RabbitmqServer
from servers.valkey import DURABLE, ValkeyServer
from tests.brokers import messages
from tests.brokers.messages import numbers, sent, taken

LEASE = 3.0


@dataclass(frozen=True)
class Kind:
    """An engine, its server, and what the broker cannot do."""

    name: str
    serve: Callable[[Path], AbstractContextManager[Any]]
    # The bytes of a body that the broker never takes; 0 where memory is the only limit.
    too_large: int
    # Whether an event that nobody wants is noticed.
    tells_unroutable: bool = False
    # One that does not counts what may have been taken before as taken twice.
    counts_deliveries: bool = True
    # Whether a new interest gets what was sent before it.
    has_past: bool = True
    # Whether an acknowledgement counts although something before it has none.
    acknowledges_singly: bool = True
    # Whether the server lets a handler's position be forgotten.
    removes: bool = True
    # Whether the server finds its data again.
    restarts: bool = True
    freezes: bool = True


KINDS = [
    Kind("nats", NatsServer, 2 * 1024 * 1024),
    Kind("redis", lambda folder: ValkeyServer(folder, *DURABLE), 0),
    Kind("rabbitmq", RabbitmqServer, 2 * MAX_MESSAGE_BYTES, tells_unroutable=True, has_past=False),
    Kind(
        "kafka",
        lambda _: kafka_server(),
        2 * 1024 * 1024,
        counts_deliveries=False,
        acknowledges_singly=False,
        # The mock looks for no times, takes no commit for a group that once had members, and forgets all when it ends.
        has_past=REAL is not None,
        removes=REAL is not None,
        restarts=False,
        freezes=REAL is None,
    ),
]


class Broker:
    """A running server, the channel of one test on it, and all that the test has opened."""

    def __init__(self, kind: Kind, server: Any, channel: str) -> None:
        self.kind = kind
        self.server = server
        self.channel = channel
        self.engine = engine_of(server.address)
        self._opened: list[Sink | Source] = []

    def interest(self, *event_types: str, **options: Any) -> Interest:
        return replace(messages.interest(*event_types, **options), channel=self.channel)

    def events(self, *given: int, **options: Any) -> list[Outgoing]:
        return [messages.outgoing(number, channel=self.channel, **options) for number in given]

    async def sink(self) -> Sink:
        sink = self.engine.sink(lease=LEASE)
        self._opened.append(sink)
        await sink.open()
        return sink

    async def source(self, interest: Interest, *, lease: float = LEASE) -> Source:
        source = self.engine.source(interest, lease=lease)
        self._opened.append(source)
        await source.open()
        return source

    async def close(self) -> None:
        for each in self._opened:
            await each.close()


_channels = itertools.count(1)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kind, Any]]:
    kind: Kind = request.param
    with kind.serve(tmp_path_factory.mktemp(kind.name) / "server") as server:
        yield kind, server


@pytest.fixture
async def broker(served: tuple[Kind, Any]) -> AsyncIterator[Broker]:
    kind, server = served
    broker = Broker(kind, server, f"c{time.time_ns() // 1_000_000}_{next(_channels)}")
    yield broker
    await broker.close()


async def none_but(source: Source, sink: Sink, marker: Outgoing) -> list[Received]:
    """What the source gives out up to an event that is sent now."""
    await sent(sink, [marker])
    found: list[Received] = []
    deadline = time.monotonic() + 20
    while not any(message.body == marker.body for message in found):
        assert time.monotonic() < deadline, "the marker did not come"
        got = await source.take(10, wait=0.5)
        await source.acknowledge(got)
        found += got
    return [message for message in found if message.body != marker.body]


@pytest.mark.slow
async def test_each_interest_gets_exactly_its_events(broker: Broker) -> None:
    """By type, by pattern and by target, whatever the broker itself can filter (SCL-1, SCL-2)."""
    wanted = {
        "billing.exact": (("order.placed",), {1, 5}),
        "billing.trailing": (("order.*",), {1, 2, 3, 5}),
        "billing.inner": (("*.placed", "parcel.*"), {1, 4, 5, 6, 7}),
        "billing.begun": (("order.pl*",), {1, 5}),
    }
    sources = {name: await broker.source(broker.interest(*types, handler=name)) for name, (types, _) in wanted.items()}
    sink = await broker.sink()
    kinds = {
        1: "order.placed",
        2: "order.paid",
        3: "order.paid.late",
        4: "invoice.placed",
        6: "parcel.sent",
        7: "parcel.sent.back",
    }
    batch = [event for number, kind in kinds.items() for event in broker.events(number, event_type=kind)]
    batch += broker.events(5, event_type="order.placed", target="billing")
    batch += broker.events(8, event_type="order.placed", target="shipping")
    await sent(sink, batch)
    # Comes to all of them, after everything else.
    marker = broker.events(99, event_type="order.placed")[0]
    await sent(sink, [marker])
    for name, (_, expected) in wanted.items():
        found = numbers(await taken(sources[name], len(expected) + 1))
        assert sorted(found) == [*sorted(expected), 99], name
        assert await sources[name].take(1, wait=0.2) == [], name


@pytest.mark.slow
async def test_what_the_broker_never_takes_is_refused_alone(broker: Broker) -> None:
    """An event that is too large is refused, those beside it are confirmed when they are sent again (SCL-1)."""
    if not broker.kind.too_large:
        pytest.skip("this broker takes what its memory holds")
    source = await broker.source(broker.interest())
    sink = await broker.sink()
    large = messages.outgoing(3, channel=broker.channel, body=b"x" * broker.kind.too_large)
    batch = [*broker.events(1), large, *broker.events(2)]
    refused: list[Outgoing] = []
    deadline = time.monotonic() + 15
    while batch:
        assert time.monotonic() < deadline, "not all were answered for good"
        answers = await sink.send(batch, timeout=5)
        assert len(answers) == len(batch)
        refused += [event for event, answer in zip(batch, answers, strict=True) if isinstance(answer, Refused)]
        batch = [event for event, answer in zip(batch, answers, strict=True) if isinstance(answer, Unanswered)]
    assert refused == [large]
    found: set[int] = set()
    while found != {1, 2}:
        found |= set(numbers(await taken(source, 1)))


@pytest.mark.slow
async def test_an_event_that_nobody_wants_is_told_from_one_that_arrived(broker: Broker) -> None:
    """It stays open where the broker tells, and is otherwise confirmed like any other (SCL-1)."""
    source = await broker.source(broker.interest())
    sink = await broker.sink()
    batch = [*broker.events(1), *broker.events(2, event_type="nobody.wants"), *broker.events(3)]
    answers = await sink.send(batch, timeout=10)
    assert [answers[0], answers[2]] == [Confirmed(), Confirmed()]
    assert isinstance(answers[1], Unanswered if broker.kind.tells_unroutable else Confirmed)
    assert sorted(numbers(await taken(source, 2))) == [1, 3]


@pytest.mark.slow
async def test_what_is_not_acknowledged_comes_back_and_what_is_does_not(broker: Broker) -> None:
    """At least once until it is acknowledged, and then no more (SCL-2)."""
    wanted = broker.interest()
    sink = await broker.sink()
    first = await broker.source(wanted)
    await sent(sink, broker.events(*range(10)))
    found = await taken(first, 10, acknowledge=False)
    acknowledged = [message for message in found if numbers([message])[0] % 2]
    await first.acknowledge(acknowledged)
    await first.close()
    second = await broker.source(wanted)
    again = set(numbers(await taken(second, 5, seconds=30)))
    # By then, what a dead worker held has come back everywhere.
    while not again >= {0, 2, 4, 6, 8}:
        again |= set(numbers(await taken(second, 1)))
    again |= set(numbers(await none_but(second, sink, broker.events(99)[0])))
    assert again == {0, 2, 4, 6, 8} or not broker.kind.acknowledges_singly
    await second.close()
    third = await broker.source(wanted)
    assert await none_but(third, sink, broker.events(100)[0]) == []


@pytest.mark.slow
async def test_what_is_given_back_comes_back_at_once(broker: Broker) -> None:
    """Long before the lease of a handler that died would have ended (SCL-2)."""
    source = await broker.source(broker.interest(), lease=60)
    sink = await broker.sink()
    await sent(sink, broker.events(1, 2))
    found = await taken(source, 2, acknowledge=False)
    kept, returned = sorted(found, key=lambda message: numbers([message]))
    started = time.monotonic()
    await source.give_back([returned])
    again = await taken(source, 1, acknowledge=False)
    assert numbers(again) == [2] and time.monotonic() - started < 5
    await source.acknowledge([kept, *again])
    assert await none_but(source, sink, broker.events(99)[0]) == []


@pytest.mark.slow
async def test_deliveries_are_counted(broker: Broker) -> None:
    """So that an event which ends its worker each time can be told from others (SCL-2)."""
    source = await broker.source(broker.interest())
    sink = await broker.sink()
    await sent(sink, broker.events(1))
    counts: list[int | None] = []
    for _ in range(3):
        found = await taken(source, 1, acknowledge=False)
        counts.append(found[0].deliveries)
        await source.give_back(found)
    assert counts == ([1, 2, 3] if broker.kind.counts_deliveries else [2] * 3)


@pytest.mark.slow
async def test_an_event_that_is_kept_alive_is_not_given_to_another(broker: Broker) -> None:
    """A handler may take longer than the lease (SCL-2)."""
    wanted = broker.interest()
    first, second = [await broker.source(wanted, lease=LEASE) for _ in range(2)]
    sink = await broker.sink()
    await sent(sink, broker.events(1))
    held: list[Received] = []
    while not held:
        held = list(await first.take(5, wait=0.3))
        if not held:
            # It came to the other one: the two change their parts.
            held, first, second = list(await second.take(5, wait=0.3)), second, first
    other: list[Received] = []
    deadline = time.monotonic() + 2.5 * LEASE
    while time.monotonic() < deadline:
        await first.keep_alive(held)
        other += await second.take(1, wait=LEASE / 6)
    assert other == []
    await first.acknowledge(held)
    await sent(sink, broker.events(99))
    while not other:
        other += [*await first.take(5, wait=0.3), *await second.take(5, wait=0.3)]
    assert numbers(other) == [99]


@pytest.mark.slow
async def test_events_of_a_key_come_in_the_order_in_which_they_were_sent(broker: Broker) -> None:
    """With one batch after the other, as the relay sends the events of a key (SCL-1)."""
    source = await broker.source(broker.interest(ordered=True))
    sink = await broker.sink()
    for wave in range(20):
        batch = [broker.events(10 * wave + key, key=f"k{key}")[0] for key in range(5)]
        await sent(sink, batch)
    by_key: dict[int, list[int]] = defaultdict(list)
    for number in numbers(await taken(source, 100)):
        by_key[number % 10].append(number // 10)
    assert by_key == {key: list(range(20)) for key in range(5)}


@pytest.mark.slow
async def test_two_sources_of_a_handler_share_its_events(broker: Broker) -> None:
    """Each event goes to one of them (SCL-2)."""
    wanted = broker.interest()
    sources = [await broker.source(wanted) for _ in range(2)]
    sink = await broker.sink()
    await sent(sink, broker.events(*range(60)))
    found: list[int] = []
    deadline = time.monotonic() + 40
    while len(set(found)) < 60:
        assert time.monotonic() < deadline, f"{len(set(found))} of 60 came"
        for source in sources:
            got = await source.take(5, wait=0.2)
            await source.acknowledge(got)
            found += numbers(got)
    # Only where partitions move from one to the other may some come twice.
    assert broker.kind.name == "kafka" or len(found) == 60


@pytest.mark.slow
async def test_closing_gives_back_what_was_taken(broker: Broker) -> None:
    """What a stopped worker did not acknowledge is for the next, and nothing else (SCL-2)."""
    wanted = broker.interest()
    first = await broker.source(wanted)
    sink = await broker.sink()
    await sent(sink, broker.events(*range(10)))
    found = await taken(first, 5, acknowledge=False)
    await first.acknowledge(found[:2])
    await first.close()
    second = await broker.source(wanted)
    again = await taken(second, 8, seconds=30)
    assert sorted(numbers(found[:2] + again)) == list(range(10))


@pytest.mark.slow
async def test_a_new_interest_begins_at_its_time(broker: Broker) -> None:
    """With all since its subscription where the broker keeps it, else from when it was opened (SCL-2)."""
    await broker.source(broker.interest(handler="billing.other"))
    sink = await broker.sink()
    await sent(sink, broker.events(1, 2, 3))
    source = await broker.source(broker.interest(since=datetime.now(UTC) - timedelta(seconds=30)))
    found = await none_but(source, sink, broker.events(99)[0])
    assert sorted(numbers(found)) == ([1, 2, 3] if broker.kind.has_past else [])


async def test_an_interest_that_was_removed_begins_anew(broker: Broker) -> None:
    """What was waiting for it is forgotten, and so is how far it was (SCL-2)."""
    if not broker.kind.removes:
        pytest.skip("this server keeps positions: tests/brokers/test_kafka.py has what can be shown on it")
    wanted = broker.interest(since=datetime.now(UTC) + timedelta(minutes=1))
    source = await broker.source(wanted)
    sink = await broker.sink()
    await asyncio.sleep(1.1)  # until a minute before its time
    await sent(sink, broker.events(1, 2))
    await taken(source, 2, acknowledge=False)
    await source.close()
    backlog = (await broker.engine.backlogs([wanted], timeout=5))[0]
    assert backlog.handler_name == "billing.charge" and (backlog.waiting or 0) + (backlog.unacknowledged or 0) == 2
    await broker.engine.remove(wanted)
    backlog = (await broker.engine.backlogs([wanted], timeout=5))[0]
    assert not backlog.waiting and not backlog.unacknowledged
    anew = replace(wanted, since=datetime.now(UTC) + timedelta(minutes=1))
    source = await broker.source(anew)
    await asyncio.sleep(1.1)
    assert await none_but(source, sink, broker.events(99)[0]) == []


@pytest.mark.slow
async def test_a_frozen_broker_is_an_outage_within_the_deadline(broker: Broker) -> None:
    """Nothing waits for longer than it was told, and everything works when the broker is back (SCL-1)."""
    if not broker.kind.freezes:
        pytest.skip("a cluster elsewhere cannot be frozen")
    source = await broker.source(broker.interest())
    sink = await broker.sink()
    await sent(sink, broker.events(1))
    await taken(source, 1)
    with broker.server.frozen():
        assert await _send_answer(sink, broker.events(2), timeout=2, within=7) != Confirmed()
        await _outage(source, within=15)
        await asyncio.wait_for(source.close(), 10)
    source = await _reopened(broker)
    await sent(sink, broker.events(3), seconds=40)
    found: set[int] = set()
    deadline = time.monotonic() + 40
    while 3 not in found:
        assert time.monotonic() < deadline, f"only {found} came"
        found |= set(numbers(await _taken_now(source)))


@pytest.mark.nightly("broker that is killed")
@pytest.mark.slow
@pytest.mark.parametrize(
    "served", [kind for kind in KINDS if kind.restarts], indirect=True, ids=lambda kind: kind.name, scope="module"
)
async def test_a_killed_broker_is_an_outage_and_keeps_what_it_confirmed(broker: Broker) -> None:
    """Kill -9 under load; each confirmed event is received, at least once (SCL-1)."""
    source = await broker.source(broker.interest())
    sink = await broker.sink()
    confirmed: set[int] = set()
    number = itertools.count(1)

    async def publish() -> None:
        while True:
            batch = broker.events(*itertools.islice(number, 20))
            try:
                answers: Sequence[Any] = await sink.send(batch, timeout=3)
            except BrokerUnavailable:
                await asyncio.sleep(0.2)
                continue
            confirmed.update(
                messages_number(event) for event, answer in zip(batch, answers, strict=True) if answer == Confirmed()
            )

    found: set[int] = set()

    async def listen() -> None:
        while True:
            found.update(numbers(await _taken_now(source)))

    tasks = [asyncio.create_task(publish()), asyncio.create_task(listen())]
    # A quorum queue of RabbitMQ 3.10 finds no leader again if its node is killed in the first second of its life.
    ripe = time.monotonic() + 3
    await _until(lambda: len(confirmed) >= 200 and time.monotonic() > ripe)
    broker.server.kill()
    assert await _send_answer(sink, broker.events(-1), timeout=2, within=7) != Confirmed()
    broker.server.spawn()
    await asyncio.to_thread(broker.server.wait_until_listening)
    before = len(confirmed)
    await _until(lambda: len(confirmed) > before + 20, seconds=60)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    await _until(lambda: confirmed <= found, seconds=40)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)


def messages_number(event: Outgoing) -> int:
    return messages.number_of(Received(event.body, {}, None, None))


async def _send_answer(sink: Sink, batch: list[Outgoing], *, timeout: float, within: float) -> object:
    try:
        return (await asyncio.wait_for(sink.send(batch, timeout=timeout), within))[0]
    except BrokerUnavailable as error:
        return error


async def _outage(source: Source, *, within: float) -> None:
    """Take until the source says that the broker is not there."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            await asyncio.wait_for(source.take(5, wait=0.5), within)
        except BrokerUnavailable:
            return
    raise AssertionError("the source did not notice")


async def _reopened(broker: Broker) -> Source:
    deadline = time.monotonic() + 30
    while True:
        try:
            return await broker.source(broker.interest())
        except BrokerUnavailable:
            assert time.monotonic() < deadline, "the broker did not come back"
            await asyncio.sleep(0.2)


async def _taken_now(source: Source) -> list[Received]:
    try:
        got = list(await source.take(50, wait=0.5))
        await source.acknowledge(got)
    except BrokerUnavailable:
        await asyncio.sleep(0.2)
        return []
    return got


async def _until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.02)
