"""The import contracts of pyproject.toml see every module and name what breaks them (RUN-2)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
SKIN = "holdfast.cli"


def name_of(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file.relative_to(SOURCE) for file in sorted(SOURCE.rglob("*.py"))}
PACKAGES = [name for name, file in FILES.items() if file.name == "__init__.py" and name != "holdfast"]
CONTRACTS = [name for name, file in FILES.items() if len(file.parts) == 2 and not file.name.startswith("__")]


def copied(folder: Path) -> Path:
    """A copy of the source to plant imports into."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    return shutil.copytree(SOURCE, folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.sql"))


def complaints_about(source: Path) -> str:
    command = [LINT_IMPORTS, "--no-cache"]
    environment = {"PYTHONPATH": str(source)}
    run = subprocess.run(command, cwd=source.parent, env=environment, capture_output=True, text=True, timeout=60)
    assert "Broken contracts" in run.stdout, run.stdout + run.stderr
    return run.stdout


def forbidden_in(package: str) -> str:
    """Nothing is above a skin, but it has no use for a driver."""
    return "asyncpg" if package == SKIN or package.startswith(f"{SKIN}.") else SKIN


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What ./dev check says of a copy of the source with a forbidden import in each package and each contract."""
    source = copied(tmp_path_factory.mktemp("walls"))
    for name in PACKAGES:
        (source / FILES[name]).with_name("planted.py").write_text(f"import {forbidden_in(name)}\n")
    (source / FILES[SKIN]).with_name("reading.py").write_text("import holdfast.postgres.operations.status\n")
    for name in CONTRACTS:
        with (source / FILES[name]).open("a") as file:
            file.write(f"\nimport logging\nimport {SKIN}\n")
    return complaints_about(source)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_forbidden_import_is_named_in_every_package(complaints: str, package: str) -> None:
    """An import against the direction of the layers is found wherever it is (RUN-2)."""
    assert f"{package}.planted -> {forbidden_in(package)} (l.1)" in complaints


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_forbidden_import_is_named_in_every_contract(complaints: str, contract: str) -> None:
    """Contracts import no layer above them, and no logger (RUN-2)."""
    assert f"{contract} -> {SKIN} (l." in complaints
    assert f"{contract} -> logging (l." in complaints


def test_a_skin_that_reads_rows_is_named(complaints: str) -> None:
    """The command line and other skins use the operator, who reads in postgres (RUN-2)."""
    assert f"{SKIN}.reading -> holdfast.postgres.operations.status (l.1)" in complaints


def test_a_module_without_a_layer_is_named(tmp_path: Path) -> None:
    """A new module needs a place among the layers (RUN-2)."""
    source = copied(tmp_path)
    (source / "holdfast" / "homeless.py").touch()
    assert "- holdfast.homeless" in complaints_about(source)


def test_every_module_is_analysed() -> None:
    """A package without __init__.py would be left out, and all its imports with it (RUN-2)."""
    analysed = grimp.build_graph("holdfast", cache_dir=None).modules
    assert analysed == set(FILES)


def test_source_names_no_requirement() -> None:
    """Tests name the requirements they prove. The text of a released migration stays as it is (RUN-2)."""
    requirements = re.findall(r"^- \*\*([A-Z]+-\d+)\*\*", (ROOT / "docs" / "requirements.md").read_text(), re.MULTILINE)
    assert requirements
    named = re.compile(rf"\b({'|'.join(requirements)})\b")
    released = {f"{number:04d}" for number in range(1, 6)}
    assert [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in sorted(SOURCE.rglob("*"))
        if file.suffix in (".py", ".sql") and not (file.parent.name == "migrations" and file.name[:4] in released)
        for match in named.finditer(file.read_text(encoding="utf-8"))
    ] == []


def test_exceptions_are_for_modules_that_exist() -> None:
    """Who may import a driver or a logger is a module or a package of the source (RUN-2)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in project["tool"]["importlinter"]["contracts"]:
        for exception in contract.get("ignore_imports", ()):
            assert exception.partition(" -> ")[0].removesuffix(".**") in FILES, exception
