"""Checks of values that callers pass: numbers, moments, texts. A check returns the value or raises an error that names
field, problem and remedy; `error` is the class of that error.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TypeAlias, TypeVar

from holdfast.errors import ConfigurationError

T = TypeVar("T")

# Makes an error from field, problem and remedy.
Refusal: TypeAlias = Callable[[str, str, str], Exception]

LARGEST = 2**63 - 1
LONGEST_TEXT = 255

# Control characters, and surrogates that no encoding can write.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
storable = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+").fullmatch

# The moments that the checks accept: a day less than Python at both ends, so that every time zone can show them.
_EARLIEST = datetime(1, 1, 2, tzinfo=UTC)
_LATEST = datetime(9999, 12, 31, tzinfo=UTC)
_LONGEST_QUOTE = 80


def whole(
    field: str,
    value: object,
    low: int = 0,
    high: int = LARGEST,
    *,
    remedy: str | None = None,
    error: Refusal = ConfigurationError,
) -> int:
    """Return a whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bounds = f"from {low:,} to {high:,}" if high < LARGEST else f"of {low:,} or more"
        raise error(field, f"is {quoted(value)}", remedy or f"give a whole number {bounds}")
    return value


def number(field: str, value: object, low: float, high: float, *, error: Refusal = ConfigurationError) -> float:
    """Return a finite number within bounds."""
    # NaN is within no bounds: every comparison with it is false.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise error(field, f"is {quoted(value)}", f"give a number from {low:,.12g} to {high:,.12g}")
    return float(value)


def instance(field: str, value: object, kind: type[T], remedy: str, *, error: Refusal = ConfigurationError) -> T:
    """Return a value that is an instance of a class; refuse any other."""
    if not isinstance(value, kind):
        raise error(field, f"is {type(value).__name__}, not {kind.__name__}", remedy)
    return value


def function(field: str, value: object, remedy: str) -> None:
    """Refuse a value that cannot be called."""
    if not callable(value):
        raise ConfigurationError(field, f"is {type(value).__name__}, not a function", remedy)


def functions(field: str, values: object) -> tuple[Callable[..., None], ...]:
    """Return functions of one argument; refuse anything else, and a function that is not in a list."""
    if not isinstance(values, Iterable):
        raise ConfigurationError(field, f"is {type(values).__name__}, not a list", "pass a list of functions")
    found = tuple(values)
    for value in found:
        function(field, value, "pass a list of functions")
        shown = getattr(value, "__qualname__", type(value).__qualname__)
        if is_async(value):
            raise ConfigurationError(field, f"has {shown}, which is async def", "use def: it is called in a thread")
        if not takes(value, 1):
            raise ConfigurationError(field, f"has {shown}, which does not take one argument", "let it take the fact")
    return found


def is_async(call: Callable[..., object]) -> bool:
    """Return whether a function, or an object that can be called, has to be awaited."""
    return any(inspect.iscoroutinefunction(each) for each in (call, getattr(call, "__call__", None)))  # noqa: B004


def takes(call: Callable[..., object], count: int) -> bool:
    """Return whether a function can be called with as many arguments."""
    try:
        inspect.signature(call).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # some functions that are written in C do not say what they take
        return True
    return True


def one_of(field: str, value: object, choices: Iterable[str], *, error: Refusal = ConfigurationError) -> None:
    """Refuse a value that is none of the choices."""
    known = tuple(choices)
    if value not in known:
        raise error(field, f"is {quoted(value)}, which is unknown", f"use one of {', '.join(known)}")


def moment(field: str, value: object, *, error: Refusal = ConfigurationError) -> datetime:
    """Return a datetime that has a time zone and that every calendar can show."""
    if not isinstance(value, datetime):
        raise error(field, f"is {type(value).__name__}, not datetime", "pass an aware datetime")
    if value.utcoffset() is None:
        raise error(field, "has no time zone", "pass an aware datetime, like datetime.now(UTC)")
    if not _EARLIEST <= value < _LATEST:
        raise error(field, "is outside the years 1 to 9999", "pass a moment that a calendar can show")
    return value


def text(field: str, value: object, longest: int = LONGEST_TEXT, *, error: Refusal = ConfigurationError) -> str:
    """Return text that Postgres can store: at least one character, and no control characters."""
    if not isinstance(value, str):
        raise error(field, f"is {type(value).__name__}, not str", "pass text")
    if not value:
        raise error(field, "is empty", "pass text of at least one character")
    if len(value) > longest:
        raise error(field, f"has {len(value)} characters, {longest} are allowed", "shorten or hash it")
    if not storable(value):
        remedy = "remove control characters, NUL and lone surrogates"
        raise error(field, "contains a character that cannot be stored", remedy)
    # An enum member is a str too, but drivers would write its name instead of its value.
    return str.__str__(value)


def line(field: str, value: object, longest: int = 200, *, error: Refusal = ConfigurationError) -> str:
    """Return text of one line, of at most `longest` bytes, that a terminal can show and a log can hold."""
    if not isinstance(value, str | None):
        raise error(field, f"is {type(value).__name__}, not str", "pass text")
    if value is None or not value.strip():
        raise error(field, "is empty", "write text for people who read it later")
    if len(value.encode(errors="replace")) > longest:
        raise error(field, f"has more than {longest} bytes", "shorten it")
    if UNPRINTABLE.search(value):
        raise error(field, "has control characters", "write plain text on one line")
    return value


def quoted(value: object) -> str:
    """Return a value as an error may quote it: ASCII, and short."""
    try:
        shown = ascii(value)
    except Exception:  # an object whose repr fails, or an int with too many digits
        shown = f"a value of type {type(value).__name__}"
    return shown if len(shown) <= _LONGEST_QUOTE else f"{shown[:_LONGEST_QUOTE]}…"
