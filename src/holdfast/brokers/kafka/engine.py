"""The engine of Kafka: makes sinks and sources, and inspects topics and groups for operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import IncompatibleBrokerVersion

from holdfast.brokers.addresses import with_names
from holdfast.brokers.engine import Backlog, Interest, Source, Weakness, left_of, sum_of
from holdfast.brokers.joined import joined
from holdfast.brokers.kafka.cluster import ANSWER_SECONDS, Cluster, within
from holdfast.brokers.kafka.sink import KafkaSink
from holdfast.brokers.kafka.source import KafkaSource
from holdfast.brokers.kafka.start import committed_offsets, retire
from holdfast.brokers.keeping import retention_weaknesses

_FEWEST_REPLICAS: Final = 3
_FEWEST_IN_SYNC: Final = 2


class KafkaEngine:
    """One Kafka cluster."""

    name = "kafka"

    def __init__(self, address: str) -> None:
        self._text = address
        self._cluster = Cluster(address)
        self.binding = self._cluster.binding

    def sink(self, *, lease: float) -> KafkaSink:
        return KafkaSink(self._cluster)

    def source(self, interest: Interest, *, lease: float) -> Source:
        return joined([KafkaSource(self._cluster, interest, topic) for topic in self.names(interest)])

    def names(self, interest: Interest) -> Sequence[str]:
        return self._cluster.topics.names(interest)

    async def weaknesses(
        self,
        channels: Sequence[str],
        interests: Sequence[Interest] = (),
        *,
        remembered: float | None = None,
        timeout: float,
    ) -> Sequence[Weakness]:
        found: list[Weakness] = []
        topics = self._cluster.topics.names_of(channels, interests)
        if not topics:
            return found
        async with self._cluster.admin(timeout) as admin:
            for topic in await within(timeout, admin.describe_topics(list(topics))):
                if not topic["error_code"]:
                    found += _too_few_replicas(topic)
            for name in topics:
                found += _weak_settings(name, await within(timeout, _settings(admin, name)), remembered)
        return found

    async def backlogs(self, interests: Sequence[Interest], *, timeout: float) -> Sequence[Backlog]:
        async with self._cluster.admin(timeout) as admin:
            return [
                sum_of(
                    interest.handler_name,
                    [await within(timeout, self._backlog(admin, interest, topic)) for topic in self.names(interest)],
                )
                for interest in interests
            ]

    async def remove(self, interest: Interest) -> None:
        """Let the group of a handler begin anew if the handler comes back; Kafka itself deletes old offsets later."""
        for topic in self.names(interest):
            await within(2 * ANSWER_SECONDS, retire(self._cluster, interest, topic, ANSWER_SECONDS))

    @property
    def naming(self) -> str:
        return f"topic={self._cluster.topics.text}"

    def named(self, naming: str) -> KafkaEngine:
        return KafkaEngine(with_names(self._text, naming, ("topic",)))

    async def left(self, interest: Interest, *, timeout: float) -> int | None:
        async with self._cluster.admin(timeout) as admin:
            return left_of(
                [await within(timeout, self._backlog(admin, interest, topic)) for topic in self.names(interest)]
            )

    async def _backlog(self, admin: AIOKafkaAdminClient, interest: Interest, topic: str) -> Backlog:
        offsets = await committed_offsets(admin, interest, topic)
        begun = {each: found.offset for each, found in offsets.items() if found is not None}
        if not begun:
            return Backlog(interest.handler_name, None, None)
        consumer = AIOKafkaConsumer(**self._cluster.options)
        try:
            await consumer.start()
            ends = await consumer.end_offsets(list(begun))
        finally:
            await consumer.stop()
        # Kafka has one offset for a partition, so events that are being handled count as waiting.
        return Backlog(interest.handler_name, sum(ends[each] - begun[each] for each in begun), None)


async def _settings(admin: AIOKafkaAdminClient, topic: str) -> Mapping[str, str]:
    """Return the settings of a topic; none from a cluster that is too old to tell."""
    try:
        answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    except IncompatibleBrokerVersion:
        return {}
    return {entry[0]: entry[1] for answer in answers for *_, entries in answer.resources for entry in entries}


def _too_few_replicas(topic: Mapping[str, Any]) -> list[Weakness]:
    fewest = min((len(each["replicas"]) for each in topic["partitions"]), default=_FEWEST_REPLICAS)
    if fewest >= _FEWEST_REPLICAS:
        return []
    problem = f"its partitions have {fewest} replicas: confirmed events are lost with as many disks"
    return [Weakness(topic["topic"], problem, f"reassign its partitions to {_FEWEST_REPLICAS} replicas")]


def _weak_settings(topic: str, settings: Mapping[str, str], remembered: float | None) -> list[Weakness]:
    found: list[Weakness] = []
    if "retention.ms" in settings:
        milliseconds = int(settings["retention.ms"])
        kept = None if milliseconds < 0 else milliseconds / 1000
        found += retention_weaknesses(topic, kept, remembered, "retention.ms")
    in_sync = settings.get("min.insync.replicas", str(_FEWEST_IN_SYNC))
    if int(in_sync) < _FEWEST_IN_SYNC:
        problem = f"min.insync.replicas is {in_sync}: an event is confirmed that only one disk has"
        found.append(Weakness(topic, problem, f"set min.insync.replicas to {_FEWEST_IN_SYNC}"))
    if settings.get("unclean.leader.election.enable") == "true":
        problem = "an unclean leader election drops confirmed events"
        found.append(Weakness(topic, problem, "set unclean.leader.election.enable to false"))
    if "compact" in settings.get("cleanup.policy", ""):
        problem = "compaction drops all but the last event of a key"
        found.append(Weakness(topic, problem, "set cleanup.policy to delete"))
    if settings.get("retention.bytes", "-1") != "-1":
        problem = f"retention.bytes is {settings['retention.bytes']}: it drops events that were not read"
        found.append(Weakness(topic, problem, "set retention.bytes to -1, and keep events by time"))
    return found
