"""Versions of an event type: additions keep the type, a breaking change takes the next suffix.

The old type gets a deadline. Until then both are published; from the day after, publishing or handling the old one
warns, once per process and type.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime

from holdfast.errors import ConfigurationError
from holdfast.telemetry import Notice

_SUFFIX = re.compile(r"(?P<stem>.+)\.v(?P<number>[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Deprecation:
    """The last day on which an event type may be used, and the type that takes its place."""

    event_type: str
    deadline: date
    successor: str


_deprecations: dict[str, Deprecation] = {}
_warned: set[str] = set()


def successor(event_type: str) -> str:
    """Return the name for the next breaking version of an event type.

    >>> successor("decision.recorded"), successor("decision.recorded.v2")
    ('decision.recorded.v2', 'decision.recorded.v3')
    """
    match = _SUFFIX.fullmatch(event_type)
    return f"{match['stem']}.v{int(match['number']) + 1}" if match else f"{event_type}.v2"


def deprecate(event_type: str, deadline: date, successor: str) -> None:
    """Announce that after `deadline` (a day in UTC) `successor` is to be used instead of `event_type`."""
    day: object = deadline
    if not isinstance(day, date) or isinstance(day, datetime):
        raise ConfigurationError("deadline", "is not a date", "pass datetime.date(year, month, day)")
    if not successor or successor == event_type:
        raise ConfigurationError("successor", "is not another type", "name the type to use instead")
    _deprecations[event_type] = Deprecation(event_type, deadline, successor)
    _warned.discard(event_type)


def warn_if_deprecated(event_type: str, observe: Callable[[Notice], None], today: date | None = None) -> None:
    """Warn, once per process, about an event type that is past its deadline; `observe` gets a notice to log.

    It costs a lookup otherwise.
    """
    deprecation = _deprecations.get(event_type)
    if deprecation is None or event_type in _warned:
        return
    if (today or datetime.now(UTC).date()) <= deprecation.deadline:
        return
    _warned.add(event_type)
    deadline = deprecation.deadline.isoformat()
    details: dict[str, object] = {
        "event_type": event_type,
        "deadline": deadline,
        "successor": deprecation.successor,
    }
    observe(Notice("warning", "event_type_deprecated", details))
    warnings.warn(
        f"event type {event_type} is past its deadline {deadline}; use {deprecation.successor}",
        DeprecationWarning,
        stacklevel=3,
    )
