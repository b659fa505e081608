"""The engine of RabbitMQ: makes sinks and sources, and inspects exchanges and queues for operators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiormq import AMQPChannelError, ChannelPreconditionFailed

from holdfast.brokers import cloudevents
from holdfast.brokers.addresses import address_of
from holdfast.brokers.engine import Backlog, BrokerUnavailable, Interest, Weakness, left_of
from holdfast.brokers.rabbitmq.link import ANSWER_SECONDS, Link, within
from holdfast.brokers.rabbitmq.sink import RabbitmqSink
from holdfast.brokers.rabbitmq.source import RabbitmqSource
from holdfast.brokers.rabbitmq.topology import (
    SCHEMES,
    dead_queue_of,
    differences,
    exchanges_of,
    make_exchange,
    queue_of,
    waiting,
)


class RabbitmqEngine:
    """One RabbitMQ."""

    name = "rabbitmq"

    def __init__(self, address: str) -> None:
        self._address = address
        self._exchanges = exchanges_of(address)
        found = address_of(address, SCHEMES, None)
        for option in ("cafile", "certfile", "keyfile"):
            found.file(option)
        self.binding = found.binding(cloudevents.AMQP)

    def sink(self, *, lease: float) -> RabbitmqSink:
        return RabbitmqSink(self._address)

    def source(self, interest: Interest, *, lease: float) -> RabbitmqSource:
        return RabbitmqSource(self._address, interest)

    def names(self, interest: Interest) -> Sequence[str]:
        return self._exchanges.names(interest)

    async def weaknesses(
        self,
        channels: Sequence[str],
        interests: Sequence[Interest] = (),
        *,
        remembered: float | None = None,
        timeout: float,
    ) -> Sequence[Weakness]:
        found: list[Weakness] = []
        async with self._link() as link:
            for name in self._exchanges.names_of(channels, interests):
                channel = await link.side_channel(timeout)
                try:
                    await make_exchange(channel, name, timeout)
                    await within(timeout, channel.close())
                except ChannelPreconditionFailed as error:
                    remedy = "delete it, and start the relay again, which makes it anew"
                    found.append(Weakness(name, f"it is no durable topic exchange: {error}", remedy))
            for interest in interests:
                if interest.channel in channels:
                    found += await differences(link, interest, timeout)
        return found

    async def backlogs(self, interests: Sequence[Interest], *, timeout: float) -> Sequence[Backlog]:
        found: list[Backlog] = []
        async with self._link() as link:
            for interest in interests:
                ready = await waiting(link, queue_of(interest), timeout)
                dead = await waiting(link, dead_queue_of(interest), timeout)
                held = None if ready is None else ready + (dead or 0)
                # Only the management plugin tells how many are taken and not acknowledged.
                found.append(Backlog(interest.handler_name, held, None, dead))
        return found

    async def remove(self, interest: Interest) -> None:
        async with self._link() as link:
            channel = await link.channel()
            for queue in (queue_of(interest), dead_queue_of(interest)):
                await within(ANSWER_SECONDS, channel.queue_delete(queue))

    # The template names exchanges only. A handler's queue stays the same and keeps its bindings: no message is left.
    naming = ""

    def named(self, naming: str) -> RabbitmqEngine:
        return self

    async def left(self, interest: Interest, *, timeout: float) -> int | None:
        (found,) = await self.backlogs([interest], timeout=timeout)
        return left_of([found])

    @asynccontextmanager
    async def _link(self) -> AsyncIterator[Link]:
        link = Link(self._address, "holdfast operator")
        try:
            yield link
        except AMQPChannelError as error:
            raise BrokerUnavailable(f"RabbitMQ: {error}") from error
        finally:
            await link.close()
