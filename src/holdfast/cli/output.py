"""How commands print: tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

# What moves a cursor, starts a line, turns the direction of writing so that a line reads as another one, or has no
# width, so that two names look the same.
CONTROL: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)


def console() -> Console:
    """Standard output. What is piped is not broken into the lines of a terminal."""
    return Console(width=None if sys.stdout.isatty() else 400, highlight=False)


def progress_bar(*, quiet: bool = False) -> Progress:
    """A progress bar on a terminal's standard error, and nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def print_json(value: object, *, indent: int | None = 2) -> None:
    text = json.dumps(value, indent=indent, default=_plain, ensure_ascii=False)
    # The only one that JSON has outside of strings is the line break of the indentation.
    print(CONTROL.sub(lambda match: match[0] if match[0] == "\n" else json.dumps(match[0])[1:-1], text), flush=True)


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(type(value).__name__)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    console().print(table(headers, rows))


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table that takes no cell for markup."""
    made = Table(*headers, box=None, header_style="dim", pad_edge=False)
    for row in rows:
        made.add_row(*(Text(shown(cell), overflow="fold") for cell in row))
    return made


def print_line(text: str, style: str = "") -> None:
    console().print(Text(clean(text)), style=style, soft_wrap=True)


def shown(value: object) -> str:
    """A cell: what a producer or an error says must not move the cursor or start a line of its own."""
    match value:
        case None:
            return "-"
        case datetime():
            return f"{value:%Y-%m-%d %H:%M:%S}"
        case list():
            return ", ".join(map(shown, value)) or "-"
        case dict():
            return ", ".join(f"{name}={shown(each)}" for name, each in value.items()) or "-"
        case _:
            return clean(str(value))


def clean(text: str) -> str:
    return CONTROL.sub(lambda match: " " if match[0] in "\n\t" else ascii(match[0])[1:-1], text)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number of things: 1 group, 1,200 groups."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def events(count: int) -> str:
    """Return a number of events: 1 event, 1,200 events."""
    return counted(count, "event")


def first_line(text: str | None, longest: int = 100) -> str:
    """What fits into a table of an error."""
    line = (text or "-").partition("\n")[0]
    return line if len(line) <= longest else f"{line[:longest]}…"


def as_data(value: Any) -> dict[str, Any]:
    """A dataclass as what `print_json` can print, to be added to."""
    return {field: getattr(value, field) for field in value.__dataclass_fields__}
