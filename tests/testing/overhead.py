"""A pytest plugin that measures what fixtures take for each test, for examples that are a project of their own."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

_taken: defaultdict[str, dict[str, float]] = defaultdict(dict)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up setup and teardown, by process and test, in the order of running."""
    taken = _taken[getattr(report, "worker_id", "main")]
    taken[report.nodeid] = taken.get(report.nodeid, 0.0) + (report.duration if report.when != "call" else 0.0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the milliseconds of each test but the first and the last of a process, which have the session's own."""
    if not hasattr(session.config, "workerinput"):
        found = [1000 * each for taken in _taken.values() for each in list(taken.values())[1:-1]]
        Path(os.environ["HOLDFAST_OVERHEAD"]).write_text(json.dumps(found))
