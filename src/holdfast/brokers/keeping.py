"""How long a broker keeps events, compared with how long they may be needed and how long the inbox knows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from holdfast.brokers.engine import Weakness

DAY: Final = 86_400.0
# A handler that was away for this long must still find its events.
HORIZON_DAYS: Final = 7


def retention_weaknesses(
    subject: str, kept: float | None, remembered: float | None, setting: str
) -> Iterator[Weakness]:
    """Yield what is wrong with a retention by age, whose events go whether they were read or not.

    `kept` is in seconds, and None if events are kept for ever; `remembered` is how long the inbox keeps its keys, and
    None if that is not known.
    """
    yield from dropped_unread(subject, kept, setting)
    yield from outlived_inbox(subject, kept, remembered, setting)


def dropped_unread(subject: str, kept: float | None, setting: str) -> Iterator[Weakness]:
    """Yield a weakness if events are dropped before a handler that was away can read them."""
    if kept is not None and kept < HORIZON_DAYS * DAY:
        problem = (
            f"keeps events for {_days(kept)}, read or not ({setting}): a handler that is away for longer loses them"
        )
        yield Weakness(subject, problem, f"set {setting} to {HORIZON_DAYS} days or more")


def outlived_inbox(subject: str, kept: float | None, remembered: float | None, setting: str) -> Iterator[Weakness]:
    """Yield a weakness if events are kept for longer than the inbox remembers that they were handled."""
    if remembered is not None and (kept is None or kept > remembered):
        how_long = "for ever" if kept is None else f"for {_days(kept)}"
        problem = (
            f"keeps events {how_long} ({setting}), and the inbox knows what was handled for {_days(remembered)}: "
            "a consumer that begins anew would run handlers twice"
        )
        remedy = f"set {setting} to less than {_days(remembered)}, or holdfast retention set event_handled to more"
        yield Weakness(subject, problem, remedy)


def _days(seconds: float) -> str:
    return f"{seconds / DAY:.3g} days" if seconds >= DAY else f"{seconds / 60:.3g} minutes"
