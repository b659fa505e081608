"""The developer's script and the files it installs from (RUN-2)."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def dev(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(ROOT / "dev"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement)[0]).lower()


def test_help_names_every_verb() -> None:
    """RUN-2: ./dev --help lists what a checkout can do."""
    run = dev("--help")
    assert run.returncode == 0
    for verb in ("demo", "test", "check", "bench", "chaos", "docs"):
        assert re.search(rf"^  {verb} ", run.stdout, re.MULTILINE)
        assert f"./dev {verb}" in dev(verb, "--help").stdout


def test_unknown_verb() -> None:
    """RUN-2: a mistyped verb is named, with the ones that exist."""
    run = dev("tset")
    assert run.returncode == 2
    assert "'tset'" in run.stderr
    assert "test" in run.stderr


def test_every_requirement_is_pinned_with_hashes() -> None:
    """RUN-2: nothing is installed that was not checked before."""
    text = (ROOT / "requirements.lock").read_text()
    blocks = re.split(r"\n(?=[A-Za-z0-9])", "\n".join(x for x in text.splitlines() if not x.startswith("#")))
    assert len(blocks) > 30
    for block in blocks:
        assert re.match(r"\s*[A-Za-z0-9._-]+==\S+", block), block[:80]
        assert "--hash=sha256:" in block, block[:80]


def test_lock_names_no_index_and_no_path() -> None:
    """RUN-2: the lock installs from whatever index the machine uses."""
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"://|--index|--find-links|--extra|(?<![\w.])/\w", text.split("\n\n", 1)[-1])


@pytest.mark.parametrize("group", ["core", "build", "extras"])
def test_lock_covers_what_is_declared(group: str) -> None:
    """RUN-2: every declared dependency is in the lock; a forgotten renewal fails here, not at a user's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = {
        "core": project["project"]["dependencies"],
        "build": project["build-system"]["requires"],
        "extras": [r for extra in project["project"]["optional-dependencies"].values() for r in extra],
    }[group]
    text = (ROOT / "requirements.lock").read_text()
    locked = {canonical(line) for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)}
    assert {canonical(r) for r in declared} - locked - {"holdfast"} == set()
