"""What is special about RabbitMQ: queues that vanish, limits that drop, alarms that block, a node that is killed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiormq
import pytest

from holdfast.brokers.engine import BrokerUnavailable, Confirmed, Interest, Outgoing, Sink, Source, Unanswered
from holdfast.brokers.rabbitmq import RabbitmqEngine
from holdfast.brokers.rabbitmq.topology import dead_queue_of, queue_of
from holdfast.errors import ConfigurationError
from servers.rabbitmq import RabbitmqServer
from tests.brokers import messages
from tests.brokers.messages import number_of, numbers, sent, taken


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitmqServer]:
    with RabbitmqServer(tmp_path_factory.mktemp("rabbitmq") / "server") as server:
        yield server


class Case:
    """An engine, the interest of one test, and all that the test has opened."""

    def __init__(self, server: RabbitmqServer, handler: str) -> None:
        self.engine = RabbitmqEngine(server.address)
        self.interest = replace(messages.interest(handler=handler), channel="special")
        self.opened: list[Sink | Source] = []

    def events(self, *given: int) -> list[Outgoing]:
        return [messages.outgoing(number, channel=self.interest.channel) for number in given]

    async def sink(self) -> Sink:
        self.opened.append(sink := self.engine.sink(lease=10))
        await sink.open()
        return sink

    async def source(self, interest: Interest | None = None) -> Source:
        self.opened.append(source := self.engine.source(interest or self.interest, lease=10))
        await source.open()
        return source


@pytest.fixture
async def case(server: RabbitmqServer, request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    case = Case(server, f"billing.{request.node.name[5:45].rstrip('_')}")
    yield case
    for each in case.opened:
        await each.close()
    await case.engine.remove(case.interest)


@pytest.fixture
async def channel(server: RabbitmqServer) -> AsyncIterator[aiormq.abc.AbstractChannel]:
    """What an operator does to the broker."""
    connection = await aiormq.connect(server.address)
    yield await connection.channel()
    await connection.close()


@pytest.fixture
def alarm(server: RabbitmqServer) -> Iterator[Callable[[bool], None]]:
    """Raise and clear the alarm that RabbitMQ itself raises when its memory is full."""

    def switch(on: bool) -> None:
        server.control("set_vm_memory_high_watermark", "absolute", "1MB" if on else "4GB")

    yield switch
    switch(False)


async def test_a_queue_that_is_deleted_under_its_consumer_is_made_again(
    case: Case, channel: aiormq.abc.AbstractChannel
) -> None:
    """The source says that it lost the queue, and then consumes from a new one with the same bindings (SCL-2)."""
    source, sink = await case.source(), await case.sink()
    await sent(sink, case.events(1))
    assert numbers(await taken(source, 1)) == [1]
    await channel.queue_delete(queue_of(case.interest))
    with pytest.raises(BrokerUnavailable, match=r"deleted|closed"):
        for _ in range(20):
            await source.take(1, wait=0.5)
    await source.take(1, wait=0)
    await sent(sink, case.events(2))
    assert numbers(await taken(source, 1)) == [2]


@pytest.mark.slow
async def test_a_queue_without_a_leader_is_told_with_its_remedy(case: Case, server: RabbitmqServer) -> None:
    """As a node leaves it that is killed just after the queue was made; deleted, it is made anew (SCL-2)."""
    source, sink = await case.source(), await case.sink()
    queue = queue_of(case.interest)
    assert "ok" in server.control("eval", f"ra:stop_server(quorum_queues, {{'%2F_{queue}', node()}}).")
    with pytest.raises(BrokerUnavailable, match=f"no leader: rabbitmqctl delete_queue {re.escape(queue)}"):
        await source.take(1, wait=0.5)
    server.control("delete_queue", queue)
    deadline = time.monotonic() + 20
    while True:
        with suppress(BrokerUnavailable):
            await source.take(1, wait=0.1)
            break
        assert time.monotonic() < deadline
    await sent(sink, case.events(1))
    assert numbers(await taken(source, 1)) == [1]


async def test_an_event_without_a_binding_stays_open(case: Case, channel: aiormq.abc.AbstractChannel) -> None:
    """RabbitMQ returns it, which is no confirmation, and takes it when the queue is bound again (SCL-1)."""
    await case.source()
    sink = await case.sink()
    await channel.queue_unbind(queue_of(case.interest), f"hf.{case.interest.channel}", "order.placed")
    answers = await sink.send(case.events(1, 2), timeout=5)
    assert [type(answer) for answer in answers] == [Unanswered, Unanswered]
    assert "no queue is bound" in str(answers[0])
    await case.source()
    assert await sink.send(case.events(3), timeout=5) == [Confirmed()]


async def test_what_the_delivery_limit_drops_is_taken_from_the_dead_queue(case: Case, server: RabbitmqServer) -> None:
    """A limit that an operator set for all queues drops nothing of ours (SCL-2)."""
    server.control("set_policy", "limit", "^hf[.]special[.].*[^d]$", '{"delivery-limit":3}', "--apply-to", "queues")
    try:
        source, sink = await case.source(), await case.sink()
        await sent(sink, case.events(7))
        for delivery in range(1, 5):
            found = await taken(source, 1, acknowledge=False)
            assert (number_of(found[0]), found[0].deliveries) == (7, delivery)
            await source.give_back(found)
        found = await taken(source, 1, acknowledge=False)
        assert found[0].headers["x-first-death-reason"] == "delivery_limit"
        await source.acknowledge(found)
        assert await source.take(1, wait=0.5) == []
        backlog = (await case.engine.backlogs([case.interest], timeout=5))[0]
        assert backlog.waiting == 0
    finally:
        server.control("clear_policy", "limit")


async def test_a_queue_that_drops_is_a_weakness(case: Case, channel: aiormq.abc.AbstractChannel) -> None:
    """An operator's own queue is used as it is, with a limit and no net, and the doctor says so (OPS-5)."""
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": 1}
    await channel.queue_declare(queue_of(case.interest), durable=True, arguments=arguments)
    source, sink = await case.source(), await case.sink()
    weaknesses = await case.engine.weaknesses([case.interest.channel], [case.interest], timeout=5)
    assert {weakness.subject for weakness in weaknesses} == {queue_of(case.interest)}
    problems = " ".join(weakness.problem for weakness in weaknesses)
    assert "its delivery limit drops events (x-delivery-limit is 1)" in problems
    assert "what its limits drop is lost" in problems and "delete it" in weaknesses[0].remedy
    await sent(sink, case.events(1))
    for _ in range(2):
        await source.give_back(await taken(source, 1, acknowledge=False))
    # That is what the weakness means.
    assert await source.take(1, wait=1) == []


async def test_another_queue_cannot_keep_the_order(case: Case, channel: aiormq.abc.AbstractChannel) -> None:
    """An ordered handler is not started on a queue that has several active consumers (SCL-2)."""
    await channel.queue_declare(queue_of(case.interest), durable=True, arguments={"x-queue-type": "quorum"})
    with pytest.raises(ConfigurationError, match="order"):
        await case.source(replace(case.interest, ordered=True))


async def test_only_one_source_of_an_ordered_handler_is_active(case: Case) -> None:
    """The second one gets nothing while the first is there, and takes over when it leaves (SCL-2)."""
    ordered = replace(case.interest, ordered=True)
    first, second = await case.source(ordered), await case.source(ordered)
    assert await first.take(5, wait=0.1) == [] and await second.take(5, wait=0.1) == []
    sink = await case.sink()
    await sent(sink, case.events(1, 2, 3))
    assert numbers(await taken(first, 3, acknowledge=False)) == [1, 2, 3]
    assert await second.take(5, wait=1) == []
    await first.close()
    assert numbers(await taken(second, 3)) == [1, 2, 3]


async def test_a_full_memory_is_an_outage_that_is_noticed_at_once(case: Case, alarm: Callable[[bool], None]) -> None:
    """A blocked connection confirms nothing. It ends no lease, and no event goes into it meanwhile (SCL-1)."""
    source, sink = await case.source(), await case.sink()
    await sent(sink, case.events(1))
    alarm(True)
    started = time.monotonic()
    # RabbitMQ takes the first one before it blocks.
    answers = [answer for _ in range(2) for answer in await _answers(sink, case.events(2, 3))]
    assert any(not isinstance(answer, Confirmed) for answer in answers)
    with pytest.raises(BrokerUnavailable, match="memory"):
        await sink.send(case.events(4), timeout=10)
    assert time.monotonic() - started < 8
    alarm(False)
    await sent(sink, case.events(5), seconds=20)
    found: set[int] = set()
    while 5 not in found:
        found |= set(numbers(await taken(source, 1)))
    assert 4 not in found


@pytest.mark.slow
async def test_a_killed_node_keeps_what_it_confirmed(case: Case, server: RabbitmqServer) -> None:
    """What was taken and not acknowledged comes back too (SCL-2)."""
    source, sink = await case.source(), await case.sink()
    await sent(sink, case.events(*range(200)))
    held = await taken(source, 5, acknowledge=False)
    acknowledged = numbers(await taken(source, 5))
    await asyncio.sleep(2)  # the broker writes acknowledgements down when it likes, and a young queue is lost
    server.kill()
    with pytest.raises(BrokerUnavailable):
        await source.acknowledge(held)
    assert not isinstance((await _answers(sink, case.events(1000)))[0], Confirmed)
    server.spawn()
    await asyncio.to_thread(server.wait_until_listening)
    found: list[int] = []
    deadline = time.monotonic() + 40
    while len(set(found)) < 195:
        assert time.monotonic() < deadline, f"{len(set(found))} of 195 came"
        try:
            got = await source.take(50, wait=0.5)
            await source.acknowledge(got)
        except BrokerUnavailable:
            await asyncio.sleep(0.2)
        else:
            found += numbers(got)
    assert set(found) == set(range(200)) - set(acknowledged)
    await sent(sink, case.events(1001), seconds=20)


async def test_an_event_from_elsewhere_is_left_to_the_listener(case: Case, channel: aiormq.abc.AbstractChannel) -> None:
    """What somebody puts into the queue itself is not thrown away for its routing key (SCL-2)."""
    source = await case.source()
    await channel.basic_publish(b"{}", routing_key=queue_of(case.interest))
    found = await taken(source, 1)
    assert found[0].body == b"{}" and found[0].deliveries == 1


async def test_what_the_broker_does_not_allow_is_told_with_a_remedy(
    case: Case, server: RabbitmqServer, channel: aiormq.abc.AbstractChannel
) -> None:
    """An exchange of another kind by the same name, and a login without rights (SCL-1)."""
    other = replace(case.interest, channel="taken")
    await channel.exchange_declare("hf.taken", exchange_type="fanout", durable=True)
    sink = await case.sink()
    with pytest.raises(BrokerUnavailable, match=r"hf\.taken") as refused:
        await sink.send([replace(each, channel="taken") for each in case.events(1)], timeout=5)
    assert "exchange=" in refused.value.remedy
    with pytest.raises(BrokerUnavailable, match=r"hf\.taken") as refused:
        await case.source(other)
    assert "exchange=" in refused.value.remedy
    await channel.exchange_delete("hf.taken")
    server.control("add_user", "nobody", "secret")
    server.control("set_permissions", "nobody", "^$", "^$", "^$")
    source = RabbitmqEngine(server.address.replace("guest:guest", "nobody:secret")).source(case.interest, lease=10)
    case.opened.append(source)
    with pytest.raises(BrokerUnavailable, match="ACCESS_REFUSED") as refused:
        await source.open()
    assert "set_permissions" in refused.value.remedy


async def test_a_removed_handler_leaves_no_queue(case: Case, server: RabbitmqServer) -> None:
    """Neither its queue nor the dead queue under it (SCL-2)."""
    source = await case.source()
    await source.close()
    assert queue_of(case.interest) in server.control("list_queues", "name")
    await case.engine.remove(case.interest)
    left = server.control("list_queues", "name")
    assert queue_of(case.interest) not in left and dead_queue_of(case.interest) not in left


async def _answers(sink: Sink, batch: list[Outgoing]) -> list[object]:
    try:
        return list(await sink.send(batch, timeout=5))
    except BrokerUnavailable as error:
        return [error]
