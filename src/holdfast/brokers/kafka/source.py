"""Takes the events of one handler as a member of its consumer group.

Kafka stores one offset per partition, not one for each event. Events that are given back wait here. Events that are
not acknowledged come again when their partition is next assigned, because no offset behind them was committed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka.errors import IllegalStateError, KafkaError
from aiokafka.structs import ConsumerRecord, TopicPartition

from holdfast.brokers.engine import BrokerUnavailable, Interest, Received
from holdfast.brokers.interests import TARGET_HEADER, TYPE_HEADER, wants
from holdfast.brokers.kafka.cluster import ANSWER_SECONDS, Cluster, group_of, within
from holdfast.brokers.kafka.offsets import Offsets
from holdfast.brokers.kafka.start import fix_start

_COMMIT_SECONDS: Final = 0.1
# A rebalance of the whole group waits for the slowest member: for what is being handled, and then for the commit.
_REVOKE_SECONDS: Final = 3.0
_REVOKE_COMMIT_SECONDS: Final = 2.0
_SESSION_SECONDS: Final = 10
# Heartbeats tell whether a member lives; one whose handlers are busy may take nothing for hours.
_IDLE_SECONDS: Final = 24 * 3600
_GOODBYE_SECONDS: Final = 2.0
_LEAVE_SECONDS: Final = 4.0
_ASK_SECONDS: Final = 1.0
# How often in a row the cluster may fail to answer before the group is joined anew, which interrupts all its members.
_MOST_SILENCES: Final = 3

Token = tuple[TopicPartition, int]


class KafkaSource:
    """A member of the handler's group. While nobody takes, its client buffers at most one batch per partition."""

    def __init__(self, cluster: Cluster, interest: Interest, topic: str) -> None:
        self._topic = topic
        self._cluster = cluster
        self._interest = interest
        self._consumer: AIOKafkaConsumer | None = None
        self._committing: asyncio.Task[None] | None = None
        self._offsets = Offsets()
        # Given out and not settled. Kept over a rebalance, so that no event is given out twice at the same time.
        self._held: set[Token] = set()
        self._returned: deque[Received] = deque()
        # By partition: records before this offset may have been taken already, by a member that died.
        self._new_from: dict[TopicPartition, int] = {}
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._revoking = False
        self._silences = 0
        self._asked = 0.0
        self._probe: asyncio.Task[None] | None = None

    async def open(self) -> None:
        if self._consumer is not None:
            return
        await self._cluster.make_topic(self._topic, ANSWER_SECONDS)
        await within(2 * ANSWER_SECONDS, fix_start(self._cluster, self._interest, self._topic, ANSWER_SECONDS))
        consumer = AIOKafkaConsumer(
            **self._cluster.options,
            group_id=group_of(self._interest, self._topic),
            enable_auto_commit=False,
            # Used only for partitions that are added later: for the others `fix_start` has committed an offset.
            auto_offset_reset="earliest",
            session_timeout_ms=_SESSION_SECONDS * 1000,
            heartbeat_interval_ms=_SESSION_SECONDS * 1000 // 5,
            rebalance_timeout_ms=2 * _SESSION_SECONDS * 1000,
            max_poll_interval_ms=_IDLE_SECONDS * 1000,
        )
        try:
            await within(ANSWER_SECONDS, consumer.start())
        except BaseException:
            await _leave(consumer)
            raise
        consumer.subscribe([self._topic], listener=_Rebalance(self))
        self._consumer, self._revoking, self._silences = consumer, False, 0
        self._committing = asyncio.ensure_future(self._commit_regularly(consumer))

    async def take(self, most: int, *, wait: float) -> Sequence[Received]:
        await self.open()
        assert self._consumer is not None  # noqa: S101  (open)
        if most < 1:
            return []
        taken = [self._returned.popleft() for _ in range(min(most, len(self._returned)))]
        if not taken:
            taken = await self._fetch(self._consumer, most, wait)
        self._held.update(_token(each) for each in taken)
        return taken

    async def keep_alive(self, messages: Sequence[Received]) -> None:
        pass

    async def acknowledge(self, messages: Sequence[Received]) -> None:
        for token in map(_token, messages):
            if token in self._held:
                self._held.discard(token)
                self._offsets.acknowledge(*token)
        self._changed.set()
        self._settled.set()

    async def give_back(self, messages: Sequence[Received]) -> None:
        for message in messages:
            token = _token(message)
            if token in self._held:
                self._held.discard(token)
                # If the partition went to another member, the event comes again there.
                if self._offsets.is_open(*token):
                    self._returned.append(message)
        self._settled.set()

    async def close(self) -> None:
        consumer = self._consumer
        if consumer is not None:
            with suppress(BrokerUnavailable):
                await self._commit(consumer, _GOODBYE_SECONDS)
            await self._end()

    async def _fetch(self, consumer: AIOKafkaConsumer, most: int, wait: float) -> list[Received]:
        deadline = asyncio.get_running_loop().time() + wait
        while True:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            self._ask(consumer)
            try:
                records = await consumer.getmany(timeout_ms=int(min(left, 0.2) * 1000), max_records=most)
            except IllegalStateError:
                records = {}
            except KafkaError as error:
                # The client does not recover from such an error.
                await self._end()
                raise BrokerUnavailable(f"Kafka: {error or type(error).__name__}") from error
            # Records that come while partitions are revoked are dropped: they come again after the assignment.
            taken = (
                [] if self._revoking else self._wanted((record for each in records.values() for record in each), most)
            )
            if not records:
                await self._judge()
            if taken or left <= 0:
                return taken
            if not consumer.assignment():
                await asyncio.sleep(min(left, 0.05))

    def _wanted(self, records: Iterable[ConsumerRecord], most: int) -> list[Received]:
        taken: list[Received] = []
        for record in records:
            partition = TopicPartition(record.topic, record.partition)
            token = partition, record.offset
            # The member before this one is assumed to have taken as many at once.
            new_from = self._new_from.setdefault(partition, record.offset + most)
            self._offsets.take(*token)
            headers = {name: value.decode(errors="replace") for name, value in record.headers if value is not None}
            event_type = headers.get(TYPE_HEADER)
            if token in self._held:
                continue
            # A foreign event has no such header: the worker reads its type.
            if event_type is None or wants(self._interest, event_type, headers.get(TARGET_HEADER)):
                deliveries = None if record.offset >= new_from else 2
                taken.append(Received(record.value or b"", headers, deliveries, token, event_type is not None))
            else:
                self._offsets.acknowledge(*token)
        return taken

    def _ask(self, consumer: AIOKafkaConsumer) -> None:
        """Ask the cluster for an answer now and then: a client that only waits for events never notices an outage."""
        now = asyncio.get_running_loop().time()
        if self._probe is None and now - self._asked > _ASK_SECONDS:
            self._asked = now
            self._probe = asyncio.ensure_future(_answer(consumer))

    async def _judge(self) -> None:
        """Raise the error of the last request that `_ask` made, if it failed."""
        probe = self._probe
        if probe is None or not probe.done():
            return
        self._probe = None
        error = None if probe.cancelled() else probe.exception()
        self._silences = 0 if error is None else self._silences + 1
        if error is None:
            return
        if self._silences >= _MOST_SILENCES:
            await self._end()
        raise error

    async def _commit_regularly(self, consumer: AIOKafkaConsumer) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            # A refused commit is tried again, here or by the partition's next member; nothing is lost.
            with suppress(BrokerUnavailable):
                await self._commit(consumer, ANSWER_SECONDS)
            if self._offsets.committable():
                self._changed.set()
            await asyncio.sleep(_COMMIT_SECONDS)

    async def _commit(self, consumer: AIOKafkaConsumer, seconds: float) -> None:
        offsets = {each: at for each, at in self._offsets.committable().items() if each in consumer.assignment()}
        if offsets:
            await within(seconds, consumer.commit(offsets))
            self._offsets.committed(offsets)

    async def revoke(self, partitions: frozenset[TopicPartition]) -> None:
        """Wait a short while for events of these partitions to be settled, and commit, before others get them."""
        self._revoking = True
        consumer = self._consumer
        self._returned = deque(each for each in self._returned if _token(each)[0] not in partitions)
        with suppress(TimeoutError):
            async with asyncio.timeout(_REVOKE_SECONDS):
                while any(token[0] in partitions for token in self._held):
                    self._settled.clear()
                    await self._settled.wait()
        if consumer is not None:
            with suppress(BrokerUnavailable):
                await self._commit(consumer, _REVOKE_COMMIT_SECONDS)
        self._offsets.forget(partitions)

    def assigned(self) -> None:
        self._revoking = False
        self._new_from.clear()

    async def _end(self) -> None:
        consumer, self._consumer = self._consumer, None
        for task in (self._committing, self._probe):
            if task is not None:
                task.cancel()
        self._committing = self._probe = None
        self._returned.clear()
        self._offsets = Offsets()
        self._new_from.clear()
        if consumer is not None:
            await _leave(consumer)


class _Rebalance(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, source: KafkaSource) -> None:
        self._source = source

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        await self._source.revoke(frozenset(revoked))

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._source.assigned()


def _token(message: Received) -> Token:
    token: Token = message.token  # type: ignore[assignment]
    return token


async def _answer(consumer: AIOKafkaConsumer) -> None:
    partitions = consumer.assignment()
    await within(ANSWER_SECONDS, consumer.end_offsets(partitions) if partitions else consumer.topics())


async def _leave(consumer: AIOKafkaConsumer) -> None:
    """Leave the group, so that other members need not wait until the session ends.

    The client's own `stop` waits for open requests, which a cluster that is down never answers: it gets a deadline.
    """
    leaving = asyncio.ensure_future(consumer.stop())
    await asyncio.wait({leaving}, timeout=_LEAVE_SECONDS)
    if not leaving.done() and consumer._coordinator is not None:
        consumer._coordinator._coordination_task.cancel()
        await asyncio.wait({leaving}, timeout=_GOODBYE_SECONDS)
    leaving.cancel()
    with suppress(asyncio.CancelledError, KafkaError):
        await leaving
    if consumer._fetcher is not None:
        with suppress(BrokerUnavailable):
            await within(_GOODBYE_SECONDS, consumer._fetcher.close())
    with suppress(BrokerUnavailable):
        await within(_GOODBYE_SECONDS, consumer._client.close())
