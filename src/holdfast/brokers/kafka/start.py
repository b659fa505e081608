"""Commits the offsets at which a consumer group begins, before its first member joins.

Without committed offsets a member would begin at the end or at the very beginning of a topic, again after each crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import CommitFailedError, IllegalGenerationError, UnknownMemberIdError
from aiokafka.structs import OffsetAndMetadata, TopicPartition

from holdfast.brokers.engine import BrokerUnavailable, Interest
from holdfast.brokers.kafka.cluster import Cluster, group_of

# Clocks differ, and the inbox removes what comes twice.
_OVERLAP: Final = timedelta(minutes=1)
# Marks offsets from which a group must not go on: this client cannot delete them.
_RETIRED: Final = "retired"
_HAS_MEMBERS: Final = (CommitFailedError, IllegalGenerationError, UnknownMemberIdError)


async def fix_start(cluster: Cluster, interest: Interest, topic: str, seconds: float) -> None:
    """Commit the group's first offset in each partition of the topic where it has none."""
    async with cluster.admin(seconds) as admin:
        offsets = await committed_offsets(admin, interest, topic)
    fresh = [partition for partition, found in offsets.items() if found is None]
    if not fresh:
        return
    consumer = _unsubscribed(cluster, interest, topic)
    try:
        await consumer.start()
        consumer.assign(fresh)
        # The end first: an event sent between the two requests is then found by the second, or comes after the end.
        ends = await consumer.end_offsets(fresh)
        moment = int((interest.since - _OVERLAP).timestamp() * 1000)
        found = await consumer.offsets_for_times(dict.fromkeys(fresh, moment))
        starts = {each: ends[each] if found[each] is None else found[each].offset for each in fresh}
        await consumer.commit(starts)
    except _HAS_MEMBERS:
        # The group has members by now: the first of them has committed where it begins.
        pass
    finally:
        await consumer.stop()


async def retire(cluster: Cluster, interest: Interest, topic: str, seconds: float) -> None:
    """Let the group begin anew when it is started again."""
    async with cluster.admin(seconds) as admin:
        offsets = await committed_offsets(admin, interest, topic)
    begun = {each: (found.offset, _RETIRED) for each, found in offsets.items() if found is not None}
    if not begun:
        return
    consumer = _unsubscribed(cluster, interest, topic)
    try:
        await consumer.start()
        consumer.assign(list(begun))
        await consumer.commit(begun)
    except _HAS_MEMBERS as error:
        raise BrokerUnavailable(f"workers still take events for {interest.handler_name}: stop them first") from error
    finally:
        await consumer.stop()


async def committed_offsets(
    admin: AIOKafkaAdminClient, interest: Interest, topic: str
) -> Mapping[TopicPartition, OffsetAndMetadata | None]:
    """Return the offset that the group has committed in each partition of a topic; None where it has not begun."""
    described = await admin.describe_topics([topic])
    partitions = [TopicPartition(topic, each["partition"]) for of in described for each in of["partitions"]]
    if not partitions:
        return {}
    found = await admin.list_consumer_group_offsets(group_of(interest, topic), partitions=partitions)
    return {each: _begun(found.get(each)) for each in partitions}


def _begun(found: OffsetAndMetadata | None) -> OffsetAndMetadata | None:
    return None if found is None or found.offset < 0 or found.metadata == _RETIRED else found


def _unsubscribed(cluster: Cluster, interest: Interest, topic: str) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(**cluster.options, group_id=group_of(interest, topic), enable_auto_commit=False)
