"""What a broker must offer to carry events: a sink that the relay sends to, and a source that a worker takes from.

One package per broker implements both (`nats/`, `redis/`, `rabbitmq/`, `kafka/`); nothing else imports a broker's
client. An engine never retries by itself, never waits without a deadline, and sends nothing after it has answered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple, Protocol
from uuid import UUID

from holdfast.brokers.cloudevents import Binding
from holdfast.errors import HoldfastError


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One event on its way to a broker, rendered: a CloudEvent, with headers in the binary mode, and its route."""

    event_id: UUID
    # The broker's de-duplication id: the event's id, its cycle, so that an event sent again on request is no duplicate,
    # and a part that only a relay can work out.
    message_id: str
    channel: str
    event_type: str
    target: str | None
    # The ordering key: events with the same one keep their order.
    key: str | None
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker has stored the event, now or at an earlier try."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker will never take this event (its size, its name): the row fails alone."""

    error: str


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Nobody knows whether the broker has the event, or it cannot take any now: the row is released."""

    error: str
    # Whether the broker itself says that it takes none: an operator may have to help.
    told: bool = False


Answer = Confirmed | Refused | Unanswered

# As NATS, Redis, RabbitMQ and Kafka say it.
_REFUSED_LOGIN: Final = re.compile(
    "authorization violation|username-password|WRONGPASS|NOAUTH|authentication required|login was refused|SASL"
    "|authentication failed",
    re.IGNORECASE,
)
_REFUSED_REMEDY: Final = "the broker runs and refuses this login: check the user and the password in its address"


class BrokerUnavailable(HoldfastError):
    """The broker as a whole cannot be used now: an outage, which costs no attempt. `remedy` is empty if unknown."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy or (_REFUSED_REMEDY if refuses_login(problem) else "")


def refuses_login(text: str) -> bool:
    """Whether a broker's answer says that it runs, and does not let this login in."""
    return _REFUSED_LOGIN.search(text) is not None


class Sink(Protocol):
    """Sends events to one broker. `send` gives one answer per event, in the order of the batch, within `timeout`."""

    async def open(self) -> None: ...

    async def send(self, batch: Sequence[Outgoing], *, timeout: float) -> Sequence[Answer]: ...

    async def close(self) -> None: ...


class Received(NamedTuple):
    """One message that a source has taken and not acknowledged yet."""

    body: bytes
    headers: Mapping[str, str]
    # How often the broker has delivered it, this time included; None where the broker does not count. Where nobody
    # knows (Kafka's first records after an assignment) it is 2: such a message is handled from a row, which counts
    # attempts.
    deliveries: int | None
    # What the engine needs to acknowledge the message.
    token: object
    # Whether the broker chose this handler by the event's type. A message that anybody wrote straight into a stream or
    # queue may be meant for nobody here.
    routed: bool = True


@dataclass(frozen=True, slots=True)
class Interest:
    """The events that one handler gets from a broker; its consumer, group or queue is kept until it retires."""

    handler_name: str
    channel: str
    domain_context: str
    # Event types and patterns as in core.subscriptions; `*` spans dots.
    event_types: tuple[str, ...]
    # The subscription's first commit: a new consumer begins a minute before it.
    since: datetime
    ordered: bool = False


class Source(Protocol):
    """Takes the messages of one handler. Each method raises `BrokerUnavailable` when the broker cannot be reached."""

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
    """The messages that a broker still holds for one handler; None where the broker does not tell."""

    handler_name: str
    waiting: int | None
    unacknowledged: int | None
    redelivered: int | None = None


def sum_of(handler_name: str, parts: Sequence[Backlog]) -> Backlog:
    """Return a handler's backlogs in several streams or topics as one; a number that one part lacks is None."""

    def total(counts: Sequence[int | None]) -> int | None:
        return None if None in counts else sum(each for each in counts if each is not None)

    return Backlog(
        handler_name,
        total([each.waiting for each in parts]),
        total([each.unacknowledged for each in parts]),
        total([each.redelivered for each in parts]),
    )


def left_of(parts: Sequence[Backlog]) -> int | None:
    """Return how many messages several streams or topics hold; one without a consumer of the handler holds none."""
    left = 0
    for each in parts:
        if each.waiting is None and each.unacknowledged is None:
            continue
        if each.waiting is None:
            return None
        left += each.waiting + (each.unacknowledged or 0)
    return left


class Engine(Protocol):
    """One broker, known by its address. Connections belong to the sinks and sources that an engine makes."""

    name: str
    # How events are written in the binary mode; None for the structured one.
    binding: Binding | None

    def sink(self, *, lease: float) -> Sink: ...

    def source(self, interest: Interest, *, lease: float) -> Source: ...

    def names(self, interest: Interest) -> Sequence[str]:
        """Return the streams, topics or exchanges of a handler; refuse a pattern whose events may be under any name."""
        ...

    async def weaknesses(
        self,
        channels: Sequence[str],
        interests: Sequence[Interest] = (),
        *,
        remembered: float | None = None,
        timeout: float,
    ) -> Sequence[Weakness]:
        """Return the settings that break a promise; `remembered` is how many seconds the inbox keeps its keys."""
        ...

    async def backlogs(self, interests: Sequence[Interest], *, timeout: float) -> Sequence[Backlog]: ...

    async def remove(self, interest: Interest) -> None: ...

    @property
    def naming(self) -> str:
        """The templates of names as options of the address; empty if messages cannot be left behind by a change."""
        ...

    def named(self, naming: str) -> Engine:
        """Return the same broker with other templates of names; refuse templates that it would not take."""
        ...

    async def left(self, interest: Interest, *, timeout: float) -> int | None:
        """Return how many messages are left for a handler, taken or not; None if that is not known."""
        ...
