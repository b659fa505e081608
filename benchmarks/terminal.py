"""What a person sees while the benchmarks run, and after each: on standard error, which leaves the other for JSON."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from benchmarks.benchmark import Arm, Benchmark
from benchmarks.runner import Progress

console = Console(stderr=True)
# Of many arms no more than four of these are shown; all figures are in the JSON.
BRIEF = ("per_second", "p50_ms", "p99_ms", "python_us", "postgres_us", "wal_bytes")
MOST_COLUMNS = 5
# Seconds between two lines about a benchmark that takes long.
TELL_EVERY = 10.0


class Shown(Progress):
    """A bar with the arm that runs, and with what is prepared for it."""

    def __init__(self, bar: Bar, name: str, runs: int) -> None:
        self._bar, self._name = bar, name
        self._task = bar.add_task(name, total=runs)
        self._begun = -1
        self._label = ""

    def begin(self, arm: Arm) -> None:
        self._begun += 1
        self._label = arm.label
        self.note("")

    def note(self, text: str) -> None:
        doing = f"{self._name}: {self._label}" + (f", {text}" if text else "")
        self._bar.update(self._task, description=doing, completed=self._begun)


class Told(Progress):
    """The same in lines, where none can be rewritten: one every now and then."""

    def __init__(self, name: str, runs: int) -> None:
        self._name, self._runs = name, runs
        self._begun, self._label = -1, ""
        self._since = self._told_at = time.monotonic()

    def begin(self, arm: Arm) -> None:
        self._begun += 1
        self._label = arm.label
        self.note("")

    def note(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told_at >= TELL_EVERY:
            self._told_at = now
            doing = f"{self._label}, {text}" if text else self._label
            done = f"{self._begun} of {self._runs} runs in {now - self._since:.0f} s"
            console.print(f"{self._name}: {done}; {doing}", soft_wrap=True)


@contextmanager
def progress(benchmark: Benchmark, runs: int) -> Iterator[Progress]:
    if not console.is_terminal:
        yield Told(benchmark.name, runs)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        yield Shown(bar, benchmark.name, runs)


def show(benchmark: Benchmark, summary: dict[str, Any]) -> None:
    arms: dict[str, dict[str, float]] = summary["arms"]
    title = f"{benchmark.name}: {benchmark.question}"
    figures = list(dict.fromkeys(figure for values in arms.values() for figure in values))
    table = Table(title=title, title_justify="left")
    table.add_column("")
    if len(arms) <= MOST_COLUMNS:
        for label in arms:
            table.add_column(label, justify="right")
        for figure in figures:
            table.add_row(figure, *(number(values.get(figure)) for values in arms.values()))
    else:
        shown = [figure for figure in BRIEF if figure in figures][:4]
        for figure in shown:
            table.add_column(figure, justify="right")
        for label, values in arms.items():
            table.add_row(label, *(number(values.get(figure)) for figure in shown))
    console.print(table)
    line = Text()
    for name, value in told(summary):
        figure = Text.from_markup(f"{name} [bold]{value:g}[/bold]{verdict(benchmark, name, value)}  ")
        if line and line.cell_len + figure.cell_len > console.width + 2:
            console.print(line)
            line = Text()
        line += figure
    console.print(line)


def told(summary: dict[str, Any]) -> Sequence[tuple[str, float]]:
    """Ratios and waits: what the benchmark is about."""
    return [
        (name, value)
        for name, value in summary.items()
        if isinstance(value, int | float)
        and ("_to_" in name or name.endswith("_ms") or name.startswith(("rss", "ms_")))
    ]


def verdict(benchmark: Benchmark, figure: str, value: float) -> str:
    limit = benchmark.limits.get(figure)
    if limit is None:
        return ""
    return f" [green]({limit})[/green]" if limit.holds(value) else f" [red]({limit})[/red]"


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:g}"
