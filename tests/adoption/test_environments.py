"""Environments are made from locks without resolving anything, so each lock has to have all that is needed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_locks import LOCKS


def renewed(lock: Path, folder: Path) -> Path:
    """Return a copy of a lock, renewed by the command that the lock names: pins that are possible stay."""
    comments = re.findall(r"^#   +(.+?)\\?$", lock.read_text(), re.MULTILINE)
    program, *arguments = shlex.split(" ".join(comments))
    assert program == "uv"
    copy = Path(shutil.copy(lock, folder))
    # Python itself is no part of a lock: what is built to learn what it requires is built by this one.
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    run = subprocess.run(
        [sys.executable, "-m", "uv", *arguments, "--quiet", "--output-file", str(copy)],
        cwd=lock.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return copy


def pins(lock: Path) -> list[str]:
    """Return the lines that pin a version, each with the Pythons and platforms that it is for."""
    return [line.rstrip(" \\") for line in lock.read_text().splitlines() if re.match(r"[A-Za-z0-9]", line)]


@pytest.mark.slow
@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_all_that_is_needed(lock: str, tmp_path: Path) -> None:
    """On every Python and platform. Nothing is installed: uv reads from the index what each pin requires (RUN-2)."""
    assert pins(renewed(LOCKS[lock], tmp_path)) == pins(LOCKS[lock])


def test_a_package_that_a_lock_lacks_is_found(tmp_path: Path) -> None:
    """Otherwise the search would prove nothing (RUN-2)."""
    whole = LOCKS["benchmarks/peers/procrastinate/requirements.txt"]
    lock = tmp_path / "lock" / whole.name
    lock.parent.mkdir()
    shutil.copy(whole.with_suffix(".in"), lock.parent)
    lock.write_text(re.sub(r"^croniter==.+?\n(?=\w)", "", whole.read_text(), flags=re.MULTILINE | re.DOTALL))
    assert len(pins(lock)) == len(pins(whole)) - 1
    assert len(pins(renewed(lock, tmp_path))) == len(pins(whole))
