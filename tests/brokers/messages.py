"""Events and interests for tests of engines, and what they took."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from holdfast.brokers.cloudevents import CarriedEvent, structured
from holdfast.brokers.engine import BrokerUnavailable, Confirmed, Interest, Outgoing, Received, Refused, Sink, Source
from holdfast.envelope import EventEnvelope

CHANNEL = "events"


def outgoing(
    number: int = 0, *, event_type: str = "order.placed", target: str | None = None, cycle: int = 0, **changes: Any
) -> Outgoing:
    """An event on its way; its payload has the number."""
    envelope = EventEnvelope(
        event_id=uuid4(),
        event_type=event_type,
        event_version=1,
        occurred_at=datetime.now(UTC),
        source="shop",
        target=target,
        payload={"number": number},
        idempotency_key=f"k-{number}",
    )
    values: dict[str, Any] = {
        "event_id": envelope.event_id,
        "message_id": f"{envelope.event_id}:{cycle}",
        "channel": CHANNEL,
        "event_type": event_type,
        "target": target,
        "key": None,
        "body": structured(CarriedEvent(envelope, cycle=cycle)),
    }
    return Outgoing(**values | changes)


def interest(
    *event_types: str, handler: str = "billing.charge", since: datetime | None = None, ordered: bool = False
) -> Interest:
    """What a handler of `billing` is to get; from now on, unless told."""
    return Interest(
        handler_name=handler,
        channel=CHANNEL,
        domain_context="billing",
        event_types=event_types or ("order.placed",),
        since=since or datetime.now(UTC),
        ordered=ordered,
    )


def number_of(message: Received) -> int:
    return int(json.loads(message.body)["data"]["number"])


def numbers(messages: Sequence[Received]) -> list[int]:
    return [number_of(message) for message in messages]


async def taken(source: Source, count: int, *, seconds: float = 15.0, acknowledge: bool = True) -> list[Received]:
    """Take that many, within a deadline, and acknowledge them."""
    found: list[Received] = []
    deadline = asyncio.get_running_loop().time() + seconds
    while len(found) < count:
        assert asyncio.get_running_loop().time() < deadline, f"{len(found)} of {count} came"
        got = await source.take(count - len(found), wait=0.5)
        if acknowledge and got:
            await source.acknowledge(got)
        found += got
    return found


async def sent(sink: Sink, batch: Sequence[Outgoing], *, seconds: float = 20.0) -> None:
    """Send until all are confirmed, as the relay does: what is unanswered is sent again."""
    deadline = asyncio.get_running_loop().time() + seconds
    waiting = list(batch)
    while waiting:
        assert asyncio.get_running_loop().time() < deadline, f"{len(waiting)} are not confirmed"
        try:
            answers = await sink.send(waiting, timeout=5)
        except BrokerUnavailable:
            await asyncio.sleep(0.1)
            continue
        assert not any(isinstance(answer, Refused) for answer in answers), answers
        waiting = [event for event, answer in zip(waiting, answers, strict=True) if answer != Confirmed()]


async def until(condition: Callable[[], Awaitable[bool]], *, seconds: float = 20.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come to pass"
        await asyncio.sleep(0.05)
