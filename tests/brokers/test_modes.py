"""The modes of CloudEvents at brokers: others read messages by the binding, workers by the signature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import asyncpg
import pytest
from cloudevents.core.bindings import amqp, http, kafka
from cloudevents.core.formats.json import JSONFormat

from holdfast import EventEnvelope, HandlerContext, HandlerRegistry, Publisher
from holdfast.brokers.cloudevents import HEAD, STRUCTURED
from holdfast.brokers.engine import Outgoing, Received
from holdfast.brokers.engines import engine_of
from holdfast.errors import ConfigurationError
from servers.kafka import kafka_server
from servers.nats import NatsServer
from servers.rabbitmq import RabbitmqServer
from tests.brokers.messages import interest, outgoing, sent, taken
from tests.worker.support import PUBLISHER, running, until

FORMAT = JSONFormat()
HANDLER = "billing.charge_card"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module", params=["nats", "rabbitmq", "kafka"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        match request.param:
            case "nats":
                yield stack.enter_context(NatsServer(folder)).address
            case "rabbitmq":
                yield stack.enter_context(RabbitmqServer(folder)).address
            case _:
                yield stack.enter_context(kafka_server()).address


def in_mode(address: str, mode: str) -> str:
    return f"{address}{'&' if '?' in address else '?'}mode={mode}"


def read_by_oracle(name: str, message: Received) -> Any:
    """The event as the library of the CloudEvents project reads it by the binding of a broker."""
    headers = dict(message.headers)
    kind = headers["content-type"]
    if kind == STRUCTURED:
        return FORMAT.read(None, message.body)
    if name == "kafka":
        encoded = {each: value.encode() for each, value in headers.items()}
        return kafka.from_binary(kafka.KafkaMessage(encoded, None, message.body), FORMAT)
    if name == "rabbitmq":
        del headers["content-type"]
        return amqp.from_binary(amqp.AMQPMessage({"content-type": kind}, headers, message.body), FORMAT)
    return http.from_binary(http.HTTPMessage(headers, message.body), FORMAT)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["structured", "binary"])
async def test_others_and_handlers_read_the_same_event(
    dsn: str, conn: asyncpg.Connection, address: str, mode: str
) -> None:
    """By the type of its content, in both modes; its headers and its trace come along (SCL-3, SCL-1)."""
    engine = engine_of(in_mode(address, mode))
    registry = HandlerRegistry()
    got: list[tuple[EventEnvelope, Mapping[str, str]]] = []

    @registry.handler("order.placed", name=HANDLER)
    async def charge(event: EventEnvelope, context: HandlerContext) -> None:
        got.append((event, context.headers))

    channel = f"hf_{mode}_{engine.name}"
    source = engine.source(replace(interest(handler="audit.other"), channel=channel), lease=30)
    await source.open()
    try:
        async with running(dsn, registry, substrate=in_mode(address, mode), channels=(channel,)):
            query = "SELECT bool_and(via <> 'outbox') FROM core.subscriptions WHERE handler_name = $1"
            await until(lambda: conn.fetchval(query, HANDLER), what="the handler has moved")
            await Publisher("shop.é").publish_alone(
                conn,
                "order.placed",
                {"name": "Zoë ✓", "n": 1.50},
                idempotency_key="k % 1",
                headers={"tenant": "acmé"},
                trace_context=TRACE,
                channel=channel,
            )
            (message,) = await taken(source, 1)
            await until(lambda: len(got) == 1, what="the handler ran")
            await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM core.event_handled"), what="the inbox")
    finally:
        await source.close()
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status = 'failed'") == 0
    envelope, headers = got[0]
    found = read_by_oracle(engine.name, message)
    assert message.headers["content-type"] == (STRUCTURED if mode == "structured" else "application/json")
    assert found.get_id() == str(envelope.event_id)
    assert (found.get_type(), found.get_data()) == ("order.placed", envelope.payload)
    assert envelope.payload == {"name": "Zoë ✓", "n": 1.5}
    assert found.get_extension("traceparent") == TRACE
    assert (envelope.idempotency_key, envelope.source) == ("k % 1", "shop.é")
    assert (headers["tenant"], envelope.trace_context) == ("acmé", TRACE)


@pytest.mark.slow
async def test_what_is_changed_in_the_binary_mode_is_not_handled(
    dsn: str, conn: asyncpg.Connection, address: str
) -> None:
    """The data and what stands before it are signed; attributes beside them are not believed (SEC-1)."""
    engine = engine_of(in_mode(address, "binary"))
    registry, got = HandlerRegistry(), []

    @registry.handler("order.placed", name=HANDLER)
    async def charge(event: EventEnvelope) -> None:
        got.append(event.payload["n"])

    channel = f"hf_forged_{engine.name}"
    source = engine.source(replace(interest(handler="audit.other"), channel=channel), lease=30)
    sink = engine.sink(lease=30)
    await source.open()
    try:
        async with running(dsn, registry, substrate=in_mode(address, "binary"), channels=(channel,)):
            query = "SELECT bool_and(via <> 'outbox') FROM core.subscriptions WHERE handler_name = $1"
            await until(lambda: conn.fetchval(query, HANDLER), what="the handler has moved")
            await PUBLISHER.publish_alone(conn, "order.placed", {"n": 1}, idempotency_key="k", channel=channel)
            (message,) = await taken(source, 1)
            await until(lambda: got == [1], what="the real one is handled")

            def forged(body: bytes, **changes: str) -> Outgoing:
                return replace(outgoing(channel=channel), body=body, headers={**message.headers, **changes})

            prefix = {"nats": "ce-", "rabbitmq": "cloudEvents_", "kafka": "ce_"}[engine.name]
            await sent(
                sink,
                [
                    forged(message.body.replace(b"1", b"2")),
                    forged(message.body, **{HEAD: "bm90aGluZw=="}),
                    forged(message.body, **{HEAD: "no base64"}),
                    # The same event once more, whatever the attributes beside it say.
                    forged(message.body, **{f"{prefix}id": "0" * 32, f"{prefix}idempotencykey": "another"}),
                ],
            )
            failed = (
                "SELECT count(*) = 3 FROM core.outbox WHERE status = 'failed' AND event_type = 'holdfast.unreadable'"
            )
            await until(lambda: conn.fetchval(failed), what="three dead letters")
    finally:
        await source.close()
        await sink.close()
    assert got == [1]


@pytest.mark.parametrize(
    "address", ["nats://x?mode=both", "amqp://x?mode=", "kafka://x?mode=Binary", "redis://x?mode=binary"]
)
def test_modes_that_no_binding_defines_are_refused(address: str) -> None:
    """Redis has no binding; a mistyped mode is named (SCL-3)."""
    with pytest.raises(ConfigurationError, match="mode"):
        engine_of(address)
