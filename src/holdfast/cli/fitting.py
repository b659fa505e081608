"""What is shown on a screen that is redrawn: as much of each section as fits, and how much of it is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style

Row: TypeAlias = list[list[Segment]]  # its lines


@dataclass(frozen=True)
class Section:
    """Rows of one kind. Each row begins at the left, and its further lines are indented."""

    what: RenderableType
    noun: str = ""  # of its rows, in the plural; empty: they are never left out
    count: int = 0  # of its rows; what there is besides are headers, and they stay


class Fitted:
    """Sections, the most important first: all of them, or as much as fits `on_screen`.

    Where they do not fit, each has its first row, as far as there is room, and the first sections have more.
    """

    def __init__(self, sections: Sequence[Section], *, on_screen: bool = False) -> None:
        self.sections, self._on_screen = list(sections), on_screen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._on_screen:
            yield from (section.what for section in self.sections)
            return
        plain = options.reset_height()
        rows = [_rows(console.render_lines(section.what, plain, pad=False)) for section in self.sections]
        for number, line in enumerate(self._lines(rows, console.height)):
            if number:
                yield Segment.line()
            yield from line

    def _lines(self, rows: list[list[Row]], height: int) -> list[list[Segment]]:
        sizes = [sum(map(len, each)) for each in rows]
        if sum(sizes) <= height:
            return [line for section in rows for row in section for line in row]
        given = _shared_out([self._least(*each) for each in zip(self.sections, rows, strict=True)], sizes, height)
        shown: list[list[Segment]] = []
        nowhere: list[str] = []
        for section, own, size, room in zip(self.sections, rows, sizes, given, strict=True):
            if room >= size:
                shown += [line for row in own for line in row]
            elif room:
                shown += _cut(section, own, room)
            elif section.noun:
                nowhere.append(f"{section.count} {section.noun}")
        if nowhere:
            shown = [*shown[: height - 1], _note(f"… {', '.join(nowhere)} hidden")]
        return shown[:height]

    def _least(self, section: Section, rows: list[Row]) -> int:
        """How many lines a section needs to be of use: its first row, and that there are more."""
        size = sum(map(len, rows))
        return size if not section.noun else min(size, sum(map(len, rows[: len(rows) - section.count + 1])) + 1)


def _rows(lines: list[list[Segment]]) -> list[Row]:
    found: list[Row] = []
    for line in lines:
        text = "".join(segment.text for segment in line)
        if found and text.startswith(" "):
            found[-1].append(line)
        elif text.strip():
            found.append([line])
    return found


def _shared_out(least: list[int], sizes: list[int], height: int) -> list[int]:
    given = [0] * len(sizes)
    left = height if sum(least) <= height else height - 1  # a line that names what has none
    for index, lines in enumerate(least):
        if lines <= left:
            given[index] = lines
            left -= lines
    for index, size in enumerate(sizes):
        if given[index]:
            more = min(left, size - given[index])
            given[index] += more
            left -= more
    return given


def _cut(section: Section, rows: list[Row], room: int) -> list[list[Segment]]:
    shown: list[list[Segment]] = []
    hidden = len(rows)
    for row in rows:
        if len(shown) + len(row) > room - 1:
            break
        shown += row
        hidden -= 1
    return [*shown, _note(f"… {hidden} more {section.noun} hidden")]


def _note(text: str) -> list[Segment]:
    return [Segment(text, Style(dim=True))]
