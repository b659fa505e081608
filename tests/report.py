"""The table at the end of a run: which servers, libraries and folders were tested, what it cost, and what was not.

budget    what the tests of a folder may take, one after the other: who adds seconds takes seconds away
seconds   what they took
fixtures  how many of them were for what the tests need and leave
CPU       seconds of the test process, of the processes that it has waited for, and of the session's Postgres
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.servers import SUPPORTED_MAJORS, USED, cpu_of_servers, servers_by_major, used

LIBRARIES = ("asyncpg", "psycopg", "sqlalchemy", "pydantic", "uvloop")
# Seconds of the tests of a folder, beside those of other processes. All of them are twelve minutes of six processes;
# with the checks before them, and what begins and ends them, that would be a run of thirteen minutes on two cores.
BUDGET = {
    "tests/adoption": 115,
    "tests/brokers": 795,
    "tests/chaos": 110,
    "tests/console": 205,
    "tests/contract": 85,
    "tests/docs": 195,
    "tests/embedded": 45,
    "tests/handling": 350,
    "tests/http": 200,
    "tests/migrations": 65,
    "tests/model": 10,
    "tests/model/protocols": 45,
    "tests/observability": 295,
    "tests/operator": 610,
    "tests/plans": 55,
    "tests/postgres": 210,
    "tests/publish": 10,
    "tests/reactions": 55,
    "tests/testing": 100,
    "tests/trust": 195,
    "tests/typing": 10,
    "tests/unit": 60,
    "tests/worker": 565,
}
_MAJOR = re.compile(r"[\[-]pg(\d+)[\]-]")  # as conftest names it


class Report:
    """Registered by conftest; pytest calls its hooks."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._runs: Counter[int] = Counter()
        self._folders: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._nightly: dict[str, str] = {}
        self._not_run: list[tuple[str, str]] = []
        self._cpu = _cpu()
        sys.addaudithook(_count_processes)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.cpu = 0.0
        if report.when == "teardown":
            before, self._cpu = self._cpu, _cpu()
            report.cpu = self._cpu - before
        return report

    def pytest_sessionfinish(self) -> None:
        # One of several processes: the first one prints the table for all of them.
        if (output := getattr(self._config, "workeroutput", None)) is not None:
            output["used"] = dict(USED)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        USED.update(getattr(node, "workeroutput", {}).get("used", {}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = str(Path(report.nodeid.split("::")[0]).parent)
        self._seconds[folder]["seconds"] += report.duration
        self._seconds[folder]["fixtures"] += report.duration if report.when != "call" else 0
        self._seconds[folder]["CPU"] += report.cpu
        self._nightly.update((report.nodeid, str(kind)) for name, kind in report.user_properties if name == "nightly")
        if report.when == "call" and report.outcome != "skipped":
            self._folders[folder][report.outcome] += 1
            if major := _MAJOR.search(report.nodeid):
                self._runs[int(major[1])] += 1
        elif report.outcome == "skipped":
            expected = hasattr(report, "wasxfail")
            self._folders[folder]["xfailed" if expected else "skipped"] += 1
            reason = report.wasxfail if expected else _reason(report)
            self._not_run.append((report.nodeid, reason))
        elif report.outcome == "failed":
            self._folders[folder]["error"] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._folders:
            return
        write = terminalreporter.write_line
        terminalreporter.section("what really ran")
        if self._runs:
            for line in self._server_lines():
                write(line)
        write("  ".join(f"{name} {_version(name)}" for name in LIBRARIES))
        columns = ["passed", "failed", "error", "skipped", "xfailed"]
        write("")
        costs = ["budget", "seconds", "fixtures", "CPU"]
        write(f"{'folder':<28}" + "".join(f"{c:>9}" for c in [*columns, *costs]))
        for folder in self._folders:
            self._seconds[folder]["budget"] = BUDGET.get(folder, 0)
        for folder in sorted(self._folders):
            write(_row(folder, [self._folders[folder][c] for c in columns] + [self._seconds[folder][c] for c in costs]))
        sums = [sum(each[c] for each in self._folders.values()) for c in columns]
        write(_row("", sums + [sum(each[c] for each in self._seconds.values()) for c in costs]))
        over = [folder for folder in sorted(self._folders) if self._seconds[folder]["seconds"] > BUDGET.get(folder, 0)]
        if over:
            write(f"over the budget: {', '.join(over)}")
        if self._nightly:
            write("")
            day = self._config.option.nightly_of
            write(f"of the nightly tier (one of each kind with --nightly-of {day}):")
            for nodeid, kind in sorted(self._nightly.items(), key=lambda each: each[::-1]):
                write(f"  {kind}: {nodeid}")
        if self._not_run:
            write("")
            write("could not run:")
            for nodeid, reason in self._not_run:
                write(f"  {nodeid}: {reason}")

    def _server_lines(self) -> list[str]:
        found = servers_by_major()
        lines = []
        for major in sorted({*SUPPORTED_MAJORS, *self._runs}, reverse=True):
            if major not in found:
                what = f"not on this machine (apt-get install postgresql-{major} adds it)"
            else:
                what = f"{found[major].version:<8} {found[major].origin:<24} {self._runs[major]} tests"
            lines.append(f"Postgres {major:<6} {what}")
        return lines + [f"{what:<48} {count:,} times" for what, count in sorted(USED.items())]


def _row(folder: str, values: Sequence[float]) -> str:
    return f"{folder:<28}" + "".join(f"{value:>9,.0f}" for value in values)


def _cpu() -> float:
    return sum(os.times()[:4]) + cpu_of_servers()


def _count_processes(event: str, _: object) -> None:
    if event == "subprocess.Popen":
        used("process started")


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr or "no reason given")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "missing"
