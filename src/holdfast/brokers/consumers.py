"""What an operator does at a broker itself: makes consumers of handlers, looks what is left for them, deletes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.brokers.engine import Backlog, Engine, Interest, Weakness

# The lease of consumers that are made here is the workers' default.
_LEASE = 30.0
_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class BrokerReport:
    """What a broker holds for handlers, and which of its settings break a promise."""

    broker: str
    backlogs: list[Backlog]
    weaknesses: list[Weakness]


async def make(engine: Engine, interests: Sequence[Interest]) -> None:
    """Make the consumers, groups or queues of handlers, before anything is sent for them."""
    sources = [engine.source(each, lease=_LEASE) for each in interests]  # refuses what has no name, before any is made
    for source in sources:
        try:
            await source.open()
        finally:
            await source.close()


async def report(
    engine: Engine, interests: Sequence[Interest], channels: Sequence[str], remembered: float | None = None
) -> BrokerReport:
    """Ask a broker what it holds, and how safe it is."""
    backlogs = await engine.backlogs(interests, timeout=_PATIENCE)
    weak = await engine.weaknesses(channels, interests, remembered=remembered, timeout=_PATIENCE)
    return BrokerReport(engine.name, list(backlogs), list(weak))


async def left(engine: Engine, interests: Sequence[Interest]) -> int:
    """How many messages a broker still has for handlers, waiting or not acknowledged."""
    found = await engine.backlogs(interests, timeout=_PATIENCE)
    return sum((each.waiting or 0) + (each.unacknowledged or 0) for each in found)


async def remove(engine: Engine, interests: Sequence[Interest]) -> None:
    """Delete the consumers of handlers."""
    for interest in interests:
        await engine.remove(interest)
