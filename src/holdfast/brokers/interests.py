"""Which events an interest is owed, where the broker itself can only give more than that."""

from __future__ import annotations

from holdfast.brokers.engine import Interest
from holdfast.handlers import pattern_of

# What an engine writes beside an event, so that a consumer need not read the event to know whether it wants it.
TYPE_HEADER = "hf-type"
TARGET_HEADER = "hf-target"


def wants(interest: Interest, event_type: str, target: str | None) -> bool:
    """Whether a handler is owed events of this type and target."""
    if target is not None and target != interest.domain_context:
        return False
    return any(pattern_of(each).fullmatch(event_type) for each in interest.event_types)
