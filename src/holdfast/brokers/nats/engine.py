"""The engine of NATS JetStream: makes sinks and sources, and inspects streams and consumers for operators."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, DiscardPolicy, RetentionPolicy, StorageType, StreamInfo
from nats.js.errors import NotFoundError

from holdfast.brokers import cloudevents
from holdfast.brokers.addresses import address_of, with_names
from holdfast.brokers.engine import Backlog, Interest, Weakness
from holdfast.brokers.keeping import HORIZON_DAYS, retention_weaknesses
from holdfast.brokers.nats.link import ANSWER_SECONDS, DUPLICATE_WINDOW, Link, within
from holdfast.brokers.nats.sink import NatsSink
from holdfast.brokers.nats.source import HANDLER, NatsSource
from holdfast.brokers.nats.subjects import covers, subjects_by

_OPTIONS: Final = ("replicas", "max_age", "creds", "cafile", "stream", "subject", "mode")
# A server keeps the id of each message of the window in memory.
_LONGEST_WINDOW: Final = 3600.0
# With so much room the next event may not fit.
_NEARLY: Final = {"max_msgs": 0, "max_bytes": 4096}


class NatsEngine:
    """One NATS, a server or a cluster."""

    name = "nats"

    def __init__(self, address: str) -> None:
        self._text = address
        self._address = address_of(address, ("nats", "tls"), _OPTIONS)
        self._address.number("replicas", 1, 1, 5)
        self._address.number("max_age", HORIZON_DAYS, 1, 3650)
        self._names = subjects_by(self._address)
        for option in ("creds", "cafile"):
            self._address.file(option)
        self.binding = self._address.binding(cloudevents.NATS)

    def sink(self, *, lease: float) -> NatsSink:
        return NatsSink(self._address)

    def source(self, interest: Interest, *, lease: float) -> NatsSource:
        return NatsSource(self._address, interest, lease)

    def names(self, interest: Interest) -> Sequence[str]:
        return (self._names.stream_of(interest.channel),)

    async def weaknesses(
        self,
        channels: Sequence[str],
        interests: Sequence[Interest] = (),
        *,
        remembered: float | None = None,
        timeout: float,
    ) -> Sequence[Weakness]:
        found: list[Weakness] = []
        async with self._jetstream(timeout) as jetstream:
            for channel in channels:
                name = self._names.stream_of(channel)
                try:
                    info = await within(timeout, jetstream.stream_info(name))
                except NotFoundError:
                    continue  # the relay makes it
                found += stream_weaknesses(info, remembered)
                found += stopped(info, self._names.subjects_of(channel))
                for consumer in await within(timeout, _consumers(jetstream, name)):
                    found += consumer_weaknesses(consumer)
        return found

    async def backlogs(self, interests: Sequence[Interest], *, timeout: float) -> Sequence[Backlog]:
        found: list[Backlog] = []
        async with self._jetstream(timeout) as jetstream:
            for interest in interests:
                infos = []
                # An operator's command does not know whether the handler's workers take in order.
                for ordered in (False, True):
                    consumer = self._names.consumer_of(replace(interest, ordered=ordered))
                    with contextlib.suppress(NotFoundError):
                        asked = jetstream.consumer_info(self._names.stream_of(interest.channel), consumer)
                        infos.append(await within(timeout, asked))
                if not infos:
                    found.append(Backlog(interest.handler_name, None, None))
                    continue
                waiting = sum(each.num_pending or 0 for each in infos)
                unacknowledged = sum(each.num_ack_pending or 0 for each in infos)
                redelivered = sum(each.num_redelivered or 0 for each in infos)
                found.append(Backlog(interest.handler_name, waiting, unacknowledged, redelivered))
        return found

    async def remove(self, interest: Interest) -> None:
        """Delete every consumer that the handler ever had: there is one for each set of event types."""
        stream = self._names.stream_of(interest.channel)
        async with self._jetstream(ANSWER_SECONDS) as jetstream:
            try:
                consumers = await within(ANSWER_SECONDS, _consumers(jetstream, stream))
            except NotFoundError:
                return
            for consumer in consumers:
                if (consumer.config.metadata or {}).get(HANDLER) == interest.handler_name:
                    try:
                        await within(ANSWER_SECONDS, jetstream.delete_consumer(stream, consumer.name))
                    except NotFoundError:
                        continue

    @property
    def naming(self) -> str:
        return f"stream={self._names.stream}&subject={self._names.subject}"

    def named(self, naming: str) -> NatsEngine:
        return NatsEngine(with_names(self._text, naming, ("stream", "subject")))

    async def left(self, interest: Interest, *, timeout: float) -> int | None:
        """Count in the handler's consumer; if its event types were others, in all of its consumers by these names."""
        own = {self._names.consumer_of(replace(interest, ordered=ordered)) for ordered in (False, True)}
        async with self._jetstream(timeout) as jetstream:
            try:
                consumers = await within(timeout, _consumers(jetstream, self._names.stream_of(interest.channel)))
            except NotFoundError:
                return 0
        found = [each for each in consumers if each.name in own] or [
            each
            for each in consumers
            if (each.config.metadata or {}).get(HANDLER) == interest.handler_name
            and any(self._names.has(interest.channel, subject) for subject in _filters(each))
        ]
        return sum((each.num_pending or 0) + (each.num_ack_pending or 0) for each in found)

    @asynccontextmanager
    async def _jetstream(self, timeout: float) -> AsyncIterator[JetStreamContext]:
        link = Link(self._address, "holdfast operator")
        try:
            yield await link.jetstream(timeout)
        finally:
            await link.close()


def _filters(consumer: ConsumerInfo) -> Sequence[str]:
    return consumer.config.filter_subjects or [consumer.config.filter_subject or ""]


async def _consumers(jetstream: JetStreamContext, stream: str) -> list[ConsumerInfo]:
    found: list[ConsumerInfo] = []
    while True:
        page = await jetstream.consumers_info(stream, offset=len(found))
        found += page
        if not page:
            return found


def stream_weaknesses(info: StreamInfo, remembered: float | None = None) -> Iterator[Weakness]:
    """Yield the settings of a stream that may lose events which were confirmed, or which nobody has read yet."""
    config, name = info.config, f"stream {info.config.name}"
    if (config.num_replicas or 1) < 3:
        problem = f"has {config.num_replicas or 1} replica: a power cut loses what its server has not written yet"
        yield Weakness(
            name,
            problem,
            "use 3 servers and ?replicas=3; or, on a single server, write sync_interval: always into its configuration",
        )
    if config.storage == StorageType.MEMORY:
        yield Weakness(name, "is kept in memory: a restart empties it", "make it anew with storage: file")
    if config.retention != RetentionPolicy.LIMITS:
        problem = "deletes what is acknowledged, so that a new consumer gets nothing of the past"
        yield Weakness(name, problem, "make it anew with retention: limits")
    limited = any((limit or -1) > 0 for limit in (config.max_msgs, config.max_bytes))
    if config.discard != DiscardPolicy.NEW and limited:
        yield Weakness(name, "drops the oldest events when it is full, read or not", "set discard: new")
    if config.max_msgs_per_subject > 0 and not (config.discard == DiscardPolicy.NEW and config.discard_new_per_subject):
        problem = f"keeps only {config.max_msgs_per_subject} events of each type, read or not"
        yield Weakness(name, problem, "set max_msgs_per_subject: -1")
    yield from retention_weaknesses(name, config.max_age or None, remembered, "max_age")
    # Older clients do not have this field.
    if getattr(config, "persist_mode", None) == "async":
        problem = "confirms events before they are written (persist_mode): a crash of its server loses them"
        yield Weakness(name, problem, "make it anew with persist_mode: default")
    if config.allow_rollup_hdrs:
        problem = "lets one message of whoever writes to it drop all that it holds, read or not (allow_rollup_hdrs)"
        yield Weakness(name, problem, "set allow_rollup_hdrs: false")
    # A window that is too short needs no warning: it costs a second copy, which the inbox skips.
    if (config.duplicate_window or 0) > _LONGEST_WINDOW:
        problem = f"has the ids of {config.duplicate_window / 60:g} minutes in memory (duplicate_window)"
        yield Weakness(name, problem, f"set duplicate_window: {DUPLICATE_WINDOW / 60:g}m, which the relay needs")
    if config.no_ack:
        yield Weakness(name, "confirms nothing, so that the relay stands still", "set no_ack: false")


def stopped(info: StreamInfo, subjects: str) -> Iterator[Weakness]:
    """Name why a stream takes no events now: the subjects that the relay publishes on, and its limits."""
    config, state, name = info.config, info.state, f"stream {info.config.name}"
    if not any(covers(each, subjects) for each in config.subjects or ()):
        problem = f"does not take {subjects}, so that the relay stands still"
        remedy = "add it to the subjects of the stream, or delete the stream: the relay makes it anew"
        yield Weakness(name, problem, remedy)
    limits = (
        ("max_msgs", config.max_msgs, state.messages, "messages"),
        ("max_bytes", config.max_bytes, state.bytes, "bytes"),
    )
    for setting, limit, held, what in limits:
        if config.discard == DiscardPolicy.NEW and limit is not None and 0 < limit <= held + _NEARLY[setting]:
            problem = f"is full: it holds {held} {what} and takes {limit} ({setting}); events wait in the outbox"
            yield Weakness(name, problem, f"raise {setting}, or let events go sooner by a lower max_age")


def consumer_weaknesses(consumer: ConsumerInfo) -> Iterator[Weakness]:
    """Yield the settings of a handler's consumer that keep it from getting events."""
    metadata = consumer.config.metadata or {}
    if HANDLER not in metadata:
        return
    name = f"consumer {consumer.name}"
    if (consumer.config.max_deliver or -1) > 0:
        problem = f"gives up after {consumer.config.max_deliver} deliveries, and tells nobody"
        yield Weakness(name, problem, "set max_deliver: -1")
    if consumer.config.inactive_threshold:
        problem = (
            f"is deleted when no worker asks for {consumer.config.inactive_threshold / 60:g} minutes "
            "(inactive_threshold): it begins anew, and what the inbox has forgotten runs twice"
        )
        yield Weakness(name, problem, "set inactive_threshold: 0")
