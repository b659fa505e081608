"""The engine of Redis and Valkey: makes sinks and sources, and inspects streams and groups for operators."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from redis.exceptions import ResponseError

from holdfast.brokers.addresses import FIELD, address_of, with_names
from holdfast.brokers.engine import Backlog, BrokerUnavailable, Interest, Source, Weakness, left_of, sum_of
from holdfast.brokers.joined import joined
from holdfast.brokers.keeping import outlived_inbox
from holdfast.brokers.redis.link import ANSWER_SECONDS, Link
from holdfast.brokers.redis.scripts import id_order, owner_of, streams_of
from holdfast.brokers.redis.sink import RedisSink
from holdfast.brokers.redis.source import RedisSource
from holdfast.errors import ConfigurationError

_OPTIONS: Final = ("replicas", "fsync", "keep", "cafile", "stream")
_SETTINGS: Final = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")
# Seconds by which ids may be ahead of our clock: the server makes them, and its clock may be wrong.
_AHEAD: Final = 86_400
_MOST_PENDING: Final = 1000
_LOST: Final = "holdfast relay check finds what is lost, and sends that again"


class RedisEngine:
    """One Redis or Valkey, with or without replicas."""

    name = "redis"
    binding = None  # CloudEvents defines no binary mode for Redis

    def __init__(self, address: str) -> None:
        if address.startswith("valkey://"):
            address = f"redis{address.removeprefix('valkey')}"
        self._text = address
        self._address = address_of(address, ("redis", "rediss"), _OPTIONS)
        if self._address.path and not self._address.path.isdecimal():
            raise ConfigurationError(FIELD, "names no database", "write its number after the host, like /0")
        self._address.file("cafile")
        self._streams = streams_of(self._address)
        self._keep = RedisSink(self._address).keep  # the sink also checks the other options

    def sink(self, *, lease: float) -> RedisSink:
        return RedisSink(self._address)

    def source(self, interest: Interest, *, lease: float) -> Source:
        return joined([RedisSource(self._address, interest, stream, lease) for stream in self.names(interest)])

    def names(self, interest: Interest) -> Sequence[str]:
        return self._streams.names(interest)

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
            found += await self._server_weaknesses(link, timeout)
            # Events that were not read are never trimmed, so only the other half of the retention check applies.
            found += outlived_inbox("address", self._keep, remembered, "keep")
            for stream in self._streams.names_of(channels, interests):
                answers = await link.ask_all([("XINFO", "STREAM", stream), ("XINFO", "GROUPS", stream)], timeout)
                refusals = [answer for answer in answers if isinstance(answer, ResponseError)]
                if any(str(each).startswith("WRONGTYPE") for each in refusals):
                    remedy = "RENAME the key, or name other streams by stream= in the address"
                    found.append(Weakness(f"key {stream}", "is no stream, so that the relay stands still", remedy))
                if refusals:
                    continue  # the relay makes it
                found += _stream_weaknesses(stream, _info(answers[0]), [_info(row) for row in answers[1]])
        return found

    async def backlogs(self, interests: Sequence[Interest], *, timeout: float) -> Sequence[Backlog]:
        found: list[Backlog] = []
        async with self._link() as link:
            for interest in interests:
                parts = [await self._backlog(link, interest, stream, timeout) for stream in self.names(interest)]
                found.append(sum_of(interest.handler_name, parts))
        return found

    async def _backlog(self, link: Link, interest: Interest, stream: str, timeout: float) -> Backlog:
        group = interest.handler_name
        about, groups, pending = await link.ask_all(
            [
                ("XINFO", "STREAM", stream),
                ("XINFO", "GROUPS", stream),
                ("XPENDING", stream, group, "-", "+", _MOST_PENDING),
            ],
            timeout,
        )
        rows = [] if isinstance(groups, ResponseError) else [_info(row) for row in groups]
        row = next((row for row in rows if row["name"] == group.encode()), None)
        if row is None or isinstance(pending, ResponseError):
            return Backlog(group, None, None)
        again = sum(1 for _, _, _, count in pending if count > 1)
        return Backlog(group, _waiting(_info(about), row), row["pending"], again)

    async def remove(self, interest: Interest) -> None:
        async with self._link() as link:
            answers = await link.ask_all(
                [
                    command
                    for stream in self.names(interest)
                    for command in (
                        ("XGROUP", "DESTROY", stream, interest.handler_name),
                        ("DEL", owner_of(stream, interest.handler_name)),
                    )
                ],
                ANSWER_SECONDS,
            )
        for refusal in answers:
            missing = "key to exist" in str(refusal) or "no such key" in str(refusal)
            if isinstance(refusal, ResponseError) and not missing:
                raise BrokerUnavailable(f"Redis: {refusal}")

    @property
    def naming(self) -> str:
        return f"stream={self._streams.text}"

    def named(self, naming: str) -> RedisEngine:
        return RedisEngine(with_names(self._text, naming, ("stream",)))

    async def left(self, interest: Interest, *, timeout: float) -> int | None:
        async with self._link() as link:
            parts = [await self._backlog(link, interest, stream, timeout) for stream in self.names(interest)]
        return left_of(parts)

    async def _server_weaknesses(self, link: Link, timeout: float) -> list[Weakness]:
        try:
            answer = await link.ask("CONFIG", "GET", *_SETTINGS, seconds=timeout)
        except ResponseError as error:
            remedy = "allow CONFIG GET, or see to appendonly yes, appendfsync always and noeviction yourself"
            return [Weakness("server", f"does not show its settings: {error}", remedy)]
        settings = {name.decode(): value.decode() for name, value in zip(answer[::2], answer[1::2], strict=True)}
        try:
            role = await link.ask("ROLE", seconds=timeout)
            replicas = len(role[2])
        except ResponseError:
            replicas = 0
        waits = self._address.number("replicas", 0, 0, 10)
        fsync = self._address.number("fsync", 0, 0, 1)
        return list(_settings_weaknesses(settings, replicas, waits, fsync))

    @asynccontextmanager
    async def _link(self) -> AsyncIterator[Link]:
        link = Link(self._address, "holdfast operator")
        try:
            yield link
        finally:
            await link.close()


def _settings_weaknesses(settings: Mapping[str, str], replicas: int, waits: int, fsync: int) -> Iterator[Weakness]:
    if settings.get("appendonly") != "yes":
        yield Weakness("server", "keeps events in memory only: a restart loses them", "set appendonly yes")
    elif settings.get("appendfsync") != "always":
        # WAITAOF would wait for the disk, but answers too early beside everysec since Redis 7.4 (redis/redis#13793).
        problem = f"has appendfsync {settings.get('appendfsync')}: a power cut loses what was confirmed last"
        yield Weakness("server", f"{problem}, also with fsync=1" if fsync else problem, "set appendfsync always")
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        # Streams have no expiry; the keys that name the one consumer of an ordered handler have.
        dropped = "keys that keep the order of events" if policy.startswith("volatile-") else "a stream, read or not"
        problem = f"has maxmemory-policy {policy}: it may drop {dropped}"
        yield Weakness("server", problem, "set maxmemory-policy noeviction")
    if replicas > waits == 0:
        problem = f"has {replicas} replica and waits for none: to promote one loses what it did not have yet"
        yield Weakness("server", problem, "add replicas=1 to the address")
    if waits > replicas:
        problem = f"has {replicas} replicas and the address wants {waits}: nothing is ever confirmed"
        yield Weakness("server", problem, "start the replicas, or lower replicas in the address")


def _stream_weaknesses(
    stream: str, about: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Iterator[Weakness]:
    # The relay's trimming leaves each group the entry that it has read last, or one before it.
    oldest = about["first-entry"][0] if about.get("first-entry") else about["last-generated-id"]
    last, _ = id_order(about["last-generated-id"])
    if last > (time.time() + _AHEAD) * 1000:
        problem = f"has the id {last} far ahead of the clock: after the largest one it takes no event"
        yield Weakness(f"stream {stream}", problem, f"RENAME it, which makes a new one; {_LOST}")
    trimmed = about.get("entries-added", 0) > about["length"]
    deleted = about.get("max-deleted-entry-id", b"0-0")
    for group in groups:
        read = id_order(group["last-delivered-id"])
        if read < id_order(deleted) or (trimmed and read < id_order(oldest)):
            name = group["name"].decode(errors="replace")
            yield Weakness(f"stream {stream}", f"events were removed that {name} has not read", _LOST)


def _waiting(about: Mapping[str, Any], group: Mapping[str, Any]) -> int | None:
    """Return how many entries a group has not read. The group's `lag` also counts entries that were removed."""
    first = about.get("first-entry")
    if first is None:
        return 0
    if id_order(group["last-delivered-id"]) < id_order(first[0]):
        return int(about["length"])
    lag = group.get("lag")
    return None if lag is None else int(lag)


def _info(row: Sequence[Any]) -> dict[str, Any]:
    return {name.decode(): value for name, value in zip(row[::2], row[1::2], strict=True)}
