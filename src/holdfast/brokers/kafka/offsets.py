"""Works out which offset of each assigned partition may be committed: all records before it are acknowledged."""

from __future__ import annotations

from collections.abc import Iterable

from aiokafka.structs import TopicPartition


class Offsets:
    """The offsets taken from each partition, in order, and up to where all of them are acknowledged."""

    def __init__(self) -> None:
        # False until it is acknowledged. Offsets have gaps, so the order in which they were taken counts.
        self._taken: dict[TopicPartition, dict[int, bool]] = {}
        self._next: dict[TopicPartition, int] = {}

    def take(self, partition: TopicPartition, offset: int) -> None:
        self._taken.setdefault(partition, {}).setdefault(offset, False)

    def acknowledge(self, partition: TopicPartition, offset: int) -> None:
        """Note an acknowledgement; it is ignored if the partition went to another consumer."""
        taken = self._taken.get(partition)
        if taken is None or offset not in taken:
            return
        taken[offset] = True
        while taken and taken[first := next(iter(taken))]:
            del taken[first]
            self._next[partition] = first + 1

    def committable(self) -> dict[TopicPartition, int]:
        """Return the offsets to commit, by partition."""
        return dict(self._next)

    def committed(self, offsets: dict[TopicPartition, int]) -> None:
        """Forget what was committed, unless more was acknowledged since."""
        for partition, offset in offsets.items():
            if self._next.get(partition) == offset:
                del self._next[partition]

    def is_open(self, partition: TopicPartition, offset: int) -> bool:
        """Whether an offset was taken since the partition was assigned, and is not acknowledged."""
        taken = self._taken.get(partition)
        return taken is not None and taken.get(offset) is False

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        for each in partitions:
            self._taken.pop(each, None)
            self._next.pop(each, None)
