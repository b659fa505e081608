"""Takes the events of one handler from its quorum queue, and from the dead queue under it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from aiormq import AMQPChannelError, Channel
from aiormq.abc import DeliveredMessage

from holdfast.brokers.engine import BrokerUnavailable, Interest, Received
from holdfast.brokers.interests import TARGET_HEADER, TYPE_HEADER, wants
from holdfast.brokers.rabbitmq.link import ANSWER_SECONDS, GOODBYE_SECONDS, Link, within
from holdfast.brokers.rabbitmq.topology import dead_queue_of, exchanges_of, make_queue, queue_of, refused

_DELIVERY_COUNT: Final = "x-delivery-count"
# How often in a row the queue may have events that it does not deliver, before the connection is taken for broken.
_MOST_SILENCES: Final = 3


class _Token(NamedTuple):
    channel: Channel
    tag: int


class RabbitmqSource:
    """A consumer whose prefetch grows to the most messages that were ever asked for. RabbitMQ has no leases."""

    def __init__(self, address: str, interest: Interest) -> None:
        self._interest = interest
        self._link = Link(address, f"holdfast {interest.handler_name}")
        self._names = exchanges_of(address)
        self._exchanges = frozenset(self._names.names(interest))
        self._consuming: Channel | None = None
        self._prefetch = 0
        self._tags: list[str] = []
        self._buffer: deque[Received] = deque()
        # Delivery tags that are not settled: RabbitMQ closes the channel if one is settled twice.
        self._unsettled: set[int] = set()
        self._changed = asyncio.Event()
        self._lost: str | None = None
        self._probe: asyncio.Task[int] | None = None
        self._silences = 0

    async def open(self) -> None:
        await self._ready(0)

    async def take(self, most: int, *, wait: float) -> Sequence[Received]:
        deadline = asyncio.get_running_loop().time() + wait
        try:
            await self._ready(most)
            if not self._buffer:
                await self._wait(deadline)
        except BrokerUnavailable:
            await self._abandon()
            raise
        return [self._buffer.popleft() for _ in range(min(most, len(self._buffer)))]

    async def keep_alive(self, messages: Sequence[Received]) -> None:
        pass

    async def acknowledge(self, messages: Sequence[Received]) -> None:
        await self._settle(messages, acknowledged=True)

    async def give_back(self, messages: Sequence[Received]) -> None:
        await self._settle(messages, acknowledged=False)

    async def close(self) -> None:
        channel = self._consuming
        if channel is not None and self._link.uses(channel):
            with suppress(BrokerUnavailable, AMQPChannelError):
                await within(GOODBYE_SECONDS, self._stop_consuming(channel))
        self._forget()
        await self._link.close()

    async def _ready(self, most: int) -> None:
        """Connect, make the queue and consume, unless that is done already."""
        if self._lost is not None:
            raise BrokerUnavailable(self._lost)
        if self._consuming is None or not self._link.uses(self._consuming):
            self._forget()
            await self._link.drop()
            try:
                await make_queue(self._link, self._interest, self._names)
            except AMQPChannelError as error:
                raise refused(error) from error
            self._consuming = await self._link.channel()
            self._link.when_closed(lambda: self._lose("the channel to RabbitMQ was closed"))
            self._consuming.on_consumer_cancel_callbacks.add(lambda _: self._lose("RabbitMQ deleted the queue"))
        wanted = most + len(self._unsettled) - len(self._buffer) if most else 0
        if wanted > self._prefetch:
            try:
                await within(ANSWER_SECONDS, self._consume(self._consuming, wanted))
            except (AMQPChannelError, BrokerUnavailable) as error:
                # A queue that has lost its leader exists, but does not answer; only an operator may give it up.
                queue = queue_of(self._interest)
                remedy = f"rabbitmqctl delete_queue {queue}, then holdfast relay check rabbitmq --repair"
                problem = f"{queue} cannot be consumed: {error}; if that stays so, it has no leader: {remedy}"
                raise BrokerUnavailable(problem) from error

    async def _consume(self, channel: Channel, prefetch: int) -> None:
        for tag in self._tags:
            await channel.basic_cancel(tag)
        self._tags.clear()
        # In quorum queues a prefetch belongs to a consumer, and has to be set before it begins.
        for queue, count in ((queue_of(self._interest), prefetch), (dead_queue_of(self._interest), 1)):
            await channel.basic_qos(prefetch_count=count)
            consuming = await channel.basic_consume(queue, self._delivered)
            self._tags.append(str(consuming.consumer_tag))
        self._prefetch = prefetch

    async def _delivered(self, message: DeliveredMessage) -> None:
        tag = message.delivery_tag
        if tag is None or message.channel is not self._consuming:
            return
        self._silences = 0
        received = _received(message, _Token(message.channel, tag))
        self._unsettled.add(tag)
        event_type = self._type_of(received, message)
        # A message that somebody put straight into the queue has no such type: the worker reads it.
        if event_type is None or wants(self._interest, event_type, received.headers.get(TARGET_HEADER)):
            self._buffer.append(received._replace(routed=event_type is not None))
            self._changed.set()
        else:
            await self._settle([received], acknowledged=True)

    def _type_of(self, received: Received, message: DeliveredMessage) -> str | None:
        """Return the event type by which a message was routed; None if somebody put it into the queue itself."""
        event_type = received.headers.get(TYPE_HEADER)
        if event_type is None and message.exchange in self._exchanges:
            event_type = message.routing_key
        return event_type

    async def _wait(self, deadline: float) -> None:
        """Wait for an event, and ask the broker meanwhile, to notice an outage."""
        loop = asyncio.get_running_loop()
        while not self._buffer and (left := deadline - loop.time()) > 0:
            self._changed.clear()
            if self._lost is not None:
                raise BrokerUnavailable(self._lost)
            if self._probe is None:
                self._probe = asyncio.ensure_future(self._waiting())
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                asked = {self._probe} if not self._probe.done() else set()
                await asyncio.wait({changed, *asked}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if self._probe is not None and self._probe.done() and not self._buffer and self._lost is None:
                self._judge(self._probe.result())
        if self._probe is not None and self._probe.done():
            self._probe = None

    async def _waiting(self) -> int:
        """Ask the broker how many events of the queue are not taken."""
        channel = self._consuming
        if channel is None:
            return 0
        try:
            declared = await within(ANSWER_SECONDS, channel.queue_declare(queue_of(self._interest), passive=True))
        except (BrokerUnavailable, AMQPChannelError) as error:
            self._lose(str(error))
            return 0
        return declared.message_count or 0

    def _judge(self, waiting: int) -> None:
        """Count the answers by which the queue has events that this idle consumer should have got."""
        idle = len(self._unsettled) < self._prefetch and not self._interest.ordered
        self._silences = self._silences + 1 if waiting and idle else 0
        if self._silences >= _MOST_SILENCES:
            self._lose("RabbitMQ has events and delivers none")

    async def _settle(self, messages: Sequence[Received], *, acknowledged: bool) -> None:
        """Acknowledge messages or give them back; all of it is written to the connection when this returns."""
        tokens = [message.token for message in messages if isinstance(message.token, _Token)]
        alive = [token for token in tokens if self._link.uses(token.channel)]
        known = [token for token in alive if token.tag in self._unsettled]
        self._unsettled.difference_update(token.tag for token in known)
        try:
            await within(ANSWER_SECONDS, _write(known, acknowledged=acknowledged))
        except AMQPChannelError as error:
            raise BrokerUnavailable(f"RabbitMQ: {error}") from error
        if len(alive) < len(tokens):
            raise BrokerUnavailable("the connection that the events were taken on was lost: they come again")

    async def _stop_consuming(self, channel: Channel) -> None:
        for tag in self._tags:
            await channel.basic_cancel(tag)
        await self._settle(list(self._buffer), acknowledged=False)

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._changed.set()

    async def _abandon(self) -> None:
        """Drop the connection; the next `take` opens a new one. All unsettled messages come again."""
        self._forget()
        await self._link.drop()
        self._lost = None

    def _forget(self) -> None:
        self._consuming, self._prefetch, self._silences = None, 0, 0
        self._tags.clear()
        self._buffer.clear()
        self._unsettled.clear()
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None


async def _write(tokens: Sequence[_Token], *, acknowledged: bool) -> None:
    for token in tokens:
        last = token is tokens[-1]
        if acknowledged:
            await token.channel.basic_ack(token.tag, wait=last)
        else:
            await token.channel.basic_nack(token.tag, requeue=True, wait=last)


def _received(message: DeliveredMessage, token: _Token) -> Received:
    properties = message.header.properties
    given = properties.headers or {}
    headers = {name: _text(value) for name, value in given.items() if isinstance(value, str | bytes | int)}
    headers.pop(_DELIVERY_COUNT, None)
    if properties.content_type:
        headers["content-type"] = properties.content_type
    before = given.get(_DELIVERY_COUNT)
    if not isinstance(before, int) and message.redelivered:
        # Only quorum queues count deliveries.
        return Received(message.body, headers, None, token)
    return Received(message.body, headers, before + 1 if isinstance(before, int) else 1, token)


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
