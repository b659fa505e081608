"""Sends events to streams of Redis in pipelines of XADD, and waits for replicas or the disk if the address says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from redis.exceptions import ResponseError

from holdfast.brokers.addresses import Address
from holdfast.brokers.engine import Answer, BrokerUnavailable, Confirmed, Outgoing, Refused, Unanswered
from holdfast.brokers.interests import TARGET_HEADER, TYPE_HEADER
from holdfast.brokers.redis.link import ANSWER_SECONDS, Command, Link
from holdfast.brokers.redis.scripts import TRIM_READ, streams_of

BODY: Final = "ce"
_PIPELINE: Final = 100
_LIMIT: Final = "proto-max-bulk-len"
# The default of that setting, for servers that do not show it.
_LARGEST: Final = 512 * 1024 * 1024
_TRIM_SECONDS: Final = 60.0
_MOST_STREAMS: Final = 1000
_TRIM_WITHIN: Final = 2.0
# The share of the time that WAIT gets, so that its answer comes before our own deadline.
_OF_THE_TIME: Final = 0.8


class RedisSink:
    """Adds events on one connection, one batch after another."""

    def __init__(self, address: Address) -> None:
        self._link = Link(address, "holdfast relay")
        self._streams = streams_of(address)
        self._replicas = address.number("replicas", 0, 0, 10)
        self._fsync = address.number("fsync", 0, 0, 1)
        self.keep = 60.0 * address.number("keep", 15, 1, 100_000)  # seconds
        self._trimmed: dict[str, float] = {}
        # Bytes of an event; for a larger one the server would end the connection.
        self._largest: int | None = None

    async def open(self) -> None:
        await self._ready(ANSWER_SECONDS)

    async def send(self, batch: Sequence[Outgoing], *, timeout: float) -> Sequence[Answer]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        await self._ready(timeout)
        answers: list[Answer] = []
        while len(answers) < len(batch):
            chunk = batch[len(answers) : len(answers) + _PIPELINE]
            try:
                answers += await self._add(chunk, max(deadline - loop.time(), 0.001))
            except BrokerUnavailable as error:
                # Without the answers nobody knows which of the events were stored.
                answers += [Unanswered(str(error))] * (len(batch) - len(answers))
        for stream in {self._stream_of(event) for event in batch}:
            await self._trim(stream, deadline)
        return answers

    async def close(self) -> None:
        await self._link.close()

    async def _ready(self, seconds: float) -> None:
        if self._largest is not None and self._link.is_open:
            return
        (answer,) = await self._link.ask_all([("CONFIG", "GET", _LIMIT)], seconds)
        # Some servers do not show their settings.
        self._largest = int(answer[1]) if isinstance(answer, list) and answer else _LARGEST

    def _stream_of(self, event: Outgoing) -> str:
        return self._streams.name(event.channel, event.event_type)

    def _never(self, event: Outgoing) -> Refused | None:
        largest = self._largest or _LARGEST
        if len(event.body) > largest:
            return Refused(f"it has {len(event.body)} bytes, and Redis takes {largest} ({_LIMIT})")
        return None

    async def _add(self, chunk: Sequence[Outgoing], seconds: float) -> list[Answer]:
        answers: list[Answer | None] = [self._never(event) for event in chunk]
        sent = [index for index, answer in enumerate(answers) if answer is None]
        commands: list[Command] = [_added(self._stream_of(chunk[index]), chunk[index]) for index in sent]
        if sent and (self._replicas or self._fsync):
            milliseconds = max(int(seconds * 1000 * _OF_THE_TIME), 1)
            wait = ("WAITAOF", self._fsync) if self._fsync else ("WAIT",)
            commands.append((*wait, self._replicas, milliseconds))
        replies = await self._link.ask_all(commands, seconds)
        missing = self._missing(replies[len(sent)]) if len(replies) > len(sent) else None
        for index, reply in zip(sent, replies, strict=False):
            if isinstance(reply, ResponseError):
                self._link.note(reply)
                answers[index] = Unanswered(f"Redis: {reply}", told=True)
            else:
                answers[index] = Unanswered(missing) if missing else Confirmed()
        return [answer or Unanswered("Redis did not answer") for answer in answers]

    def _missing(self, reply: Any) -> str | None:
        """Return what the answer to WAIT or WAITAOF says is missing: the disk, or replicas; None if nothing is."""
        if isinstance(reply, ResponseError):
            return f"Redis does not wait: {reply}"
        local, replicas = reply if isinstance(reply, list) else (0, reply)
        if local < self._fsync:
            return "Redis has not written it to the disk in time"
        if replicas < self._replicas:
            return f"{replicas} of {self._replicas} replicas have it"
        return None

    async def _trim(self, stream: str, deadline: float) -> None:
        """Remove old entries that all groups have read, once a minute. A failure here does not fail what was sent."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now - self._trimmed.get(stream, 0.0) < _TRIM_SECONDS or deadline - now < _TRIM_WITHIN:
            return
        if len(self._trimmed) >= _MOST_STREAMS:  # each type may have a stream of its own
            self._trimmed.clear()
        self._trimmed[stream] = now
        oldest = f"{int((time.time() - self.keep) * 1000)}-0"
        try:
            await self._link.ask("EVAL", TRIM_READ, 1, stream, oldest, seconds=_TRIM_WITHIN)
        except (BrokerUnavailable, ResponseError):
            return


def _added(stream: str, event: Outgoing) -> Command:
    fields: list[str | bytes] = [BODY, event.body, TYPE_HEADER, event.event_type]
    if event.target is not None:
        fields += TARGET_HEADER, event.target
    for name, value in event.headers.items():
        if name not in (BODY, TYPE_HEADER, TARGET_HEADER):
            fields += name, value
    return ("XADD", stream, "*", *fields)
