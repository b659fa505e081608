"""The options with which ./dev test runs what has failed beside other tests once more, alone.

--failed-to FILE  write the ids of the tests that failed, one in a line
--only-from FILE  run only the tests with these ids
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failed-to", type=Path, metavar="FILE", help="write the ids of the tests that failed")
    parser.addoption("--only-from", type=Path, metavar="FILE", help="run only the tests whose ids stand in the file")


def pytest_configure(config: pytest.Config) -> None:
    file: Path | None = config.getoption("--failed-to")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailedTests(file), "holdfast-failed-tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file: Path | None = config.getoption("--only-from")
    if file is None:
        return
    wanted = set(file.read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]


class FailedTests:
    """Writes the tests with a failed phase to the file, in the order of their failures."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "failed":
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        self._file.write_text("".join(f"{nodeid}\n" for nodeid in self._failed))
