"""What is special to NATS JetStream: the duplicate window, full streams, lost consumers and streams, leaders killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, PersistMode, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from holdfast.brokers.engine import BrokerUnavailable, Confirmed, Interest, Refused, Unanswered
from holdfast.brokers.interests import wants
from holdfast.brokers.keeping import DAY, retention_weaknesses
from holdfast.brokers.nats import NatsEngine
from holdfast.brokers.nats.source import NatsSource
from holdfast.brokers.nats.subjects import Subjects
from holdfast.errors import ConfigurationError
from servers.nats import NatsServer, binary, nats_cluster
from servers.processes import ServerProcess, free_port
from tests.brokers.messages import CHANNEL, interest, number_of, numbers, outgoing, sent, taken, until

NAMES = Subjects()
STREAM = "HF_events"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as started:
        yield started


@asynccontextmanager
async def jetstream(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    """JetStream as an operator sees it."""
    client = await nats.connect(server.address)
    try:
        yield client.jetstream()
    finally:
        await client.close()


names = st.text(st.characters(categories=("L", "N"), include_characters=".>%_-$#"), min_size=1, max_size=20)


@given(names, st.none() | names)
def test_subjects_name_every_event_and_no_two_the_same(event_type: str, target: str | None) -> None:
    """Any event name has a subject, which NATS takes and from which the name can be read (SCL-1)."""
    subject = NAMES.subject_of(CHANNEL, event_type, target)
    assert NAMES.event_of(subject) == (event_type, target)
    tokens = subject.split(".")
    assert all(tokens) and not {">", "*"} & set(tokens)


@given(
    st.lists(st.sampled_from(["order.placed", "order.*", "order.pl*", "*", "a..b", "*.placed", "order"]), min_size=1)
)
def test_filters_cover_what_is_wanted_and_do_not_overlap(event_types: list[str]) -> None:
    """The filters of a consumer let through every event that its handler wants (SCL-1)."""
    wanted = interest(*event_types)
    filters = NAMES.filters_of(wanted)

    def passes(subject: str) -> int:
        return sum(
            subject == each or (each.endswith(">") and subject.startswith(each[:-1]) and subject != each[:-1])
            for each in filters
        )

    for event_type in ("order.placed", "order.placed.eu", "order.", "order", "a..b", "x.placed", ""):
        for target in (None, "billing", "shipping"):
            if event_type and wants(wanted, event_type, target):
                assert passes(NAMES.subject_of(CHANNEL, event_type, target)) == 1


@pytest.mark.parametrize(
    "address", ["redis://h", "nats://", "nats://h?replica=3", "nats://h?replicas=0", "nats://h?max_age=x"]
)
def test_wrong_addresses_are_refused(address: str) -> None:
    """A mistyped option is named, not ignored (SCL-2)."""
    with pytest.raises(ConfigurationError, match="substrate"):
        NatsEngine(address)


async def test_a_server_without_jetstream_says_so(tmp_path: Path) -> None:
    """As nats-server is started without options (SCL-1)."""
    port = free_port()
    with ServerProcess([binary(), "-a", "127.0.0.1", "-p", str(port)], port, tmp_path):
        source = NatsEngine(f"nats://127.0.0.1:{port}").source(interest("order.placed"), lease=30.0)
        with pytest.raises(BrokerUnavailable, match="JetStream is off") as refused:
            await source.open()
        assert "start nats-server with -js" in refused.value.remedy
        await source.close()


async def test_a_stream_is_made_that_loses_nothing(server: NatsServer) -> None:
    """The stream refuses when it is full instead of dropping, and keeps what was read (SCL-1)."""
    engine = NatsEngine(server.address)
    sink = engine.sink(lease=30)
    assert list(await sink.send([outgoing()], timeout=5)) == [Confirmed()]
    async with jetstream(server) as js:
        config = (await js.stream_info(STREAM)).config
    assert (config.discard, config.retention, config.storage) == (
        DiscardPolicy.NEW,
        RetentionPolicy.LIMITS,
        StorageType.FILE,
    )
    assert config.max_age == 7 * 86_400
    assert [weakness.subject for weakness in await engine.weaknesses([CHANNEL], timeout=5)] == [f"stream {STREAM}"]
    await sink.close()


async def test_the_duplicate_window_and_a_new_cycle(server: NatsServer) -> None:
    """An event sent twice is stored once and confirmed twice; one that is relayed again is delivered again (SCL-1)."""
    engine = NatsEngine(server.address)
    sink, source = engine.sink(lease=30), engine.source(interest(), lease=30)
    first = outgoing(1)
    again = outgoing(1, event_id=first.event_id, message_id=f"{first.event_id}:1")
    for event in (first, first, again):
        assert list(await sink.send([event], timeout=5)) == [Confirmed()]
    assert numbers(await taken(source, 2)) == [1, 1]
    assert not await source.take(5, wait=0.2)
    await sink.close()
    await source.close()


async def test_the_window_outlives_kill_9(server: NatsServer) -> None:
    """What was confirmed before a kill is there after it, and is still known as sent (SCL-1)."""
    engine = NatsEngine(server.address)
    sink = engine.sink(lease=30)
    batch = [outgoing(number) for number in range(600)]
    assert set(await sink.send(batch, timeout=10)) == {Confirmed()}
    server.restart()
    await sent(sink, batch)
    async with jetstream(server) as js:
        assert (await js.stream_info(STREAM)).state.messages == 600
    await sink.close()


async def test_a_full_stream_answers_each_event_and_drops_none(server: NatsServer) -> None:
    """What does not fit is unanswered, so that its row stays; what was stored stays stored (SCL-1)."""
    async with jetstream(server) as js:
        await js.add_stream(StreamConfig(name=STREAM, subjects=["hf.events.>"], max_msgs=3, discard=DiscardPolicy.NEW))
        engine = NatsEngine(server.address)
        sink = engine.sink(lease=30)
        answers = await sink.send([outgoing(number) for number in range(5)], timeout=5)
        assert [type(answer) for answer in answers] == [Confirmed] * 3 + [Unanswered] * 2
        await js.purge_stream(STREAM)
        assert list(await sink.send([outgoing(5)], timeout=5)) == [Confirmed()]
    await sink.close()


async def test_one_too_large_is_refused_alone(tmp_path: Path) -> None:
    """An event that the broker never takes fails alone; its headers count, and the connection stays (SCL-1)."""
    with NatsServer(tmp_path / "nats", "max_payload: 4096") as server:
        sink = NatsEngine(server.address).sink(lease=30)
        batch = [
            outgoing(0),
            outgoing(1, body=b"x" * 5_000),
            outgoing(2, headers={"trace": "x" * 4_000}),
            outgoing(3, headers={"bad name": "x"}),
            outgoing(4),
        ]
        answers = await sink.send(batch, timeout=5)
        assert [type(answer) for answer in answers] == [Confirmed, Refused, Refused, Refused, Confirmed]
        async with jetstream(server) as js:
            await js.update_stream(name=STREAM, subjects=["hf.events.>"], discard=DiscardPolicy.NEW, max_msg_size=1_000)
        answers = await sink.send([outgoing(5, body=b"x" * 2_000), outgoing(6)], timeout=5)
        assert [type(answer) for answer in answers] == [Refused, Confirmed]
        await sink.close()


async def test_nothing_is_sent_after_its_answer(server: NatsServer) -> None:
    """What timed out while the server was away does not arrive when it is back (SCL-1)."""
    engine = NatsEngine(server.address)
    sink = engine.sink(lease=30)
    await sink.send([outgoing(0)], timeout=5)
    server.kill()
    # The connection may not have noticed yet, or have.
    for _ in range(3):
        try:
            (answer,) = await sink.send([outgoing(1)], timeout=1)
        except BrokerUnavailable:
            continue
        assert isinstance(answer, Unanswered)
    server.start()
    await sent(sink, [outgoing(2)])
    source = engine.source(interest(), lease=30)
    assert numbers(await taken(source, 2)) == [0, 2]
    assert not await source.take(1, wait=0.2)
    await sink.close()
    await source.close()


async def test_a_server_that_is_not_there_costs_no_time(server: NatsServer) -> None:
    """With the first of two servers gone the second is used at once; with both gone, that is known at once (SCL-1)."""
    gone = f"127.0.0.1:{free_port()}"
    loop = asyncio.get_running_loop()
    for _ in range(4):  # they are tried in any order
        began = loop.time()
        sink = NatsEngine(f"nats://{gone},{server.address.removeprefix('nats://')}").sink(lease=30)
        await sent(sink, [outgoing(0)])
        await sink.close()
        assert loop.time() - began < 1.5
    began = loop.time()
    with pytest.raises(BrokerUnavailable, match="Connect call failed"):
        await NatsEngine(f"nats://{gone}").sink(lease=30).open()
    assert loop.time() - began < 1.5


@pytest.mark.slow
async def test_a_frozen_server_costs_the_timeout_and_no_more(server: NatsServer) -> None:
    """Answers come within the timeout, and takers learn that nobody is there (SCL-1)."""
    engine = NatsEngine(server.address)
    sink, source = engine.sink(lease=30), engine.source(interest(), lease=30)
    await sink.send([outgoing(0)], timeout=5)
    await taken(source, 1)
    loop = asyncio.get_running_loop()
    with server.frozen():
        began = loop.time()
        answers = await sink.send([outgoing(number) for number in range(1, 400)], timeout=1)
        assert {type(answer) for answer in answers} == {Unanswered}
        assert len(answers) == 399
        with pytest.raises(BrokerUnavailable):
            await source.take(1, wait=0.5)
        with pytest.raises(BrokerUnavailable):
            await sink.send([outgoing(1)], timeout=1)
        assert loop.time() - began < 12
    await sent(sink, [outgoing(500)])
    found: list[int] = []
    while 500 not in found:
        found += numbers(await taken(source, 1))
    await sink.close()
    await source.close()


async def test_a_connection_that_ends_answers_at_once(server: NatsServer) -> None:
    """Nobody waits for the answers of a connection that is gone (SCL-1)."""
    sink = NatsEngine(server.address).sink(lease=30)
    await sink.send([outgoing(0)], timeout=5)
    loop = asyncio.get_running_loop()
    with server.frozen():
        sending = asyncio.create_task(sink.send([outgoing(1)], timeout=30))

        async def is_sent() -> bool:
            return bool(sink._waiting)

        await until(is_sent)
        began = loop.time()
        server.kill()
        server.spawn()
    # Confirmed: the client had not written it yet, and wrote it to the server that came after.
    assert {type(answer) for answer in await sending} <= {Unanswered, Confirmed}
    assert loop.time() - began < 10
    await sink.close()


async def test_a_deleted_consumer_begins_where_the_handler_began(server: NatsServer) -> None:
    """Everything that the handler is owed comes again, and the inbox knows what it has had (SCL-2)."""
    engine = NatsEngine(server.address)
    wanted = interest()
    sink, source = engine.sink(lease=30), engine.source(wanted, lease=30)
    await sink.send([outgoing(number) for number in range(3)], timeout=5)
    assert numbers(await taken(source, 3)) == [0, 1, 2]
    async with jetstream(server) as js:
        waiting = asyncio.create_task(source.take(5, wait=5))
        await asyncio.sleep(0.2)
        await js.delete_consumer(STREAM, NAMES.consumer_of(wanted))
        came = numbers(await waiting)
        came += numbers(await taken(source, 3 - len(came)))
        assert sorted(came) == [0, 1, 2]
        await js.delete_consumer(STREAM, NAMES.consumer_of(wanted))
        await sink.send([outgoing(3)], timeout=5)
        assert sorted(numbers(await taken(source, 4))) == [0, 1, 2, 3]
    await sink.close()
    await source.close()


async def test_a_deleted_stream_is_made_again(server: NatsServer) -> None:
    """Its loss costs the events in it, which the outbox still has, and nothing after them (SCL-1)."""
    engine = NatsEngine(server.address)
    sink, source = engine.sink(lease=30), engine.source(interest(), lease=30)
    await sink.send([outgoing(0)], timeout=5)
    await taken(source, 1)
    async with jetstream(server) as js:
        await js.delete_stream(STREAM)
    answers = await sink.send([outgoing(1)], timeout=5)
    assert [type(answer) for answer in answers] == [Unanswered]
    assert list(await sink.send([outgoing(1)], timeout=5)) == [Confirmed()]
    assert numbers(await taken(source, 1)) == [1]
    await sink.close()
    await source.close()


async def test_the_past_minute_and_no_more(server: NatsServer) -> None:
    """A new handler begins a minute before its subscription: later than that is not owed (SCL-2)."""
    engine = NatsEngine(server.address)
    sink = engine.sink(lease=30)
    await sink.send([outgoing(0)], timeout=5)
    early = engine.source(interest(handler="billing.early", since=datetime.now(UTC) + timedelta(seconds=30)), lease=30)
    late = engine.source(interest(handler="billing.late", since=datetime.now(UTC) + timedelta(minutes=5)), lease=30)
    assert numbers(await taken(early, 1)) == [0]
    assert not await late.take(1, wait=0.2)
    for each in (sink, early, late):
        await each.close()


@pytest.mark.slow
async def test_what_is_not_acknowledged_comes_again_and_is_counted(server: NatsServer) -> None:
    """After the lease, or at once when given back; kept alive it does not (SCL-2)."""
    engine = NatsEngine(server.address)
    sink, source = engine.sink(lease=30), engine.source(interest(), lease=1)
    await sink.send([outgoing(0), outgoing(1)], timeout=5)
    held, lost = await taken(source, 2, acknowledge=False)
    deadline = asyncio.get_running_loop().time() + 2.5
    again = []
    while asyncio.get_running_loop().time() < deadline:
        await source.keep_alive([held])
        again += await source.take(5, wait=0.3)
    assert {number_of(message) for message in again} == {number_of(lost)}
    assert max(message.deliveries or 0 for message in again) > 1
    await source.give_back([held])
    (back,) = await taken(source, 1)
    assert number_of(back) == number_of(held)
    assert back.deliveries == 2
    await sink.close()
    await source.close()


@pytest.mark.parametrize("block", [b"N\r\n", b"XXXX\r\n\r\n", b"NATS/1.0 \xff\xff\xff\r\n\r\n"])
async def test_headers_that_are_none_end_no_connection(server: NatsServer, block: bytes) -> None:
    """The message arrives with what can be read of it, and so does the next one (SCL-2)."""
    engine = NatsEngine(server.address)
    sink, source = engine.sink(lease=30), engine.source(interest(), lease=30)
    await source.open()
    subject = NAMES.subject_of(CHANNEL, "order.placed", None)
    url = urlsplit(server.address)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
    writer.write(b"HPUB %s %d %d\r\n%s\r\nPING\r\n" % (subject.encode(), len(block), len(block), block))
    async with asyncio.timeout(10):
        await reader.readuntil(b"PONG\r\n")
    writer.close()
    await sent(sink, [outgoing(1)])
    first, second = await taken(source, 2)
    assert (first.body, first.headers, first.deliveries) == (b"", {}, 1)
    assert number_of(second) == 1
    await sink.close()
    await source.close()


async def test_unwanted_events_are_passed_over(server: NatsServer) -> None:
    """Patterns inside a name, and other targets, are left out without burdening anybody (SCL-2)."""
    engine = NatsEngine(server.address)
    wanted = interest("order.pl*", "stock.*")
    sink, source = engine.sink(lease=30), engine.source(wanted, lease=30)
    await source.open()
    types = ["order.placed", "order.paid", "stock.low.eu", "stocks", "order.plant"]
    batch = [outgoing(number, event_type=event_type) for number, event_type in enumerate(types)]
    batch += [outgoing(5, target="billing"), outgoing(6, target="shipping")]
    assert set(await sink.send(batch, timeout=5)) == {Confirmed()}
    assert numbers(await taken(source, 4)) == [0, 2, 4, 5]
    assert not await source.take(1, wait=0.2)

    async def nothing_waits() -> bool:
        (backlog,) = await engine.backlogs([wanted], timeout=5)
        return (backlog.waiting, backlog.unacknowledged) == (0, 0)

    await until(nothing_waits)
    await sink.close()
    await source.close()


async def test_ordered_handlers_get_one_at_a_time(server: NatsServer) -> None:
    """With several workers, only one unacknowledged event keeps the order (SCL-2)."""
    engine = NatsEngine(server.address)
    wanted = interest(ordered=True)
    sink = engine.sink(lease=30)
    one, other = (engine.source(wanted, lease=30) for _ in range(2))
    await sink.send([outgoing(number) for number in range(6)], timeout=5)
    order: list[int] = []

    async def work(source: object) -> None:
        assert source in (one, other)
        while len(order) < 6:
            for message in await source.take(10, wait=0.3):  # type: ignore[attr-defined]
                order.append(number_of(message))
                await asyncio.sleep(0.01)
                await source.acknowledge([message])  # type: ignore[attr-defined]

    await asyncio.wait_for(asyncio.gather(work(one), work(other)), 20)
    assert order == [0, 1, 2, 3, 4, 5]
    for each in (sink, one, other):
        await each.close()


async def test_doctor_names_what_would_lose_events(server: NatsServer) -> None:
    """Each setting that drops unread or confirmed events has a line with its remedy (OPS-5)."""
    async with jetstream(server) as js:
        await js.add_stream(
            StreamConfig(
                name=STREAM,
                subjects=["hf.events.>"],
                storage=StorageType.MEMORY,
                retention=RetentionPolicy.INTEREST,
                discard=DiscardPolicy.OLD,
                max_msgs=100,
                max_msgs_per_subject=10,
                max_age=3600,
                no_ack=True,
            )
        )
    problems = " / ".join(each.problem for each in await NatsEngine(server.address).weaknesses([CHANNEL], timeout=5))
    for part in ("replica", "memory", "acknowledged", "oldest", "each type", "read or not", "confirms nothing"):
        assert part in problems
    assert not await NatsEngine(server.address).weaknesses(["other"], timeout=5)


async def test_doctor_names_what_others_have_set(server: NatsServer) -> None:
    """On a stream and a consumer that were edited; a limit that refuses what is new drops nothing (OPS-5)."""
    engine = NatsEngine(server.address)
    source = engine.source(interest(), lease=30)
    await source.open()
    await source.close()
    usual = {each.problem for each in await engine.weaknesses([CHANNEL], timeout=5)}
    async with jetstream(server) as js:
        config = (await js.stream_info(STREAM)).config
        await js.update_stream(config.evolve(max_bytes=1_000_000, duplicate_window=60.0))
        assert {each.problem for each in await engine.weaknesses([CHANNEL], timeout=5)} == usual
        bad = config.evolve(
            max_bytes=1_000_000, discard=DiscardPolicy.OLD, duplicate_window=7200.0, allow_rollup_hdrs=True
        )
        await js.update_stream(bad)
        (consumer,) = await js.consumers_info(STREAM)
        await js.add_consumer(STREAM, consumer.config.evolve(inactive_threshold=300.0))
    found = {each.problem: each for each in await engine.weaknesses([CHANNEL], timeout=5)}
    text = " / ".join(found)
    for part in ("oldest", "120 minutes in memory", "allow_rollup_hdrs", "asks for 5 minutes (inactive_threshold)"):
        assert part in text, text
    assert len(found) == len(usual) + 4


async def test_a_stream_of_others_that_takes_nothing_is_named(server: NatsServer) -> None:
    """By the answers, and by the doctor with the way out: other subjects, and no room (OPS-5, SCL-1)."""
    engine = NatsEngine(server.address)
    sink = engine.sink(lease=30)

    async def found() -> dict[str, str]:
        return {each.problem: each.remedy for each in await engine.weaknesses([CHANNEL], timeout=5)}

    async with jetstream(server) as js:
        await js.add_stream(StreamConfig(name=STREAM, subjects=["shop.>"], max_age=7 * DAY, max_msgs=2))
        (answer,) = await sink.send([outgoing()], timeout=5)
        assert isinstance(answer, Unanswered)
        assert answer.told
        (problem,) = [each for each in await found() if "does not take hf.events.*.>" in each]
        assert "add it to the subjects" in (await found())[problem]
        config = (await js.stream_info(STREAM)).config
        await js.update_stream(config.evolve(subjects=["shop.>", "hf.>"], discard=DiscardPolicy.NEW))
        assert not any("does not take" in each or "full" in each for each in await found())
        answers = await sink.send([outgoing(1), outgoing(2), outgoing(3)], timeout=5)
        assert [getattr(each, "told", None) for each in answers] == [None, None, True]
        (problem,) = [each for each in await found() if "is full: it holds 2 messages and takes 2 (max_msgs)" in each]
        assert "raise max_msgs" in (await found())[problem]
    await sink.close()


async def test_a_stream_that_has_the_subjects_already_is_told_with_a_remedy(server: NatsServer) -> None:
    """Two streams cannot have the same subjects; an operator learns which, and what to do (SCL-1)."""
    async with jetstream(server) as js:
        await js.add_stream(StreamConfig(name="OTHERS", subjects=["hf.>"]))
    sink = NatsEngine(server.address).sink(lease=30)
    with pytest.raises(BrokerUnavailable, match="overlap") as refused:
        await sink.send([outgoing()], timeout=5)
    assert "hf.events.*.>" in refused.value.remedy
    await sink.close()


async def test_doctor_names_a_stream_that_confirms_too_early(server: NatsServer) -> None:
    """With asynchronous writes a confirmation promises nothing (OPS-5)."""
    async with jetstream(server) as js:
        config = StreamConfig(name=STREAM, subjects=["hf.events.>"], persist_mode=PersistMode.ASYNC, max_age=7 * DAY)
        await js.add_stream(config)
    found = [each.problem for each in await NatsEngine(server.address).weaknesses([CHANNEL], timeout=5)]
    assert any("confirms events before they are written" in each for each in found), found


@pytest.mark.parametrize(
    ("kept", "remembered", "problem"),
    [
        (3_600.0, 60 * DAY, "60 minutes, read or not"),
        (90 * DAY, 60 * DAY, "for 90 days (max_age), and the inbox knows what was handled for 60 days"),
        (None, 60 * DAY, "for ever"),
        (30 * DAY, 60 * DAY, ""),
        (None, None, ""),
    ],
)
def test_retention_is_compared_with_what_is_remembered(
    kept: float | None, remembered: float | None, problem: str
) -> None:
    """Events that go before a handler comes back, and events that come again after the inbox forgot them (OPS-5)."""
    found = [each.problem for each in retention_weaknesses("stream HF_events", kept, remembered, "max_age")]
    assert (problem in found[0]) if problem else not found


async def test_backlogs_are_counted_and_a_retired_handler_leaves_no_consumer(server: NatsServer) -> None:
    """What waits, what is held and what came again is seen; a retired handler leaves no consumer (OPS-5)."""
    engine = NatsEngine(server.address)
    wanted = interest()
    sink, source = engine.sink(lease=30), engine.source(wanted, lease=30)
    (unknown,) = await engine.backlogs([wanted], timeout=5)
    assert (unknown.waiting, unknown.unacknowledged) == (None, None)
    await source.open()
    await sink.send([outgoing(number) for number in range(5)], timeout=5)
    await source.take(2, wait=2)
    (backlog,) = await engine.backlogs([wanted], timeout=5)
    assert (backlog.handler_name, backlog.waiting, backlog.unacknowledged) == ("billing.charge", 3, 2)
    await source.close()
    earlier = Interest("billing.charge", CHANNEL, "billing", ("order.paid",), datetime.now(UTC))
    older = engine.source(earlier, lease=30)
    await older.open()
    await older.close()
    await engine.remove(wanted)
    await engine.remove(wanted)
    async with jetstream(server) as js:
        assert await js.consumers_info(STREAM) == []
        with pytest.raises(NotFoundError):
            await js.consumer_info(STREAM, NAMES.consumer_of(wanted))
    await sink.close()


async def test_a_longer_lease_reaches_the_consumer(server: NatsServer) -> None:
    """After a restart with a longer lease, what is kept alive at its pace stays with its worker (SCL-2)."""
    engine = NatsEngine(server.address)
    wanted = interest()
    for lease, expected in ((2, 2), (30, 30), (5, 30)):
        source = engine.source(wanted, lease=lease)
        await source.open()
        async with jetstream(server) as js:
            info = await js.consumer_info(STREAM, NAMES.consumer_of(wanted))
        assert info.config.ack_wait == expected
        await source.close()


async def test_a_consumer_that_has_something_and_says_nothing(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests get lost; silence beside a backlog is answered with a new connection (SCL-2)."""
    engine = NatsEngine(server.address)
    sink, source = engine.sink(lease=30), engine.source(interest(), lease=30)
    await source.open()
    pull = NatsSource._pull
    deaf = source._subscribed

    async def lost(self: NatsSource, client: object, *arguments: object) -> object:
        if client is deaf:
            await asyncio.sleep(0.05)
            return []
        return await pull(self, client, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(NatsSource, "_pull", lost)
    monkeypatch.setattr("holdfast.brokers.nats.source._SILENT_SECONDS", 0.5)
    await sent(sink, [outgoing(0)])
    assert numbers(await taken(source, 1)) == [0]
    await sink.close()
    await source.close()


@pytest.mark.nightly("several brokers or consumers")
@pytest.mark.slow
async def test_three_servers_and_their_leader_killed(tmp_path: Path) -> None:
    """With three replicas nothing that was confirmed is lost when the leader is killed, or frozen (SCL-1)."""
    with nats_cluster(tmp_path) as cluster:
        engine = NatsEngine(cluster.address)
        wanted = interest()
        sink, source = engine.sink(lease=5), engine.source(wanted, lease=5)
        confirmed: set[int] = set()
        killed: list[NatsServer] = []

        async def leader() -> NatsServer:
            alive = next(server for server in cluster.servers if server not in killed)
            async with jetstream(alive) as js:
                found = (await js.stream_info(STREAM)).cluster
                assert found is not None and found.leader is not None
                return cluster.named(found.leader)

        async def send_until(count: int) -> None:
            waiting = list(range(len(confirmed), count))
            while waiting:
                batch = [outgoing(number) for number in waiting[:100]]
                try:
                    answers = await sink.send(batch, timeout=10)
                except BrokerUnavailable:
                    await asyncio.sleep(0.2)
                    continue
                done = {n for n, answer in zip(waiting, answers, strict=False) if answer == Confirmed()}
                confirmed.update(done)
                waiting = [number for number in waiting if number not in done]

        await send_until(500)
        killed.append(await leader())
        killed[0].kill()
        await asyncio.wait_for(send_until(1_000), 60)
        killed[0].start()
        killed.clear()
        frozen = await leader()
        with frozen.frozen():
            await asyncio.wait_for(send_until(1_200), 60)
        got: set[int] = set()
        async with asyncio.timeout(60):
            while not confirmed <= got:
                try:
                    messages = await source.take(200, wait=1)
                    await source.acknowledge(messages)
                except BrokerUnavailable:
                    await asyncio.sleep(0.2)
                    continue
                got.update(numbers(messages))
        assert got == confirmed == set(range(1_200))
        await sink.close()
        await source.close()
