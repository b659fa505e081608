"""Events: where is this one? Filters stand in the address; lists go on from the last row, and never count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from starlette.responses import Response

from holdfast.characters import shell_word
from holdfast.console.filters import AddressFilter, Fields, moment, whole
from holdfast.console.newest import MOST, NewestFeed, feed_of
from holdfast.console.page import Call, Page
from holdfast.console.story import EVERY_HANDLER
from holdfast.errors import ConfigurationError
from holdfast.operator import EventLine, Operator

PAGE: Final = 50
STATES: Final = {
    "": "Any",
    "pending": "Pending",
    "in_flight": "In flight",
    "delayed": "Delayed",
    "delivered": "Delivered",
    "failed": "Failed",
    "discarded": "Set aside",
}


@dataclass(frozen=True, slots=True)
class EventFilter(AddressFilter):
    """The events of a page."""

    status: str = ""
    event_type: str = ""
    handler: str = ""
    source: str = ""
    generation: str = ""
    domain_id: str = ""
    key: str = ""
    since: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATES:
            raise ConfigurationError("status", "is unknown", f"use one of {', '.join(filter(None, STATES))}")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a search."""
        state = "pending" if self.status == "delayed" else self.status or None
        return {
            "state": state,
            "event_type": self.event_type or None,
            "handler": self.handler or None,
            "source": self.source or None,
            "generation": whole("generation", self.generation),
            "domain_id": self.domain_id or None,
            "key": self.key or None,
            "since": moment("since", self.since),
            "until": moment("until", self.until),
        }

    def command(self) -> str:
        """A command that lists the same, or nearly."""
        if self.status in ("failed", "discarded"):
            names: tuple[str, ...] = ("event-type", "handler", "source", "since", "until")
            start = f"holdfast failed list{' --discarded' if self.status == 'discarded' else ''}"
        else:
            names, start = ("event-type", "handler", "source", "generation"), "holdfast events list"
        return start + "".join(f" --{name} {shell_word(value)}" for name, value in self.given.items() if name in names)


async def show(call: Call) -> Response:
    """Show events, the newest first."""
    which = EventFilter.of(call.query)
    before = call.query.get("before") or None
    async with call.operator() as operator:
        found = await operator.events.search(**which.arguments, before=before, limit=PAGE)
    events = _of_state(found.events, which, call.now)
    return call.render(
        "events.html",
        active="events",
        title="Events",
        cli=which.command(),
        which=which,
        states=STATES,
        events=events,
        next=found.next,
        searched_until=found.searched_until,
        first=before is None,
        feed=feed_of("events", which.given) if before is None else None,
        now=call.now,
        every_handler=EVERY_HANDLER,
    )


async def _newest(operator: Operator, query: Fields) -> Sequence[str]:
    """Return the ids of the newest rows of a filter."""
    which = EventFilter.of(query)
    found = await operator.events.search(**which.arguments, limit=MOST)
    return [str(each.id) for each in _of_state(found.events, which, datetime.now(UTC))]


def _given(query: Fields) -> Mapping[str, str]:
    return EventFilter.of(query).given


def _of_state(events: Sequence[EventLine], which: EventFilter, now: datetime) -> list[EventLine]:
    """Return those that are due, or those that are not; the search knows only that they are pending."""
    if which.status not in ("pending", "delayed"):
        return list(events)
    return [each for each in events if (each.available_at > now) == (which.status == "delayed")]


FEED = NewestFeed("/events", _given, _newest)
PAGES = (Page("/events", "events", get=show),)
