"""Names at brokers by templates: which are refused, where events go, and that relay and listeners agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import nats
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Worker, WorkerSettings
from holdfast.brokers.engines import engine_of
from holdfast.brokers.kafka.cluster import Cluster, group_of
from holdfast.brokers.rabbitmq.topology import exchanges_of
from holdfast.errors import ConfigurationError
from servers.nats import NatsServer
from servers.valkey import DURABLE, ValkeyServer
from tests.brokers.messages import interest, numbers, outgoing, sent, taken
from tests.worker.support import publish_many, until

MOVED = "SELECT via <> 'outbox' FROM core.subscriptions WHERE handler_name = 'shop.note'"
RELAYED = "SELECT count(*) FROM core.outbox WHERE handler_name LIKE 'relay.%' AND status = 'delivered'"


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("nats://one?stream=shop", "no {channel} in stream; write it like stream=HF_{channel}"),
        ("nats://one?stream={channel}_{type}", "type in stream"),
        ("nats://one?stream=a.{channel}", "has '.' in stream"),
        (
            "nats://one?subject=shop.{channel}.{type}",
            "no {target} in subject; write it like subject=hf.{channel}.{target}.{type}",
        ),
        ("nats://one?subject={channel}.{type}.{target}", "has the subject"),
        ("nats://one?subject=a b.{channel}.{target}.{type}", "has the subject"),
        ("nats://one?subject=>.{channel}.{target}.{type}", "has the subject"),
        ("redis://one?stream=shop:{tenant}:{channel}", "has '{tenant}' in stream"),
        ("redis://one?stream=shop", "no {channel} in stream"),
        ("kafka://one?topic=shop/{channel}", "has '/' in topic"),
        ("amqp://one?exchange=shop", "no {channel} in exchange"),
        ("nats://127.0.0.1:notaport", "has the port 'notaport'; write it like nats://host:4222"),
        ("kafka://one:9092,two:99999", "has the port '99999'"),
        ("redis://one:0", "has the port '0'"),
    ],
)
def test_a_template_that_names_nothing_is_refused(address: str, problem: str) -> None:
    """Before anything connects, with the field and what to write instead (SCL-1)."""
    with pytest.raises(ConfigurationError) as refused:
        engine_of(address)
    assert refused.value.field == "substrate"
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("template", "pattern", "refused"),
    [("{type}", "order.*", True), ("{prefix}", "order.*", False), ("{prefix}", "*.placed", True), ("", "*", False)],
)
def test_a_pattern_that_may_be_anywhere_is_refused(template: str, pattern: str, refused: bool) -> None:
    """A worker does not start with a handler that it could not find the events of (SCL-1)."""
    registry = HandlerRegistry()

    @registry.handler(pattern, name="shop.note")
    async def note(event: EventEnvelope) -> None: ...

    settings = WorkerSettings(substrate=f"kafka://one?topic=shop.{{channel}}.x{template}")
    if not refused:
        Worker("postgresql://one/two", registry, settings)
        return
    with pytest.raises(ConfigurationError, match="name the handler's event types"):
        Worker("postgresql://one/two", registry, settings)


def test_events_and_handlers_have_the_same_names() -> None:
    """On Kafka and RabbitMQ, by type and by its first part; what a name cannot have is replaced (SCL-1)."""
    wanted = interest("order.placed", "order.pa/id", "parcel.*")
    by_prefix = Cluster("kafka://one?topic=shop.{channel}.{prefix}").topics
    assert by_prefix.names(wanted) == ("shop.events.order", "shop.events.parcel")
    assert by_prefix.name("events", "parcel.sent.back") == "shop.events.parcel"
    assert group_of(wanted, "shop.events.order") == "shop.events.order.billing.charge"
    assert group_of(wanted, "hf.events") == "events.billing.charge"
    by_type = exchanges_of("amqp://one?exchange={channel}:{type}&heartbeat=5")
    assert by_type.name("events", "order.pa/id") == "events:order.pa_id"
    assert len(by_type.name("events", "x" * 500)) == 245
    assert by_type.name("events", "x" * 500) != by_type.name("events", "x" * 501)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path, *DURABLE) as server:
        yield server


@asynccontextmanager
async def handling(dsn: str, conn: asyncpg.Connection, substrate: str, seen: list[str]) -> AsyncIterator[None]:
    registry = HandlerRegistry()

    @registry.handler("order.placed", "order.paid", "parcel.*", name="shop.note")
    async def note(event: EventEnvelope) -> None:
        seen.append(event.event_type)

    async with Worker(dsn, registry, WorkerSettings(substrate=substrate), observers=()):
        await until(lambda: conn.fetchval(MOVED), what="a handler behind the broker")
        yield


async def publish_each(conn: asyncpg.Connection, *event_types: str) -> None:
    for event_type in event_types:
        await publish_many(conn, event_type, 3)


async def test_streams_of_redis_by_type(dsn: str, conn: asyncpg.Connection, valkey: ValkeyServer) -> None:
    """The relay sends to a stream for each type's first part, and the handler takes from all of them (SCL-1, SCL-2)."""
    seen: list[str] = []
    substrate = f"{valkey.address}?stream=shop:{{prefix}}:{{channel}}"
    async with handling(dsn, conn, substrate, seen):
        await publish_each(conn, "order.placed", "order.paid", "parcel.sent")
        await until(lambda: asyncio.sleep(0, len(seen) == 9), what="nine events")
    assert await conn.fetchval(RELAYED) == 9
    async with valkey.client() as client:
        lengths = {key: await client.xlen(key) for key in await client.keys("shop:*")}
    assert lengths == {b"shop:order:outbox_default": 6, b"shop:parcel:outbox_default": 3}
    engine = engine_of(substrate)
    wanted = [interest("order.placed", "order.paid", "parcel.*", handler="shop.note")]
    assert (await engine.backlogs(wanted, timeout=5))[0].waiting is None  # of a channel that nobody serves


async def test_subjects_and_streams_of_nats(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """The relay publishes where the template says, and the handler's consumer filters there (SCL-1, SCL-2)."""
    seen: list[str] = []
    with NatsServer(tmp_path) as server:
        substrate = f"{server.address}?stream=SHOP_{{channel}}&subject=acme.{{target}}.shop-{{channel}}.{{type}}"
        async with handling(dsn, conn, substrate, seen):
            await publish_each(conn, "order.placed", "order.paid", "parcel.sent")
            await until(lambda: asyncio.sleep(0, len(seen) == 9), what="nine events")
        client = await nats.connect(server.address)
        info = await client.jetstream().stream_info("SHOP_outbox_default", subjects_filter=">")
        await client.close()
    assert info.config.subjects == ["acme.*.shop-outbox_default.>"]
    assert info.state.subjects == {
        f"acme._.shop-outbox_default.{each}": 3 for each in ("order.placed", "order.paid", "parcel.sent")
    }


async def test_several_streams_are_one_source(valkey: ValkeyServer) -> None:
    """What is given back or not acknowledged comes again, from whichever stream; none starves the others (SCL-2)."""
    engine = engine_of(f"{valkey.address}?stream=by:{{channel}}:{{type}}")
    wanted = interest("order.placed", "order.paid")
    source, sink = engine.source(wanted, lease=1), engine.sink(lease=1)
    await source.open()
    await sent(sink, [outgoing(number, event_type="order.placed") for number in range(40)])
    await sent(sink, [outgoing(99, event_type="order.paid")])
    first = await taken(source, 10, acknowledge=False)
    assert 99 in numbers(first)
    await source.keep_alive(first)
    await source.acknowledge(first[:5])
    await source.give_back(first[5:])
    rest = numbers(await taken(source, 36))
    assert sorted(numbers(first[:5]) + rest) == [*range(40), 99]
    (backlog,) = await engine.backlogs([wanted], timeout=5)
    assert (backlog.waiting, backlog.unacknowledged) == (0, 0)
    await source.close()
    await sink.close()
    await engine.remove(wanted)
    assert (await engine.backlogs([wanted], timeout=5))[0].waiting is None
