"""Decides which events a handler is owed, for brokers that can only give it more than those."""

from __future__ import annotations

from holdfast.brokers.engine import Interest
from holdfast.handlers import pattern_of
from holdfast.names import LONGEST_NAME

# Pairs of type and target whose answer is remembered.
_MOST_KNOWN = 1000

# Headers that an engine adds, so that a consumer can tell without parsing the event whether it wants it.
TYPE_HEADER = "hf-type"
TARGET_HEADER = "hf-target"


def wants(interest: Interest, event_type: str, target: str | None) -> bool:
    """Return whether a handler is owed events of this type and target."""
    if target is not None and target != interest.domain_context:
        return False
    return any(pattern_of(each).fullmatch(event_type) for each in interest.event_types)


class Wanted:
    """Calls `wants` for one interest, and remembers the answers."""

    def __init__(self, interest: Interest) -> None:
        self._interest = interest
        self._known: dict[tuple[str, str | None], bool] = {}

    def __call__(self, event_type: str, target: str | None) -> bool:
        # The outbox has no names that long, and foreign messages must not fill the memory.
        if len(event_type) > LONGEST_NAME or (target is not None and len(target) > LONGEST_NAME):
            return False
        known = self._known.get((event_type, target))
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[event_type, target] = wants(self._interest, event_type, target)
        return known
