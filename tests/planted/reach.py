"""Which tests reach which fault: the suite runs once in a copy of the tree that has a probe at every place.

A probe in Python notes the running test, which processes inherit as a variable, and the time, by which the work of a
process that serves several tests is told apart. A probe in SQL is a line in the server's log, which tells the time; the
path of the log tells the process whose tests used the server. Tests that fail with the probes, because they compare
the code itself, count for nothing: they would find any fault.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.planted import python, sql
from tests.planted.copies import Copy, Ended, TestRun
from tests.planted.faults import FUNCTIONS, PACKAGE, Fault

PROBE = PACKAGE / "planted_probe.py"
_LOG_LINE = re.compile(r"^(\S+ \S+) UTC \[\d+\] LOG:  planted (\d+)$", re.MULTILINE)


@dataclass
class Reach:
    """The tests that reach each fault, and how many seconds each test takes."""

    tests: dict[int, set[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tests": {number: sorted(tests) for number, tests in self.tests.items()}}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Reach:
        tests = {int(number): set(tests) for number, tests in found["tests"].items()}
        return cls(tests, found["seconds"], found["failed"])


def reach_of(
    faults: Sequence[Fault],
    copy: Copy,
    folder: Path,
    tests: Sequence[str],
    processes: int,
    progress: Callable[[int], None],
) -> Reach:
    """Run the tests with a probe at the place of each fault. `progress` is told how many tests have ended."""
    notes = folder / "notes"
    notes.touch()
    notes.chmod(0o666)
    by_name = plant_probes(copy, faults, notes)
    logs = _Logs(folder / "logs")
    said = time.monotonic()

    def watch(temporary: Path) -> None:
        nonlocal said
        logs.keep(temporary)
        if time.monotonic() - said > 30:
            said = time.monotonic()
            progress(sum(file.read_text().count('"end"') for file in temporary.parent.glob("*.jsonl")))

    run = copy.run(["-q", "--tb=line", "-n", str(processes), *tests], None, watch)
    found = Reach({fault.number: set() for fault in faults})
    for each in (each for ended in run.ended.values() for each in ended):
        found.seconds[each.test] = each.end - each.start
        if each.failed:
            found.failed.append(each.test)
    for number, test in (*_noted(notes, run), *logs.read(run)):
        found.tests[number].add(test)
    for number, names in by_name.items():
        found.tests[number] |= set(_mentioning(copy.root, found.seconds, names))
    for reaching in found.tests.values():
        reaching.intersection_update(found.seconds)
        reaching.difference_update(found.failed)
    if not found.seconds:
        raise RuntimeError(f"no test ran with the probes:\n{run.output[-3000:]}")
    return found


def plant_probes(copy: Copy, faults: Iterable[Fault], notes: Path) -> dict[int, set[str]]:
    """Put a probe at the place of each fault; return those for which none can be, with functions that tests name."""
    source = (Path(__file__).parent / "probe.py").read_text()
    copy.write(str(PROBE), source.replace('NOTES = ""', f"NOTES = {str(notes)!r}"))
    by_name = {}
    # From the last line to the first, so that the lines of the others stay what they are.
    for fault in sorted(faults, key=lambda fault: -fault.line):
        if fault.language == ".py":
            call = f'__import__("holdfast.{PROBE.stem}", fromlist=["reached"]).reached({fault.number})'
            copy.write(fault.path, python.with_probe(copy.read(fault.path), fault.line, call))
        elif not _probe_functions(copy, {fault.function}, fault.number):
            callers = _callers(copy.root, fault.function)
            if not _probe_functions(copy, callers, fault.number):
                by_name[fault.number] = {fault.function, *callers}
    return by_name


def _probe_functions(copy: Copy, names: set[str], number: int) -> bool:
    """Probe functions of the database; return whether any could be."""
    some = False
    for file in _files(copy.root):
        path = file.relative_to(copy.root).as_posix()
        for name in sorted(names):
            probed = sql.with_probe(copy.read(path), name, number)
            if probed is not None:
                copy.write(path, probed)
                some = True
    return some


def _callers(root: Path, function: str) -> set[str]:
    """Return the functions that call one in plain SQL, directly or by others in plain SQL."""
    plain = {function}
    found: set[str] = set()
    sources = [file.read_text() for file in _files(root)]
    languages = {each.name: each.language for source in sources for each in sql.functions_of(source)}
    while new := {name for source in sources for name in sql.called_in(source, plain)} - found:
        found |= new
        plain |= {name for name in new if languages[name] == "sql"}
    return found


def _files(root: Path) -> list[Path]:
    return sorted(file for file in (root / PACKAGE).rglob("*.sql") if file.parent.name == FUNCTIONS)


def _mentioning(root: Path, tests: Iterable[str], names: set[str]) -> Iterator[str]:
    wanted = re.compile(rf"\b(?:{'|'.join(sorted(names))})\b")
    files: dict[str, bool] = {}
    for test in tests:
        file = test.partition("::")[0]
        if file not in files:
            files[file] = bool(wanted.search((root / file).read_text()))
        if files[file]:
            yield test


# --- who has reached a place ------------------------------------------------------------------------------


def _noted(notes: Path, run: TestRun) -> Iterator[tuple[int, str]]:
    clocks = {process: _Clock(ended) for process, ended in run.ended.items()}
    seen = set()
    for line in notes.read_text().splitlines():
        with contextlib.suppress(ValueError):
            number, process, at, test = line.split("\t")
            if test and (number, test) not in seen:
                seen.add((number, test))
                yield int(number), test
            for clock in [clocks[process]] if process in clocks else clocks.values():
                if then := clock.test_at(float(at)):
                    yield int(number), then


class _Clock:
    """Which test one process ran when."""

    def __init__(self, ended: Sequence[Ended]) -> None:
        self._ended = sorted(ended, key=lambda each: each.start)
        self._starts = [each.start for each in self._ended]

    def test_at(self, at: float) -> str | None:
        position = bisect.bisect(self._starts, at) - 1
        return self._ended[position].test if position >= 0 and at <= self._ended[position].end else None


class _Logs:
    """The logs of all servers that the tests start, kept beyond them by links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir()
        self._kept: set[int] = set()

    def keep(self, temporary: Path) -> None:
        for log in temporary.glob("*/*/server.log"):
            with contextlib.suppress(OSError):
                inode = log.stat().st_ino
                if inode not in self._kept:
                    os.link(log, self._folder / f"{log.parents[1].name}-{len(self._kept)}.log")
                    self._kept.add(inode)

    def read(self, run: TestRun) -> Iterator[tuple[int, str]]:
        clocks: dict[str, _Clock] = defaultdict(lambda: _Clock([]))
        clocks |= {process: _Clock(ended) for process, ended in run.ended.items()}
        for log in sorted(self._folder.iterdir()):
            process = log.name.partition("-")[0]
            for at, number in set(_LOG_LINE.findall(log.read_text(errors="replace"))):
                when = datetime.strptime(at, "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC).timestamp()
                # The log leaves out what follows milliseconds.
                if test := clocks[process].test_at(when + 0.0005):
                    yield int(number), test
