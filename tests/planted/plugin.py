"""Records which test ran when and how it ended, for `-p tests.planted.plugin`.

Each process of a run writes to a file of its own in $PLANTED_RUN, a line at the start and one at the end of a test, and
has a directory of its own for temporary files: whose server has written a line is told by the path of its log.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

RUN = "PLANTED_RUN"
PROCESS = "PLANTED_PROCESS"


def pytest_configure(config: pytest.Config) -> None:
    run = Path(os.environ[RUN])
    name = getattr(config, "workerinput", {}).get("workerid", "main")
    own = run / "tmp" / name
    own.mkdir(exist_ok=True)
    own.chmod(0o1777)  # servers run under another account where the tests run as root
    os.environ["TMPDIR"], os.environ[PROCESS] = str(own), name
    tempfile.tempdir = None
    config.pluginmanager.register(_Recorder(run / f"{name}.jsonl"))


class _Recorder:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        started, self._failed = time.time(), ""
        self._write({"test": item.nodeid, "start": started})
        try:
            return (yield)
        finally:
            ended = {"test": item.nodeid, "start": started, "end": time.time(), "failed": self._failed}
            self._write(ended)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = self._failed or report.when or "call"

    def _write(self, line: dict[str, object]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
