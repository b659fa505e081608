"""The README: short, and its program does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.support import ROOT, blocks, read

PROGRAM = blocks("python", pages=[ROOT / "README.md"])[0]


def test_it_is_short() -> None:
    lines = read("README.md").splitlines()
    assert len(lines) <= 120
    assert all(len(line) <= 120 for line in lines)


def test_the_two_commands_stand_at_the_top() -> None:
    """RUN-1, RUN-2: what to type first is seen first."""
    top = "\n".join(read("README.md").splitlines()[:20])
    assert "./dev demo" in top
    assert "./dev test" in top


@pytest.mark.timeout(120)
def test_the_program_publishes_and_handles_one_event(tmp_path: Path) -> None:
    """RUN-1: as it stands, in a directory of its own."""
    assert len([line for line in PROGRAM.text.splitlines() if line.strip()]) <= 15
    (tmp_path / "program.py").write_text(PROGRAM.text)
    run = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stdout.splitlines() if "charging" in line] == ["charging order 17"]
