"""The types of the library as applications see them, by mypy and by pyright.

`user_*.py` is code of applications. A type checker must report the lines that end with the comment `mistake`, and no
others: `assert_type` says what a call returns, and a mistake that is not reported fails too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("user_*.py"))
# mypy has `Any` for a library without stubs; pyright reads the library's source.
PYRIGHT_ONLY = "user_without_stubs.py"
Reports = dict[tuple[str, int], str]

pytestmark = pytest.mark.timeout(600)


def expected() -> set[tuple[str, int]]:
    return {
        (path.name, number)
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if "# mistake" in line
    }


def checked(*command: str) -> str:
    """What a type checker prints; it exits with 0 or, when it has found mistakes, with 1."""
    environment = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", "NO_COLOR": "1"}
    run = subprocess.run([sys.executable, "-m", *command], cwd=HERE, env=environment, capture_output=True, text=True)
    if run.returncode not in (0, 1) or not run.stdout.strip():
        pytest.fail(f"{command[0]} cannot run, so the types are not checked:\n{run.stdout}{run.stderr}", pytrace=False)
    return run.stdout


def mypy(tmp_path: Path) -> Reports:
    names = [path.name for path in FILES if path.name != PYRIGHT_ONLY]
    printed = checked("mypy", "--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "mypy"), *names)
    found = re.findall(r"^(user_\w+\.py):(\d+): error: (.*)$", printed, re.MULTILINE)
    return {(name, int(line)): text for name, line, text in found}


def pyright(_: Path) -> Reports:
    printed = checked("pyright", "--pythonpath", sys.executable, "--outputjson")
    answer = json.loads(printed)
    assert answer["summary"]["filesAnalyzed"] == len(FILES)
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in answer["generalDiagnostics"]
        if each["severity"] == "error"
    }


@pytest.mark.slow
@pytest.mark.parametrize("check", [mypy, pyright])
def test_mistakes_are_reported_and_nothing_else(check: Callable[[Path], Reports], tmp_path: Path) -> None:
    """Every driver's calls have the right type; typos and a forgotten `await` are errors (PUB-1)."""
    found = check(tmp_path)
    wrongly = {place: text for place, text in found.items() if place not in expected()}
    assert wrongly == {}
    assert sorted(expected() - set(found)) == []
    assert len(found) > 20
