"""Numbers, times and texts as the pages write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from markupsafe import Markup

from holdfast.characters import CONTROL

MOST_SHOWN: Final = 100_000
_LINES: Final = "\n\t"


def visible(text: str) -> str:
    """Return a text in which nothing hides or turns the direction of writing; lines and tabs stay.

    >>> visible("a\\u202eb")
    'a\\u27e8U+202E\\u27e9b'
    """
    return CONTROL.sub(lambda found: found[0] if found[0] in _LINES else f"⟨U+{ord(found[0]):04X}⟩", text)


def finalize(value: object) -> object:
    """Return what a template writes for a value: nothing for None, and texts without hidden characters.

    Jinja calls it for every expression, so that no page has to think of it.
    """
    if value is None:
        return ""
    return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)


def count(value: int, most: int = MOST_SHOWN, more: bool = False) -> str:
    """Return a number in full; one that ends at a limit with a plus.

    >>> count(1_284), count(100_000), count(10_000, 10_000), count(7, more=True)
    ('1,284', '100k+', '10k+', '7+')
    """
    if value >= most:
        return f"{most // 1000}k+" if most >= 1000 and not most % 1000 else f"{most}+"
    return f"{value:,}{'+' if more else ''}"


def plural(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def duration(seconds: float | timedelta | None) -> str:
    """Return a duration in its two largest units.

    >>> [duration(each) for each in (0.0042, 0.8, 3.21, 47, 130, 8_100, 200_000)]
    ['4 ms', '800 ms', '3.2 s', '47 s', '2 min', '2 h 15 min', '2 d 8 h']
    """
    if seconds is None:
        return "–"
    value = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
    value = max(0.0, value)
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 10:
        return f"{value:.1f} s"
    if value < 100:
        return f"{value:.0f} s"
    minutes = int(value // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days:,} d {hours} h" if hours and days < 10 else f"{days:,} d"


def ago(moment: datetime | None, now: datetime) -> str:
    """Return how long ago, or in how long.

    >>> now = datetime(2026, 1, 1, tzinfo=UTC)
    >>> ago(now - timedelta(minutes=4), now), ago(now + timedelta(hours=3), now)
    ('4 min ago', 'in 3 h')
    """
    if moment is None:
        return "never"
    seconds = (now - moment).total_seconds()
    if abs(seconds) < 1:
        return "now"
    shown = _largest(int(abs(seconds)))
    return f"{shown} ago" if seconds > 0 else f"in {shown}"


def _largest(seconds: int) -> str:
    """Return a duration in its largest unit."""
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3_600:
        return f"{seconds // 60} min"
    return f"{seconds // 3_600} h" if seconds < 48 * 3_600 else f"{seconds // 86_400:,} d"


def zone(name: str) -> tzinfo:
    """Return a time zone by its name; of one that is unknown, UTC."""
    if not name or name == "UTC" or len(name) > 60:
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return UTC


def moment(value: datetime | None, zone: tzinfo, form: str = "full") -> str:
    """Return a moment in a zone: `full` with date and zone, `clock`, `minute` or `day`."""
    if value is None:
        return "–"
    local = value.astimezone(zone)
    match form:
        case "clock":
            return local.strftime("%H:%M:%S")
        case "minute":
            return local.strftime("%H:%M")
        case "day":
            return f"{local.day} {local.strftime('%b')}"
    name = local.tzname() or ""
    return f"{local.strftime('%Y-%m-%d %H:%M:%S')} {name}"


def short_id(value: object) -> str:
    """Return the two ends of an id.

    >>> short_id("019a8d31-52ab-7c1e-9d54-0d6a2f1f9a11")
    '019a8d31…9a11'
    """
    text = str(value)
    return text if len(text) <= 16 else f"{text[:8]}…{text[-4:]}"


def first_line(text: str | None, longest: int = 200) -> str:
    """Return the first line of a text, shortened."""
    line = (text or "").partition("\n")[0]
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def ended(line: str) -> str:
    """Return a line with a full stop, unless it ends with a mark of its own.

    >>> ended("KeyError: 'nope'"), ended("Order does not exist."), ended("cut off…")
    ("KeyError: 'nope'.", 'Order does not exist.', 'cut off…')
    """
    return line if line.endswith((".", "!", "?", "…")) else f"{line}."


def code(text: str) -> str:
    """Return a line of somebody's text for Markdown, where nothing in it is a link, an image or a mention.

    >>> code("see [this](https://evil.example)"), code("a ` b")
    ('`see [this](https://evil.example)`', '`` a ` b ``')
    """
    line = visible(" ".join(text.split()))
    ticks = "`" * (_longest_run(line) + 1)
    return f"{ticks} {line} {ticks}" if "`" in line else f"`{line}`" if line else ""


def code_block(text: str) -> str:
    """Return somebody's lines for Markdown, likewise."""
    shown = visible(text)
    fence = "`" * max(3, _longest_run(shown) + 1)
    return f"{fence}text\n{shown}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def percent(share: float) -> str:
    """Return a share; one that is not none is never shown as none.

    >>> percent(0), percent(0.0004), percent(0.021), percent(1)
    ('0 %', '< 0.1 %', '2.1 %', '100 %')
    """
    value = share * 100
    if 0 < value < 0.1:
        return "< 0.1 %"
    return f"{value:.0f} %" if value >= 10 or value == int(value) else f"{value:.1f} %"
