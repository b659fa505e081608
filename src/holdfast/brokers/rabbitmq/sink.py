"""Sends events to RabbitMQ: mandatory, persistent, and each with its own confirmation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Final

from aiormq import AMQPChannelError, Channel, ChannelPreconditionFailed, DeliveryError, PublishError, spec

from holdfast.brokers.cloudevents import STRUCTURED
from holdfast.brokers.engine import Answer, BrokerUnavailable, Confirmed, Outgoing, Refused, Unanswered
from holdfast.brokers.interests import TARGET_HEADER, TYPE_HEADER
from holdfast.brokers.rabbitmq.link import Link
from holdfast.brokers.rabbitmq.topology import exchanges_of, make_exchange, refused

_CONTENT_TYPE: Final = "content-type"
_LONGEST_ROUTING_KEY: Final = 255
# Properties and headers travel in one frame of 128 KiB, and a larger one ends the connection for everybody.
_MOST_HEADER_BYTES: Final = 64 * 1024
_WAIT_FOR_WRITING: Final = 64 * 1024
_BLOCKED_SECONDS: Final = 0.2
_TOO_LARGE: Final = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
_BLOCKED: Final = "RabbitMQ takes no events now: its memory or its disk is full"


class RabbitmqSink:
    """Publishes on one channel. Several batches may be on their way at once."""

    def __init__(self, address: str) -> None:
        self._link = Link(address, "holdfast relay", confirms=True)
        self._names = exchanges_of(address)
        self._exchanges: set[str] = set()
        self._exchanges_on: Channel | None = None
        # The largest body the broker takes; known only from the text with which it has refused one.
        self._max_bytes: int | None = None
        self._abandoned = False

    async def open(self) -> None:
        await self._link.channel()

    async def send(self, batch: Sequence[Outgoing], *, timeout: float) -> Sequence[Answer]:
        deadline = asyncio.get_running_loop().time() + timeout
        answers: list[Answer | None] = [self._never(event) for event in batch]
        channel = await self._channel({self._exchange_of(event) for event in batch}, timeout)
        # Tasks begin in the order in which they are made, so events with one ordering key are sent in order.
        sent = {
            asyncio.ensure_future(_publish(channel, self._exchange_of(event), event)): index
            for index, event in enumerate(batch)
            if answers[index] is None
        }
        try:
            silent = await self._confirmations(set(sent), deadline)
        finally:
            for task in sent:
                task.cancel()
        for task, index in sent.items():
            answers[index] = Unanswered(silent) if silent and not task.done() else self._answer(task, batch[index])
        self._learn(sent, batch, answers)
        if silent == _BLOCKED:
            self._abandoned = True
        elif silent:
            # An event that was not confirmed must not arrive after its row was released, and perhaps sent again.
            await self._link.drop()
        return [answer or Unanswered("RabbitMQ did not answer") for answer in answers]

    async def close(self) -> None:
        await self._link.close()

    def _exchange_of(self, event: Outgoing) -> str:
        return self._names.name(event.channel, event.event_type)

    def _never(self, event: Outgoing) -> Refused | None:
        if len(event.event_type.encode()) > _LONGEST_ROUTING_KEY:
            return Refused(f"its type has more than {_LONGEST_ROUTING_KEY} bytes, which is the longest routing key")
        if sum(len(name) + len(value.encode()) for name, value in event.headers.items()) > _MOST_HEADER_BYTES:
            return Refused(f"its headers have more than {_MOST_HEADER_BYTES} bytes")
        if self._max_bytes is not None and len(event.body) > self._max_bytes:
            return Refused(f"it has {len(event.body)} bytes, and RabbitMQ takes {self._max_bytes} (max_message_size)")
        return None

    async def _channel(self, exchanges: set[str], timeout: float) -> Channel:
        if await self._link.is_blocked():
            # Keep this connection: on a new one RabbitMQ takes an event before it says again that it is blocked.
            raise BrokerUnavailable(_BLOCKED)
        if self._abandoned:
            self._abandoned = False
            await self._link.drop()
        channel = await self._link.channel(timeout)
        if channel is not self._exchanges_on:
            self._exchanges, self._exchanges_on = set(), channel
        for name in exchanges - self._exchanges:
            try:
                await make_exchange(channel, name, timeout)
            except AMQPChannelError as error:
                raise refused(error) from error
            self._exchanges.add(name)
        return channel

    async def _confirmations(self, waiting: set[asyncio.Task[None]], deadline: float) -> str:
        """Wait for all answers until the deadline. Return why some are missing, or an empty text."""
        loop = asyncio.get_running_loop()
        while waiting:
            left = deadline - loop.time()
            if left <= 0:
                return "RabbitMQ did not confirm it in time"
            _, waiting = await asyncio.wait(waiting, timeout=min(left, _BLOCKED_SECONDS))
            if waiting and await self._link.is_blocked():
                return _BLOCKED
        return ""

    def _answer(self, task: asyncio.Task[None], event: Outgoing) -> Answer:
        if task.cancelled():
            return Unanswered("the connection to RabbitMQ was lost")
        match task.exception():
            case None:
                return Confirmed()
            case PublishError():
                return Unanswered(f"no queue is bound to {self._exchange_of(event)} for {event.event_type}")
            case DeliveryError():
                return Unanswered("RabbitMQ refused it: a queue is full or has no leader")
            case error:
                return Unanswered(f"RabbitMQ: {error or type(error).__name__}")

    def _learn(
        self, sent: dict[asyncio.Task[None], int], batch: Sequence[Outgoing], answers: list[Answer | None]
    ) -> None:
        """Learn the largest size from a refusal, and refuse the events of the batch that exceed it.

        The broker closes the channel at the first such event, so those behind it are not answered.
        """
        for task in sent:
            error = None if task.cancelled() or not task.done() else task.exception()
            found = _TOO_LARGE.search(str(error)) if isinstance(error, ChannelPreconditionFailed) else None
            if found is not None:
                self._max_bytes = int(found[1])
                break
        else:
            return
        for index in sent.values():
            if not isinstance(answers[index], Confirmed):
                answers[index] = self._never(batch[index]) or answers[index]


async def _publish(channel: Channel, exchange: str, event: Outgoing) -> None:
    headers: dict[str, Any] = dict(event.headers)
    headers[TYPE_HEADER] = event.event_type
    if event.target is not None:
        headers[TARGET_HEADER] = event.target
    properties = spec.Basic.Properties(
        content_type=headers.pop(_CONTENT_TYPE, STRUCTURED),
        delivery_mode=2,
        headers=headers,
        message_id=event.message_id,
    )
    await channel.basic_publish(
        event.body,
        exchange=exchange,
        routing_key=event.event_type,
        properties=properties,
        mandatory=True,
        wait=len(event.body) > _WAIT_FOR_WRITING,
    )
