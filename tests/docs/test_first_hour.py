"""What the README and the installation page say, typed literally: in a copy of the checkout, and in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psycopg
import pytest

from tests.docs.support import ROOT, Block, blocks, read, sections
from tests.docs.test_readme import PROGRAM

pytestmark = [
    pytest.mark.newcomer,
    pytest.mark.nightly("installation"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

INSTALLATION = ROOT / "docs" / "installation.md"
WHEEL = re.findall(r"holdfast_outbox-\S+?\.whl", read("docs/installation.md"))[0]


def environment() -> dict[str, str]:
    """That of a newcomer: nothing of this repository's environment on the path."""
    path = [each for each in os.environ["PATH"].split(os.pathsep) if not each.startswith(str(ROOT))]
    ours = ("HOLDFAST", "PYTHON", "VIRTUAL_ENV", "PYTEST")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PATH": os.pathsep.join(path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def typed(script: str, folder: Path, **variables: str) -> str:
    """Type commands into one shell, which ends at the first that fails."""
    run = subprocess.run(
        ["/bin/sh", "-ec", script], cwd=folder, env=environment() | variables, capture_output=True, text=True
    )
    assert run.returncode == 0, f"{script}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}"
    return run.stdout


def section(name: str) -> str:
    """The commands of a section of the installation page."""
    text = sections(INSTALLATION.read_text())[name]
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository, and nothing else."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    """Installed and then built in the checkout, by the commands of the page."""
    build, _ = section("From a wheel").split("python3 -m venv", 1)
    said = typed(f"{section('From a checkout')}\n{build}", checkout)
    assert re.search(r"^holdfast \d+\.\d+\.\d+ \(schema version \d+\)$", said, re.MULTILINE)
    return checkout / "dist" / WHEEL


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that had nothing but the wheel in it, and has what the page says to install there."""
    folder = tmp_path_factory.mktemp("empty")
    shutil.copy2(wheel, folder)
    _, install = section("From a wheel").split("python3 -m venv", 1)
    assert "holdfast " in typed(f"python3 -m venv{install}", folder)
    return folder


ACTIVE = ". .venv/bin/activate\n"


def test_the_installation_page(empty: Path) -> None:
    """Its program runs where its commands have installed Holdfast (RUN-1)."""
    (program,) = blocks("python", pages=[INSTALLATION])
    assert program.file
    (empty / program.file).write_text(program.text)
    said = typed(ACTIVE + section("Trying it"), empty)
    assert said.startswith("pending: 0\n")
    assert "Usage: holdfast" in said


SCHEDULE = 'import holdfast; holdfast.HandlerRegistry().schedule("a.b", name="a.b", cron="* * * * *")'
# What needs each extra that is not installed there.
NEEDING = {
    "django": "python -c 'import holdfast.integrations.django'",
    "fastapi": "python -c 'import holdfast.integrations.fastapi'",
    "prometheus": "holdfast metrics --dsn postgresql://localhost:1/none",
    "schedules": f"python -c '{SCHEDULE}'",
    "sentry": "python -c 'import holdfast.integrations.sentry'",
    "sqlalchemy": "python -c 'import holdfast.integrations.sqlalchemy'",
}


@pytest.mark.parametrize("extra", NEEDING)
def test_what_is_not_installed_says_how(empty: Path, extra: str) -> None:
    """The last line has the command that installs it (RUN-1)."""
    run = subprocess.run(
        ["/bin/sh", "-c", f"{ACTIVE}{NEEDING[extra]}"], cwd=empty, env=environment(), capture_output=True, text=True
    )
    assert run.returncode != 0
    assert f"pip install '.[{extra}]' in a checkout of Holdfast" in run.stderr.splitlines()[-1]
    assert NEEDING[extra].startswith("python") or "Traceback" not in run.stderr


def test_without_the_command_s_extra(checkout: Path, wheel: Path) -> None:
    """`holdfast` itself, in an environment that has the library alone (RUN-1)."""
    hidden = "import sys; sys.modules['typer'] = None; from holdfast.cli import main; main(['version'])"
    run = subprocess.run(
        ["/bin/sh", "-c", f'{ACTIVE}python -c "{hidden}"'],
        cwd=checkout,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith("'PATH/TO/HOLDFAST.whl[cli]'")
    assert "Traceback" not in run.stderr


def test_the_program_of_the_readme(empty: Path) -> None:
    """Saved and run as the text before it says; the worker's own lines are around its output (RUN-1)."""
    assert "Save it as `program.py`" in read("README.md")
    (command,) = re.findall(r"`(python program\.py)`", read("README.md"))
    (empty / "program.py").write_text(PROGRAM.text)
    said = typed(ACTIVE + command, empty).splitlines()
    assert [line for line in said if "charging" in line] == ["charging order 17"]


def test_the_commands_of_the_readme(empty: Path, empty_dsn: str) -> None:
    """Migrate, start a worker with the first half of the program, insert a row: it is handled (RUN-1)."""
    [commands, *_] = [block for block in readme("sh") if "holdfast worker" in block.text]
    export, *lines = commands.text.splitlines()
    assert export.startswith("export HOLDFAST_DSN=")
    assert "up to `main`, saved as `app/handlers.py`" in " ".join(read("README.md").split())
    (empty / "app").mkdir()
    (empty / "app" / "handlers.py").write_text(PROGRAM.text.partition("\nasync def main")[0])
    [insert, *_] = [block for block in readme("sql") if "INSERT" in block.text]
    output = empty / "output"
    with output.open("w") as file:
        script = ACTIVE + "\n".join(lines[:-1]) + f"\nexec {lines[-1]}"
        worker = subprocess.Popen(
            ["/bin/sh", "-ec", script],
            cwd=empty,
            env=environment() | {"HOLDFAST_DSN": empty_dsn, "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        heard(worker, output, "worker_started")
        psql(insert.text, empty_dsn)
        heard(worker, output, "charging order 18")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    finally:
        worker.kill()
        worker.wait()


def readme(language: str) -> list[Block]:
    return blocks(language, pages=[ROOT / "README.md"])


def psql(statement: str, dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(statement.encode())


def heard(worker: subprocess.Popen[bytes], output: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in output.read_text():
        assert worker.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


def test_the_demo_is_the_command_at_the_top() -> None:
    """tests/docs/test_demo.py runs it; here, that the README and ./dev agree on its name (RUN-1)."""
    run = subprocess.run(["./dev", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert "demo" in run.stdout + run.stderr
    assert "./dev demo" in readme("sh")[0].text
