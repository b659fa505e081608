"""Sends events to Kafka with an idempotent producer, which is replaced after every failure.

After a fatal error a producer refuses every event. After a timeout it still holds its events, and would send them when
their rows are released already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from holdfast.brokers.cloudevents import STRUCTURED
from holdfast.brokers.engine import Answer, BrokerUnavailable, Confirmed, Outgoing, Refused, Unanswered
from holdfast.brokers.interests import TARGET_HEADER, TYPE_HEADER
from holdfast.brokers.kafka.cluster import ANSWER_SECONDS, Cluster, within

_LINGER_MS: Final = 2
# An event that is larger than this is alone in its batch, so that the broker's refusal means nothing else.
_BATCH_BYTES: Final = 16 * 1024
_GOODBYE_SECONDS: Final = 2.0


class KafkaSink:
    """Sends with one producer. Several batches may be on their way at once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._opening = asyncio.Lock()
        self._producer: AIOKafkaProducer | None = None
        self._topics: set[str] = set()

    async def open(self) -> None:
        await self._ready(set(), ANSWER_SECONDS)

    async def send(self, batch: Sequence[Outgoing], *, timeout: float) -> Sequence[Answer]:
        deadline = asyncio.get_running_loop().time() + timeout
        producer = await self._ready({self._topic_of(event) for event in batch}, timeout)
        answers: list[Answer] = [Unanswered("Kafka did not confirm it in time")] * len(batch)
        sent: dict[int, asyncio.Future[Any]] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                for index, event in enumerate(batch):
                    try:
                        sent[index] = await _send(producer, self._topic_of(event), event)
                    except MessageSizeTooLargeError:
                        answers[index] = Refused(f"it has {len(event.body)} bytes, which is more than Kafka takes")
                    except KafkaError as error:
                        answers[index] = Unanswered(f"Kafka: {error or type(error).__name__}")
                if sent:
                    await asyncio.wait(sent.values())
        for index, future in sent.items():
            if future.done():
                answers[index] = _answer(future, batch[index])
        if any(isinstance(answer, Unanswered) for answer in answers):
            await self._drop(producer)
        return answers

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            stopping = asyncio.ensure_future(producer.stop())
            await asyncio.wait({stopping}, timeout=_GOODBYE_SECONDS)
            if not stopping.done():
                stopping.cancel()
                await _abandon(producer)

    def _topic_of(self, event: Outgoing) -> str:
        return self._cluster.topics.name(event.channel, event.event_type)

    async def _ready(self, topics: set[str], seconds: float) -> AIOKafkaProducer:
        async with self._opening:
            for topic in topics - self._topics:
                await self._cluster.make_topic(topic, seconds)
                self._topics.add(topic)
            if self._producer is None:
                producer = AIOKafkaProducer(
                    **self._cluster.options,
                    acks="all",
                    enable_idempotence=True,
                    linger_ms=_LINGER_MS,
                    max_batch_size=_BATCH_BYTES,
                )
                try:
                    await within(seconds, producer.start())
                except BaseException:
                    await _abandon(producer)
                    raise
                self._producer = producer
            return self._producer

    async def _drop(self, producer: AIOKafkaProducer) -> None:
        if producer is self._producer:
            self._producer = None
            # The failure may be a deleted topic: look for each again.
            self._topics.clear()
        await _abandon(producer)


async def _send(producer: AIOKafkaProducer, topic: str, event: Outgoing) -> asyncio.Future[Any]:
    headers = {"content-type": STRUCTURED, **event.headers, TYPE_HEADER: event.event_type}
    if event.target is not None:
        headers[TARGET_HEADER] = event.target
    future: asyncio.Future[Any] = await producer.send(
        topic,
        event.body,
        key=(event.key if event.key is not None else str(event.event_id)).encode(),
        headers=[(name, value.encode()) for name, value in headers.items()],
    )
    return future


def _answer(future: asyncio.Future[Any], event: Outgoing) -> Answer:
    error = None if future.cancelled() else future.exception()
    if isinstance(error, MessageSizeTooLargeError) and len(event.body) > _BATCH_BYTES:
        return Refused(f"it has {len(event.body)} bytes, which is more than Kafka takes")
    if error is not None or future.cancelled():
        return Unanswered(f"Kafka: {error or type(error).__name__}")
    return Confirmed()


async def _abandon(producer: AIOKafkaProducer) -> None:
    """End a producer and discard the events it still holds; the client's own `stop` would send them first."""
    sender = producer._sender.sender_task if producer._sender is not None else None
    if sender is not None:
        sender.cancel()
    with suppress(BrokerUnavailable):
        await within(_GOODBYE_SECONDS, producer.client.close())
    with suppress(BrokerUnavailable):
        await within(_GOODBYE_SECONDS, producer.stop())
