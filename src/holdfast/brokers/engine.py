"""What a broker must offer to carry events: a sink that the relay sends to, and a source that a listener takes from.

One module per engine implements both (`nats.py`, `redis.py`, `rabbitmq.py`, `kafka.py`); nothing else knows a broker's
client. An engine never retries by itself, never waits without a deadline, and never buffers past the answer it gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, Protocol
from uuid import UUID

from holdfast.brokers.cloudevents import Binding
from holdfast.errors import HoldfastError


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One event on its way to a broker, rendered: a CloudEvent, with headers in the binary mode, and its route."""

    event_id: UUID
    # The broker's de-duplication id: the event's id, the cycle of its relay, so that a re-relay is no duplicate, and
    # what nobody but a relay can know.
    message_id: str
    channel: str
    event_type: str
    target: str | None
    # Events of one key keep their order; None has none to keep.
    key: str | None
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker has the event, now or from an earlier try."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker will never take this event (its size, its name): the row fails alone."""

    error: str


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Nobody knows whether the broker has the event, or it cannot take any now: the row is released."""

    error: str
    # Whether the broker itself says so: it may need somebody's help.
    told: bool = False


Answer = Confirmed | Refused | Unanswered


class BrokerUnavailable(HoldfastError):
    """The broker as a whole cannot be used now: an outage, which burns no attempt. `remedy` is empty if unknown."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


class Sink(Protocol):
    """Sends events to one broker. `send` gives one answer per event, in the order of the batch, within `timeout`."""

    async def open(self) -> None: ...

    async def send(self, batch: Sequence[Outgoing], *, timeout: float) -> Sequence[Answer]: ...

    async def close(self) -> None: ...


class Received(NamedTuple):
    """One message that a source has taken and not acknowledged yet."""

    body: bytes
    headers: Mapping[str, str]
    # How often the broker has delivered it, this time included; None where the broker does not count. What may have
    # been taken before (the first records after an assignment) counts as 2: it is handled from a row, where attempts
    # are counted.
    deliveries: int | None
    # What the engine needs to acknowledge it.
    token: object
    # Whether it came by its type: what others have written, and nothing was routed by, may be anybody's.
    routed: bool = True


@dataclass(frozen=True, slots=True)
class Interest:
    """What one handler is to get from a broker: consumer, group or queue are made for it, and kept until it retires."""

    handler_name: str
    channel: str
    domain_context: str
    # Event types and patterns as in core.subscriptions; `*` spans dots.
    event_types: tuple[str, ...]
    # The subscription's first commit: a new consumer begins a minute before it.
    since: datetime
    ordered: bool = False


class Source(Protocol):
    """Takes the messages of one handler. Deadlines as given; `BrokerUnavailable` when the broker cannot be reached."""

    async def open(self) -> None: ...

    async def take(self, most: int, *, wait: float) -> Sequence[Received]: ...

    async def keep_alive(self, messages: Sequence[Received]) -> None: ...

    async def acknowledge(self, messages: Sequence[Received]) -> None: ...

    async def give_back(self, messages: Sequence[Received]) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Weakness:
    """A setting of the broker that breaks a promise (durability, retention, a limit that drops), and its remedy."""

    subject: str
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a broker still holds for one handler."""

    handler_name: str
    waiting: int | None
    unacknowledged: int | None
    redelivered: int | None = None


def sum_of(handler_name: str, parts: Sequence[Backlog]) -> Backlog:
    """Return what a broker holds for a handler in all places together; what one does not tell is not known of all."""

    def total(counts: Sequence[int | None]) -> int | None:
        return None if None in counts else sum(each for each in counts if each is not None)

    return Backlog(
        handler_name,
        total([each.waiting for each in parts]),
        total([each.unacknowledged for each in parts]),
        total([each.redelivered for each in parts]),
    )


def left_of(parts: Sequence[Backlog]) -> int | None:
    """Return how many messages there are in all places together; a place without a consumer has none for it."""
    left = 0
    for each in parts:
        if each.waiting is None and each.unacknowledged is None:
            continue
        if each.waiting is None:
            return None
        left += each.waiting + (each.unacknowledged or 0)
    return left


class Engine(Protocol):
    """One broker, by its address. Connections belong to the sinks and sources that it makes."""

    name: str
    # How events are written in the binary mode; None for the structured one.
    binding: Binding | None

    def sink(self, *, lease: float) -> Sink: ...

    def source(self, interest: Interest, *, lease: float) -> Source: ...

    def names(self, interest: Interest) -> Sequence[str]:
        """Return the streams, topics or exchanges that have what a handler is owed; refuse one that has no names."""
        ...

    async def weaknesses(
        self,
        channels: Sequence[str],
        interests: Sequence[Interest] = (),
        *,
        remembered: float | None = None,
        timeout: float,
    ) -> Sequence[Weakness]:
        """Name what breaks a promise; `remembered` is for how many seconds the inbox knows what was handled."""
        ...

    async def backlogs(self, interests: Sequence[Interest], *, timeout: float) -> Sequence[Backlog]: ...

    async def remove(self, interest: Interest) -> None: ...

    @property
    def naming(self) -> str:
        """The templates of names, as options of the address; empty where other names leave nothing behind."""
        ...

    def named(self, naming: str) -> Engine:
        """Return the same broker by other names; refuse those that it would not take."""
        ...

    async def left(self, interest: Interest, *, timeout: float) -> int | None:
        """Return how many messages are there for a handler, taken or not; None if that is not known."""
        ...
