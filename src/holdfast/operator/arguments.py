"""Checks of what operators pass, made before anything is sent to the database."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from holdfast.checks import UNPRINTABLE, line, moment, number, quoted, whole
from holdfast.errors import ConfigurationError
from holdfast.names import event_name as name
from holdfast.names import handler_name

__all__ = [
    "MOST_AT_ONCE", "handler", "identity", "ids", "line", "moment", "name", "number", "page", "reason", "signature",
    "whole",
]  # fmt: skip

MOST_AT_ONCE = 10_000
LONGEST_PAGE = 1_000
TOO_MANY = f"has more than {MOST_AT_ONCE:,} entries"


def ids(values: Iterable[UUID | str], field: str = "ids") -> list[UUID]:
    """1 to 10,000 different ids, in the given order."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ConfigurationError(field, f"is {type(values).__name__}", "pass a list of ids")
    found: dict[UUID, None] = {}
    for value in values:
        found[identity(value, field)] = None
        if len(found) > MOST_AT_ONCE:
            raise ConfigurationError(field, TOO_MANY, "create a replay plan with a filter: holdfast plans create")
    if not found:
        raise ConfigurationError(field, "is empty", "name at least one id; holdfast failed list has them")
    return list(found)


def identity(value: UUID | str, field: str = "id", listed_by: str = "holdfast failed list") -> UUID:
    """An id, or an error that quotes the value and names the command that lists such ids."""
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (TypeError, ValueError, AttributeError):
        raise ConfigurationError(field, f"{quoted(value)} is not an id", f"copy one from: {listed_by}") from None


def page(field: str, value: int) -> int:
    """The number of rows of a page."""
    return whole(field, value, 1, LONGEST_PAGE)


def reason(value: str | None) -> str | None:
    """The reason of a change, which is optional."""
    return None if value is None else line("reason", value, 2_000)


def handler(value: str, field: str = "handler") -> str:
    """A handler's name."""
    return handler_name(value, field, error=ConfigurationError)


def signature(value: str, field: str = "signature") -> str:
    """The signature of a failure."""
    if not isinstance(value, str) or not value or len(value) > 300 or UNPRINTABLE.search(value) or " " in value:
        raise ConfigurationError(
            field, f"{quoted(value)} is not an error signature", "copy one from: holdfast failed groups"
        )
    return value
