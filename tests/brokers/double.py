"""A broker in the test's own process, for faults that real ones show too seldom: refusals, silence, doubles, losses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.brokers.engine import (
    Answer,
    Backlog,
    BrokerUnavailable,
    Confirmed,
    Interest,
    Outgoing,
    Received,
    Weakness,
)
from holdfast.brokers.interests import wants


@dataclass(eq=False)
class Stored:
    """One message of one consumer."""

    event: Outgoing
    deliveries: int = 0
    leased_until: float = 0.0


@dataclass
class Broker:
    """What all sinks and sources of one test share. `answer` decides about each event that is sent."""

    name = "nats"
    naming = ""
    binding = None
    down: bool = False
    answer: Callable[[Outgoing], Answer] = lambda _event: Confirmed()
    keep: Callable[[Outgoing], bool] = lambda _event: True  # False: confirmed, and lost
    doubles: int = 1  # copies of each message
    routed: bool = True  # by its type
    deaf: bool = False  # acknowledgements are lost
    sent: list[Outgoing] = field(default_factory=list)
    tries: int = 0  # of sends and connections
    consumers: dict[tuple[str, str], list[Stored]] = field(default_factory=dict)
    interests: dict[tuple[str, str], Interest] = field(default_factory=dict)
    acknowledged: int = 0
    given_back: int = 0
    backlog: list[Backlog] = field(default_factory=list)

    def sink(self, *, lease: float) -> _Sink:
        return _Sink(self)

    def source(self, interest: Interest, *, lease: float) -> _Source:
        return _Source(self, interest, lease)

    def names(self, interest: Interest) -> Sequence[str]:
        return (interest.channel,)

    async def weaknesses(
        self,
        channels: Sequence[str],
        interests: Sequence[Interest] = (),
        *,
        remembered: float | None = None,
        timeout: float,
    ) -> Sequence[Weakness]:
        return [Weakness("stream double", "is kept in memory", "use a real one")]

    async def backlogs(self, interests: Sequence[Interest], *, timeout: float) -> Sequence[Backlog]:
        self.require()
        found = []
        for each in interests:
            stored = self.consumers.get((each.handler_name, each.channel))
            unacknowledged = sum(one.deliveries > 0 for one in stored or ())
            waiting = None if stored is None else len(stored) - unacknowledged
            found.append(Backlog(each.handler_name, waiting, unacknowledged))
        return found

    async def remove(self, interest: Interest) -> None:
        self.require()
        self.consumers.pop((interest.handler_name, interest.channel), None)
        self.interests.pop((interest.handler_name, interest.channel), None)

    def named(self, naming: str) -> Broker:
        return self

    async def left(self, interest: Interest, *, timeout: float) -> int | None:
        return 0

    def require(self) -> None:
        self.tries += 1
        if self.down:
            raise BrokerUnavailable("the double is down")

    def put(self, event: Outgoing) -> None:
        for key, interest in self.interests.items():
            if interest.channel == event.channel and wants(interest, event.event_type, event.target):
                self.consumers[key] += [Stored(event) for _ in range(self.doubles)]


class _Sink:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def open(self) -> None:
        self._broker.require()

    async def send(self, batch: Sequence[Outgoing], *, timeout: float) -> Sequence[Answer]:
        self._broker.require()
        await asyncio.sleep(0)
        answers = []
        for event in batch:
            answer = self._broker.answer(event)
            if isinstance(answer, Confirmed):
                self._broker.sent.append(event)
                if self._broker.keep(event):
                    self._broker.put(event)
            answers.append(answer)
        return answers

    async def close(self) -> None: ...


class _Source:
    def __init__(self, broker: Broker, interest: Interest, lease: float) -> None:
        self._broker = broker
        self._key = interest.handler_name, interest.channel
        self._interest = interest
        self._lease = lease

    async def open(self) -> None:
        self._broker.require()
        self._broker.interests.setdefault(self._key, self._interest)
        self._broker.consumers.setdefault(self._key, [])

    async def take(self, most: int, *, wait: float) -> Sequence[Received]:
        await self.open()
        deadline = time.monotonic() + wait
        while True:
            now = time.monotonic()
            free = [each for each in self._broker.consumers[self._key] if each.leased_until < now][:most]
            if free or now > deadline:
                break
            await asyncio.sleep(0.005)
        for each in free:
            each.deliveries += 1
            each.leased_until = now + self._lease
        routed = self._broker.routed
        return [Received(each.event.body, dict(each.event.headers), each.deliveries, each, routed) for each in free]

    async def keep_alive(self, messages: Sequence[Received]) -> None:
        self._broker.require()
        for each in messages:
            each.token.leased_until = time.monotonic() + self._lease  # type: ignore[attr-defined]

    async def acknowledge(self, messages: Sequence[Received]) -> None:
        self._broker.require()
        self._broker.acknowledged += len(messages)
        if not self._broker.deaf:
            stored = self._broker.consumers.get(self._key, [])
            for each in messages:
                if each.token in stored:
                    stored.remove(each.token)  # type: ignore[arg-type]

    async def give_back(self, messages: Sequence[Received]) -> None:
        self._broker.require()
        self._broker.given_back += len(messages)
        for each in messages:
            each.token.leased_until = 0.0  # type: ignore[attr-defined]

    async def close(self) -> None: ...
