"""Which events an interest is owed, where the broker itself can only give more than that."""

from __future__ import annotations

from holdfast.brokers.engine import Interest
from holdfast.handlers import pattern_of
from holdfast.names import LONGEST_NAME

# So many types, each with a target, have their answer remembered.
_MOST_KNOWN = 1000

# What an engine writes beside an event, so that a consumer need not read the event to know whether it wants it.
TYPE_HEADER = "hf-type"
TARGET_HEADER = "hf-target"


def wants(interest: Interest, event_type: str, target: str | None) -> bool:
    """Whether a handler is owed events of this type and target."""
    if target is not None and target != interest.domain_context:
        return False
    return any(pattern_of(each).fullmatch(event_type) for each in interest.event_types)


class Wanted:
    """Tells what a handler is owed, and remembers what it has told."""

    def __init__(self, interest: Interest) -> None:
        self._interest = interest
        self._known: dict[tuple[str, str | None], bool] = {}

    def __call__(self, event_type: str, target: str | None) -> bool:
        # No event has so long a type or target, and what others write must not fill the memory.
        if len(event_type) > LONGEST_NAME or (target is not None and len(target) > LONGEST_NAME):
            return False
        known = self._known.get((event_type, target))
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[event_type, target] = wants(self._interest, event_type, target)
        return known
