"""The wheel without the source tree: with what one extra brings and nothing else, its first program runs.

The environments are those of tests/adoption/bare.py; `./dev release extras` installs for real.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from holdfast.installing import DISTRIBUTION
from release.audit import verdict
from release.extras import FIRST, run_first
from release.wheel import write_decoy, write_wheel
from tests.adoption.bare import make_environment
from tests.adoption.test_installing import PROJECT, declared
from tests.docs.support import read, sections

# What `import holdfast` brings of others, and what a publisher and a worker need besides.
NEEDED = {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}
# The variables of a pip that knows no index.
OFFLINE = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.mark.nightly("installation")
@pytest.mark.parametrize(
    "extra", [extra for extra, first in FIRST.items() if not first.beside], ids=lambda extra: extra or "none"
)
def test_the_first_program_of_an_extra_runs(extra: str, wheel: Path, dsn: str, tmp_path: Path) -> None:
    """What the extra declares is enough, for the wheel as it is installed (RUN-1)."""
    assert run_first(make_environment(tmp_path, wheel, *filter(None, [extra])), extra, dsn, tmp_path) == "ran"


def test_every_extra_has_a_first_program() -> None:
    assert set(FIRST) - {""} == set(PROJECT["optional-dependencies"]) - {"demo", "dev"}


@pytest.mark.nightly("installation")
def test_no_extra_brings_the_other_project(wheel: Path, tmp_path: Path) -> None:
    """pip takes nothing for any extra but what is declared, from an index with a project called holdfast too.

    The index has the metadata of everything that pip may want, so that nothing is downloaded (RUN-1).
    """
    extras = sorted(set(FIRST) - {""})
    for name in declared(*extras) - {DISTRIBUTION}:
        try:
            metadata = distribution(name).read_text("METADATA")
        except PackageNotFoundError:  # not for this platform
            continue
        assert metadata
        write_wheel(tmp_path, metadata)
    write_decoy(tmp_path)

    def taken(what: str) -> set[str]:
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report=-", f"--find-links={tmp_path}"]
        command = [sys.executable, "-m", "pip", "install", *options, what]
        run = subprocess.run(command, env=OFFLINE, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return {canonicalize_name(each["metadata"]["name"]) for each in json.loads(run.stdout)["install"]}

    assert taken("holdfast") == {"holdfast"}
    found = taken(f"{wheel}[{','.join(extras)}]")
    assert found == declared(*extras) and "holdfast" not in found


@pytest.fixture
def typed(wheel: Path, dsn: str, tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Types commands in an environment with the wheel, its command and pip; both wheels are in the folder."""
    shutil.copy(wheel, tmp_path)
    write_decoy(tmp_path)
    python = make_environment(tmp_path, wheel, "cli", beside=["pip"])
    path = f"{python.parent}{os.pathsep}/usr/bin{os.pathsep}/bin"
    environment = {**OFFLINE, "PATH": path, "HOLDFAST_DSN": dsn}

    def run(script: str) -> subprocess.CompletedProcess[str]:
        command = ["/bin/sh", "-ec", script]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.nightly("installation")
def test_another_project_in_the_package_is_named_and_removed(
    typed: Callable[[str], subprocess.CompletedProcess[str]], wheel: Path
) -> None:
    """What the page says one sees, and the commands of the page and of doctor, as they are written (OPS-5)."""
    page = sections(read("docs/installation.md"))["Another project called holdfast"]
    (seen,) = re.findall(r"^```text\n(.*)\n```$", page, re.MULTILINE)
    (mending,) = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    decoy = "pip install ./holdfast-9.9.9-py3-none-any.whl"

    assert typed(decoy).returncode == 0
    shown = typed("python -c 'from holdfast import Publisher'").stderr.splitlines()[-1]
    assert re.sub(r"\(.*(/site-packages)", r"(\1", shown) == re.sub(r"\(.*(/site-packages)", r"(\1", seen)
    assert typed("python -m holdfast").stdout == "another program\n"
    mended = typed(mending + "python -m holdfast version; python -c 'from holdfast import Publisher'")
    assert (mended.returncode, mended.stderr) == (0, "")

    before = typed(f"pip uninstall --yes {DISTRIBUTION}; {decoy}; pip install --no-deps ./{wheel.name}")
    assert before.returncode == 0, before.stderr
    named = typed("holdfast doctor --json")
    (finding,) = json.loads(named.stdout)["findings"]
    assert (named.returncode, finding["code"], finding["object"]) == (1, "package-shared", "holdfast 9.9.9")
    remedy = finding["remedy"].replace("PATH/TO/HOLDFAST.whl", f"./{wheel.name}")
    assert remedy == mending.strip()

    first, second = remedy.splitlines()
    assert typed(first).returncode == 0
    (finding,) = json.loads(typed("holdfast doctor --json").stdout)["findings"]
    assert finding["code"] == "package-incomplete"
    assert finding["remedy"].replace("PATH/TO/HOLDFAST.whl", f"./{wheel.name}") == second
    assert typed(f"{second}\nholdfast doctor").returncode == 0


def test_the_import_brings_only_what_it_needs(wheel: Path, tmp_path: Path) -> None:
    """Neither drivers nor frameworks, loggers or event loops come with the package itself (ENV-3)."""
    code = (
        "import sys; before = set(sys.modules); import holdfast; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    python = make_environment(tmp_path, wheel)
    run = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) - {"holdfast"} <= NEEDED


def test_the_wheel_has_what_the_package_needs_and_nothing_else(wheel: Path) -> None:
    """py.typed, the SQL and the pages of the console are in it; tests and tools of the repository are not."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"holdfast/py.typed", "holdfast/postgres/sql/contract.toml"} <= names
    assert {name.split("/")[0] for name in names} == {"holdfast", f"holdfast_outbox-{PROJECT['version']}.dist-info"}
    source = Path(__file__).parents[2] / "src"
    kept = {
        path.relative_to(source).as_posix()
        for path in (source / "holdfast").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert kept <= names


def test_a_package_that_was_not_audited_is_not_safe() -> None:
    """Where the data of pip-audit cannot be reached, that is what is said."""
    safe = {"name": "rich", "version": "14.0", "vulns": []}
    bad = {"name": "jinja2", "version": "3.1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1.5"]}]}
    away = {"name": "typer", "skip_reason": "not found"}
    assert verdict({"dependencies": [safe]}) == (["1 packages audited, 0 vulnerabilities"], 0)
    lines, code = verdict({"dependencies": [safe, bad]})
    assert code == 1 and lines[0] == "jinja2 3.1.0: PYSEC-1, mended in 3.1.5"
    lines, code = verdict({"dependencies": [safe, away]})
    assert code == 1 and "1 not audited" in lines[-1]
