"""What operators may ask for, checked before anything is asked of the database."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from holdfast.errors import ConfigurationError

MOST_AT_ONCE = 10_000
LARGEST = 2**63 - 1

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_HANDLER = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
_NAME = re.compile(r"[^/*\s]{1,200}")


def ids(values: Iterable[UUID | str], field: str = "ids") -> list[UUID]:
    """1 to 10,000 different ids, in their order."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ConfigurationError(field, f"is {type(values).__name__}", "pass a list of ids")
    found: dict[UUID, None] = {}
    for value in values:
        found[identity(value, field)] = None
        if len(found) > MOST_AT_ONCE:
            raise ConfigurationError(
                field, f"are more than {MOST_AT_ONCE:,}", "make a plan with a filter: holdfast plans create"
            )
    if not found:
        raise ConfigurationError(field, "are none", "name at least one; holdfast failed list has them")
    return list(found)


def identity(value: UUID | str, field: str = "id") -> UUID:
    """An id, or an error that quotes what was given instead."""
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (TypeError, ValueError, AttributeError):
        raise ConfigurationError(field, f"{_quoted(value)} is no id", "copy one from holdfast failed list") from None


def whole(field: str, value: int, low: int = 0, high: int = LARGEST) -> int:
    """A whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bounds = f"from {low} to {high:,}" if high < LARGEST else f"of {low} or more"
        raise ConfigurationError(field, f"is {_quoted(value)}", f"give a whole number {bounds}")
    return value


def number(field: str, value: float, low: float, high: float) -> float:
    """A finite number within bounds."""
    # What is not a number is within no bounds either: every comparison with it is false.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigurationError(field, f"is {_quoted(value)}", f"give a number from {low:g} to {high:,g}")
    return float(value)


def moment(field: str, value: datetime) -> datetime:
    """A time with a time zone."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise ConfigurationError(
            field, f"is {_quoted(value)}", "give a time with its zone, like 2026-01-31T08:00+01:00"
        )
    return value


def line(field: str, value: str, longest: int = 200) -> str:
    """Some text of one line, which a terminal can show and a log can hold."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(field, "is empty", "write what others will read later")
    if len(value.encode(errors="replace")) > longest:
        raise ConfigurationError(field, f"has more than {longest} bytes", "shorten it")
    if _UNPRINTABLE.search(value):
        raise ConfigurationError(field, "has control characters", "write plain text on one line")
    return value


def reason(value: str | None) -> str | None:
    """Why something is done; it may be left out."""
    return None if value is None else line("reason", value, 2_000)


def handler(value: str, field: str = "handler") -> str:
    """A handler's name."""
    if not isinstance(value, str) or not _HANDLER.fullmatch(value):
        raise ConfigurationError(field, f"{_quoted(value)} is no handler's name", "write it like billing.charge_card")
    return value


def name(field: str, value: str) -> str:
    """A type of events, or where they come from."""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or _UNPRINTABLE.search(value):
        raise ConfigurationError(field, f"{_quoted(value)} is no name", "write it without spaces, / and *")
    return value


def signature(value: str, field: str = "signature") -> str:
    """What names a kind of failure."""
    if not isinstance(value, str) or not value or len(value) > 300 or _UNPRINTABLE.search(value) or " " in value:
        raise ConfigurationError(field, f"{_quoted(value)} is no signature", "copy one from holdfast failed groups")
    return value


def _quoted(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
