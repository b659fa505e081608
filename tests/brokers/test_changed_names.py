"""What is left at a broker by names that were changed is told, until it is taken or removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, Worker, WorkerSettings
from holdfast.brokers.engine import Interest
from holdfast.brokers.engines import engine_of
from holdfast.operator import Operator
from servers.kafka import kafka_server
from servers.nats import NatsServer
from servers.rabbitmq import RabbitmqServer
from servers.valkey import DURABLE, ValkeyServer
from tests.brokers.messages import interest, outgoing
from tests.brokers.test_operating import holdfast
from tests.worker.support import Facts, publish_many, until

HANDLER = "shop.note"
NOTED = "SELECT naming = $1 FROM core.broker_reports WHERE handler_name = 'shop.note'"
RELAYED = "SELECT count(*) = 5 FROM core.outbox WHERE handler_name LIKE 'relay.%' AND status = 'delivered'"
STRANDED = "SELECT former = jsonb_build_object($1::text, 5) FROM core.broker_reports WHERE handler_name = 'shop.note'"
FORGOTTEN = "SELECT naming = $1 AND former = '{}' FROM core.broker_reports WHERE handler_name = 'shop.note'"


@pytest.fixture(params=["nats", "redis", "kafka"])
def addresses(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a broker with the names that it has had, and with those that it gets."""
    if request.param == "nats":
        with NatsServer(tmp_path) as nats:
            yield nats.address, f"{nats.address}?stream=NEW_{{channel}}&subject=new.{{channel}}.{{target}}.{{type}}"
    elif request.param == "redis":
        with ValkeyServer(tmp_path / "valkey", *DURABLE) as valkey:
            yield valkey.address, f"{valkey.address}?stream=new:{{channel}}"
    else:
        with kafka_server() as kafka:
            yield f"{kafka.address}?partitions=2", f"{kafka.address}?partitions=2&topic=new.{{channel}}"


@pytest.mark.slow
async def test_messages_by_former_names_are_told_until_they_are_taken(
    dsn: str, conn: asyncpg.Connection, addresses: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the worker's log, by the status and by the doctor (SCL-2, OPS-5)."""
    monkeypatch.setattr("holdfast.worker.broker_reports._EVERY", 0.3)
    registry, done, facts = HandlerRegistry(), list[int](), Facts()

    @registry.handler("order.placed", name=HANDLER)
    async def note(event: EventEnvelope) -> None:
        done.append(event.payload["n"])

    old, new = (WorkerSettings(substrate=each) for each in addresses)
    old_names, new_names = (engine_of(each).naming for each in addresses)
    broker = engine_of(addresses[0]).name
    async with Worker(dsn, registry, old, observers=()):
        await until(lambda: conn.fetchval(NOTED, old_names), what="the names are noted")
    async with Worker(dsn, HandlerRegistry(), old, observers=()):
        await publish_many(conn, "order.placed", 5)
        await until(lambda: conn.fetchval(RELAYED), what="five messages that nobody takes")
    async with Worker(dsn, registry, new, observers=(facts.append,)):
        await until(lambda: conn.fetchval(STRANDED, old_names), what="five messages by the old names")
        await until(lambda: facts.notices("broker_names_changed"), what="a warning")
    (told,) = facts.notices("broker_names_changed")
    assert (told.details["names"], told.details["messages"], told.details["handler"]) == (old_names, 5, HANDLER)
    assert f"holdfast relay check {broker} --repair" in str(told.details["remedy"])
    assert not done
    async with Operator(dsn, actor="ann") as operator:
        (found,) = [each for each in (await operator.doctor()).findings if each.code == "broker-stranded"]
        assert "has 5 messages for shop.note" in found.what and old_names in found.evidence
        _, said = await holdfast(dsn, "status", "--json")
        (stranded,) = json.loads(said[said.index("{") :])["broker_stranded"]
        assert stranded == {"broker": broker, "handler_name": HANDLER, "naming": old_names, "waiting": 5}
        async with Worker(dsn, registry, old, observers=()):
            await until(lambda: len(done) == 5, what="all are taken by the old names")
        async with Worker(dsn, registry, new, observers=()):
            await until(lambda: conn.fetchval(FORGOTTEN, new_names), what="nothing is left")
        assert "broker-stranded" not in {each.code for each in (await operator.doctor()).findings}
    assert sorted(done) == list(range(5))


async def test_names_on_nats_with_other_event_types(tmp_path: Path) -> None:
    """The consumer of other filters is found by its handler, and one by other subjects is not counted (SCL-2)."""
    with NatsServer(tmp_path) as server:
        engine = engine_of(server.address)
        sink, source = engine.sink(lease=30), engine.source(interest(), lease=30)
        await source.open()
        await sink.send([outgoing(number) for number in range(3)], timeout=5)
        await source.close()
        await sink.close()
        now = interest()
        wider = Interest(now.handler_name, now.channel, now.domain_context, ("order.*", "invoice.sent"), now.since)
        assert await engine.left(now, timeout=5) == await engine.left(wider, timeout=5) == 3
        other = engine.named("subject=other.{channel}.{target}.{type}")
        assert await other.left(wider, timeout=5) == 0
        assert await engine.named("stream=NONE_{channel}").left(now, timeout=5) == 0


@pytest.mark.slow
async def test_other_exchanges_leave_nothing_behind(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """RabbitMQ has one queue for a handler by all names, which keeps its bindings (SCL-2)."""
    registry, done = HandlerRegistry(), list[int]()

    @registry.handler("order.placed", name=HANDLER)
    async def note(event: EventEnvelope) -> None:
        done.append(event.payload["n"])

    moved = "SELECT via = 'rabbitmq' FROM core.subscriptions WHERE handler_name = 'shop.note'"
    with RabbitmqServer(tmp_path) as server:
        old = WorkerSettings(substrate=server.address)
        async with Worker(dsn, registry, old, observers=()):
            await until(lambda: conn.fetchval(moved), what="the handler gets its events there")
        async with Worker(dsn, HandlerRegistry(), old, observers=()):
            await publish_many(conn, "order.placed", 5)
            await until(lambda: conn.fetchval(RELAYED), what="five messages that nobody takes")
        new = WorkerSettings(substrate=f"{server.address}?exchange=new.{{channel}}")
        async with Worker(dsn, registry, new, observers=()):
            await until(lambda: len(done) == 5, what="all are taken")
    assert sorted(done) == list(range(5))
