"""The locks of the repository, and the commands that install from them (RUN-2)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = {
    str(file.relative_to(ROOT)): file
    for file in (ROOT / "requirements.lock", *sorted(ROOT.glob("benchmarks/**/requirements.txt")))
}
PROGRAMS = (ROOT / "dev", *(file for file in ROOT.glob("[!.]*/**/*.py") if file.name != Path(__file__).name))


@pytest.mark.parametrize("lock", LOCKS)
def test_every_requirement_is_pinned_with_hashes(lock: str) -> None:
    """Nothing is installed that was not checked before (RUN-2)."""
    lines = LOCKS[lock].read_text().splitlines()
    blocks = re.split(r"\n(?=[A-Za-z0-9])", "\n".join(line for line in lines if not line.startswith("#")))
    assert len(blocks) > 2
    for block in blocks:
        assert re.match(r"\s*[A-Za-z0-9._-]+==\S+", block), block[:80]
        assert "--hash=sha256:" in block, block[:80]


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_index_and_no_path(lock: str) -> None:
    """A lock installs from whatever index the machine uses (RUN-2)."""
    pins = "\n".join(line for line in LOCKS[lock].read_text().splitlines() if not line.startswith("#"))
    assert not re.search(r"://|--index|--find-links|--extra|(?<![\w.])/\w", pins)


def unsafe_installs(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each command that installs from a file of pins, and may install anything else."""
    for node in ast.walk(ast.parse(source)):
        parts = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        words = {part.value for part in parts if isinstance(part, ast.Constant)}
        if (
            words & {"install", "sync"}
            and words & {"-r", "--requirement"}
            and not {"--no-deps", "--require-hashes"} <= words
        ):
            yield node.lineno, ast.unparse(node)


def test_nothing_is_resolved_where_a_lock_is_installed() -> None:
    """What was published since a lock was made is not looked at, and what has another hash is refused (RUN-2)."""
    programs = {file: file.read_text() for file in PROGRAMS}
    installing = {file: text for file, text in programs.items() if '"-r"' in text}
    assert {"dev", "environments.py"} <= {file.name for file in installing}
    found = [f"{file}:{line}: {text}" for file, each in installing.items() for line, text in unsafe_installs(each)]
    assert found == []


@pytest.mark.parametrize(
    "command",
    [
        'run([*pip, "install", "--require-hashes", "-r", str(lock)])',
        'run("uv", "pip", "sync", "--no-deps", "-r", lock)',
        'command = (python, "-m", "pip", "install", "-r", "requirements.txt")',
    ],
)
def test_a_command_that_resolves_is_found(command: str) -> None:
    """Otherwise the search would prove nothing (RUN-2)."""
    assert [line for line, _ in unsafe_installs(command)] == [1]
