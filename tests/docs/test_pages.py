"""Pages for newcomers name what is there: the folders, the shared test modules, and the words of the glossary."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.newcomer

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


def tracked() -> list[Path]:
    """The files of the repository."""
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return [Path(line) for line in run.stdout.splitlines()]


def test_the_tree_names_every_folder() -> None:
    folders = {file.parts[0] for file in tracked() if len(file.parts) > 1}
    tree = CONTRIBUTING.partition("## The tree")[2].partition("\n## ")[0]
    assert sorted(folder for folder in folders if not re.search(rf"(?m)^{re.escape(folder)}/", tree)) == []


def test_the_table_of_tests_names_every_folder_and_shared_module() -> None:
    tests = [file for file in tracked() if file.parts[0] == "tests" and len(file.parts) > 1]
    named = {f"tests/{file.parts[1]}" for file in tests if file.name not in ("__init__.py", "conftest.py")}
    assert sorted(name for name in named if f"`{name}`" not in CONTRIBUTING) == []


@pytest.mark.parametrize(
    "word",
    ["Producer", "Target", "Priority", "Correlation id", "Heartbeat", "Deployment", "Current generation", "Observer"],
)
def test_the_glossary_explains_what_pages_say(word: str) -> None:
    assert f"\n### {word}\n" in GLOSSARY


def test_only_the_command_takes_settings_from_the_environment() -> None:
    """What the overview says: beside it, a deployment's number, and the drivers' own variables.

    `manage.py holdfast` becomes the command, and hands the environment on to it.
    """
    readers = {
        str(file.relative_to(ROOT / "src" / "holdfast"))
        for file in (ROOT / "src").rglob("*.py")
        if re.search(r"os\.(environ|getenv)", file.read_text())
    }
    assert {name for name in readers if not name.startswith("cli/")} == {
        "embedded/account.py",
        "generation.py",
        "integrations/django/management/commands/holdfast.py",
        "postgres/transport.py",
        "testing/plugin.py",
    }
