"""Filters in the address of a page; their names are those of the options of the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, Self
from uuid import UUID

from holdfast.characters import shell_word
from holdfast.errors import ConfigurationError
from holdfast.operator import Selection


class Fields(Protocol):
    """The parameters of an address, or the fields of a form."""

    def get(self, name: str, default: str, /) -> str: ...


_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True, slots=True)
class AddressFilter:
    """What a page shows, by the parameters of its address. A field that is empty selects nothing away."""

    @classmethod
    def of(cls, query: Fields) -> Self:
        """Return the filter of an address, or of the fields of a form."""
        return cls(**{each.name: query.get(_parameter(each.name), "").strip() for each in fields(cls)})

    @property
    def given(self) -> dict[str, str]:
        """The fields that are not empty, by their names in an address."""
        found = {_parameter(each.name): getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value}

    def without(self, name: str) -> dict[str, str]:
        """The other fields that are not empty, as keyword arguments."""
        return {key.replace("-", "_"): value for key, value in self.given.items() if key != name}


def _parameter(field: str) -> str:
    return field.replace("_", "-")


@dataclass(frozen=True, slots=True)
class FailureFilter(AddressFilter):
    """The dead letters of a page."""

    group: str = ""
    handler: str = ""
    event_type: str = ""
    source: str = ""
    signature: str = ""
    failure_reason: str = ""
    of_generation: str = ""
    since: str = ""
    until: str = ""

    def selection(self, *, everything: bool = False, until: datetime | None = None) -> Selection:
        """The selection; `until` is when its rows were counted."""
        ends = [each for each in (moment("until", self.until), until) if each is not None]
        found: dict[str, Any] = {
            "handler": self.handler or None,
            "event_type": self.event_type or None,
            "source": self.source or None,
            "signature": self.signature or None,
            "reason": self.failure_reason or None,
            "generation": whole("of-generation", self.of_generation),
            "since": moment("since", self.since),
            "until": min(ends) if ends else None,
        }
        if self.group:
            return Selection.group(self.group, **found)
        return Selection(**found, everything=everything and not any(value is not None for value in found.values()))

    def options(self) -> str:
        """The options of a command that selects the same."""
        return "".join(f" --{name} {shell_word(value)}" for name, value in self.given.items())


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page of dead letters goes on: after the last row of the page before."""

    failed_at: datetime
    id: UUID

    @classmethod
    def of(cls, cursor: str) -> Place | None:
        """Return the place that an address names; none where it is wrong, which is the first page."""
        at, _, id = cursor.partition("_")
        try:
            found = datetime.fromtimestamp(int(at) / 1_000_000, UTC)
            return cls(found, UUID(id))
        except (ValueError, OverflowError, OSError):
            return None


def cursor_of(failed_at: datetime, id: UUID) -> str:
    """Return a place as it stands in an address."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return f"{(failed_at - epoch) // timedelta(microseconds=1)}_{id}"


def moment(name: str, text: str) -> datetime | None:
    """A time: 90s, 15m, 2h, 7d or 2w ago, or a date and time, in UTC unless it has a zone."""
    if not text:
        return None
    if ago := re.fullmatch(r"([0-9]{1,6})([smhdw])", text):
        return datetime.now(UTC) - timedelta(seconds=int(ago[1]) * _UNITS[ago[2]])
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(name, "is not a time", "write 2h, 7d or 2026-01-31T08:00+01:00") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def whole(name: str, text: str) -> int | None:
    """A whole number, or none."""
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise ConfigurationError(name, "is not a whole number", "write digits, or leave it out")
    return int(text)
