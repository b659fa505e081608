"""How commands print: tables for people, one JSON document for programs.

What is wider than the terminal is broken at words, and a table becomes one record below the other: an id or a group's
name stays whole, so that it can be copied.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from holdfast.characters import CONTROL
from holdfast.cli.next_commands import as_typed, program

_MEMBER: Final = "  - "  # before each member of a group of errors
_UNLIMITED: Final = 10_000


def console() -> Console:
    """Standard output. What is piped is not broken into the lines of a terminal."""
    return Console(width=None if sys.stdout.isatty() else _UNLIMITED, highlight=False)


def error_width() -> int:
    """The width of standard error. What is redirected is not broken into lines."""
    return Console(stderr=True).width if sys.stderr.isatty() else _UNLIMITED


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Progress]:
    """A progress bar on a terminal's standard error, and nothing elsewhere.

    The caller starts it with the first progress: what is refused before has no bar.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),  # the bar is what gives way
        TimeElapsedColumn(),
    )
    hidden = quiet or not console.is_terminal
    progress = Progress(*columns, console=console, transient=True, expand=True, disable=hidden)
    try:
        yield progress
    finally:
        if progress.live.is_started:
            progress.stop()


def print_json(value: object, *, indent: int | None = 2) -> None:
    from holdfast.operator.encoding import plain  # which brings all that verbs return

    text = json.dumps(plain(value), indent=indent, ensure_ascii=False)
    # The only one that JSON has outside of strings is the line break of the indentation.
    print(CONTROL.sub(lambda match: match[0] if match[0] == "\n" else json.dumps(match[0])[1:-1], text), flush=True)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    console().print(Listing(headers, rows), crop=False)


class Listing:
    """Rows under headers: a table where it fits, and one record below the other where it does not.

    The first column is what a row is called. No cell is taken for markup.
    """

    def __init__(self, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self._headers = headers
        self._rows = [tuple(map(shown, row)) for row in rows]

    def width(self, console: Console, options: ConsoleOptions) -> int:
        """How wide a table of the rows is."""
        return Measurement.get(console, options.update(max_width=_UNLIMITED), self._table()).maximum

    def _table(self) -> Table:
        table = Table(*self._headers, box=None, header_style="dim", pad_edge=False)
        for row in self._rows:
            table.add_row(*map(Text, row))
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._rows:
            yield Text("none", style="dim")
            return
        if self.width(console, options) <= options.max_width:
            yield self._table()
            return
        for name, *cells in self._rows:
            yield Text(name, style="bold", no_wrap=True, overflow="ignore")
            for line in _packed(zip(self._headers[1:], cells, strict=True), options.max_width):
                yield Text(line, no_wrap=True, overflow="ignore")


class Line:
    """A line, broken at words where the screen is too narrow for it; a command at its end stays whole."""

    def __init__(self, text: str, style: str = "") -> None:
        self._text, self._style = clean(text), style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in wrapped(self._text, options.max_width):
            yield Text(line, style=self._style, no_wrap=True, overflow="ignore")


class Pairs:
    """Names with their values in one line, or in as many as the screen needs: no pair is broken."""

    def __init__(self, pairs: Mapping[str, object]) -> None:
        self._pairs = {name: shown(value) for name, value in pairs.items()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text(no_wrap=True, overflow="ignore")
        for name, value in self._pairs.items():
            if line and len(line) + 3 + len(name) + len(value) > options.max_width:
                yield line
                line = Text("  ", no_wrap=True, overflow="ignore")
            elif line:
                line.append("  ")
            line.append(f"{name} ", style="dim").append(value, style="bold")
        yield line


def _packed(fields: Iterable[tuple[str, str]], width: int) -> Iterable[str]:
    """Lines of fields, as many in each as fit; what is longer than a line has lines of its own."""
    line = ""
    for header, value in fields:
        if value in ("-", ""):
            continue
        field = f"{header} {value}"
        if line and len(line) + 2 + len(field) <= width:
            line = f"{line}  {field}"
            continue
        if line:
            yield line
        *full, line = wrapped(f"  {field}", width)
        yield from full
    if line:
        yield line


def wrapped(text: str, width: int, hanging: int = 2) -> list[str]:
    """Break a line at words. A command at its end gets a line of its own, and nothing without spaces is broken.

    `hanging`: how many columns the lines after the first are indented more than it.
    """
    if len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()) + hanging)
    # A command or statement at the end of a sentence is copied as a whole.
    command = re.search(rf"(?<=: )(?:{re.escape(program())} |SELECT |GRANT |ALTER )[^:]*$", text)
    prose = text if command is None else text[: command.start()]
    lines = textwrap.wrap(prose, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines if command is None else [*lines, indent + command[0]]


def print_line(text: str, style: str = "") -> None:
    """A line, broken at words where the terminal is too narrow for it."""
    to = console()
    for line in wrapped(clean(text), to.width):
        to.print(Text(line), style=style, soft_wrap=True)


def print_hint(text: str, style: str = "yellow") -> None:
    """A line whose command can be typed as it is printed: it acts where this command acts."""
    print_line(as_typed(text), style)


def print_facts(rows: Iterable[tuple[str, object]]) -> None:
    """Names with their values, each on a line of its own. What is unknown is left out."""
    for name, value in rows:
        if value not in (None, {}, []):
            print_line(f"  {name:<15} {shown(value)}")


def print_left_out(found: Sequence[object], limit: int = 0, *, as_json: bool = False) -> None:
    """Say that a list is not whole: how many are left out, or that it ends at its limit; beside JSON on stderr."""
    left_out = getattr(found, "left_out", None)
    if left_out:
        text = f"{left_out:,} more are not listed"
    elif left_out is None and limit and len(found) >= limit:
        text = f"{limit:,} are listed; there may be more"
    else:
        return
    if as_json:
        print(text, file=sys.stderr)
    else:
        print_line(text, "dim")


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
    """What fits into a table of an error; of a group of errors also of its first member."""
    line, _, more = (text or "-").partition("\n")
    lines = [line, more.removeprefix(_MEMBER).partition("\n")[0]] if more.startswith(_MEMBER) else [line]
    return ": ".join(each if len(each) <= longest else f"{each[:longest]}…" for each in lines)
