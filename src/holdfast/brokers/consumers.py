"""What an operator does at a broker: make the consumers of handlers, count the messages left for them, delete them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.brokers.engine import Backlog, Engine, Interest, Weakness

# Seconds: the workers' default, for consumers that are made here.
_LEASE = 30.0
_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class BrokerReport:
    """The messages that a broker holds for handlers, and its settings that break a promise."""

    broker: str
    backlogs: list[Backlog]
    weaknesses: list[Weakness]


async def make(engine: Engine, interests: Sequence[Interest]) -> None:
    """Make the consumers, groups or queues of handlers, before anything is sent for them."""
    # All sources first: one whose names the address cannot make is refused before any consumer exists.
    sources = [engine.source(each, lease=_LEASE) for each in interests]
    for source in sources:
        try:
            await source.open()
        finally:
            await source.close()


async def report(
    engine: Engine, interests: Sequence[Interest], channels: Sequence[str], remembered: float | None = None
) -> BrokerReport:
    """Ask a broker for its backlogs and weaknesses; `remembered` is how many seconds the inbox keeps its keys."""
    backlogs = await engine.backlogs(interests, timeout=_PATIENCE)
    weak = await engine.weaknesses(channels, interests, remembered=remembered, timeout=_PATIENCE)
    return BrokerReport(engine.name, list(backlogs), list(weak))


async def left(engine: Engine, interests: Sequence[Interest]) -> int:
    """Return how many messages a broker still has for handlers, waiting or not acknowledged."""
    found = await engine.backlogs(interests, timeout=_PATIENCE)
    return sum((each.waiting or 0) + (each.unacknowledged or 0) for each in found)


async def remove(engine: Engine, interests: Sequence[Interest]) -> None:
    """Delete the consumers of handlers."""
    for interest in interests:
        await engine.remove(interest)
