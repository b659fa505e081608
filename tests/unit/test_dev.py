"""The developer's script and the files it installs from (RUN-2)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.report import BUDGET
from tests.sharing import share_of

ROOT = Path(__file__).parents[2]


def dev(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(ROOT / "dev"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement)[0]).lower()


def test_help_names_every_verb() -> None:
    """./dev --help lists what a checkout can do (RUN-2)."""
    run = dev("--help")
    assert run.returncode == 0
    for verb in ("demo", "test", "check", "bench", "chaos", "docs", "release"):
        assert re.search(rf"^  {verb} ", run.stdout, re.MULTILINE)
        assert f"./dev {verb}" in dev(verb, "--help").stdout


def test_unknown_verb() -> None:
    """A mistyped verb is named, with the ones that exist (RUN-2)."""
    run = dev("tset")
    assert run.returncode == 2
    assert "'tset'" in run.stderr
    assert "test" in run.stderr


@pytest.mark.parametrize("group", ["core", "build", "extras"])
def test_lock_covers_what_is_declared(group: str) -> None:
    """Every declared dependency is in the lock; a forgotten renewal fails here, not at a user's (RUN-2)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = {
        "core": project["project"]["dependencies"],
        "build": project["build-system"]["requires"],
        "extras": [r for extra in project["project"]["optional-dependencies"].values() for r in extra],
    }[group]
    text = (ROOT / "requirements.lock").read_text()
    locked = {canonical(line) for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)}
    assert {canonical(r) for r in declared} - locked - {"holdfast-outbox"} == set()


# --- ./dev test ---


@pytest.fixture
def script() -> Any:
    """The script as a module."""
    loader = SourceFileLoader("dev_script", str(ROOT / "dev"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    yield module
    del sys.modules[loader.name]


class Pytest:
    """Stands in for two runs of pytest: the tests that fail beside others, and those of them that fail alone."""

    def __init__(self, together: list[str], alone: list[str]) -> None:
        self.results = [together, alone]
        self.commands: list[list[str]] = []

    def call(self, command: list[str], **_: Any) -> int:
        self.commands.append(command)
        failed = self.results.pop(0)
        # A path of its own would be what pytest looks for its configuration beside.
        assert not any(Path(part).exists() for part in command[3:] if not part.startswith("-"))
        (written,) = (part.removeprefix("--failed-to=") for part in command if part.startswith("--failed-to="))
        Path(written).write_text("".join(f"{test}\n" for test in failed))
        return 1 if failed else 0


@pytest.mark.parametrize(
    ("quiet", "together", "alone", "code", "listed"),
    [
        (True, 0, 0, 0, None),
        (True, 2, 0, 0, 2),
        (True, 3, 0, 1, 3),
        (True, 1, 1, 1, 0),
        (False, 0, 0, 0, None),
        (False, 3, 0, 0, 3),
        (False, 4, 0, 1, 4),
        (False, 3, 2, 1, 1),
    ],
)
def test_what_passes_only_alone_is_listed(
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    quiet: bool,
    together: int,
    alone: int,
    code: int,
    listed: int | None,
) -> None:
    """What fails beside others runs again; the run lists what passed then, and more than bad luck fails it (RUN-2)."""
    tests = [f"tests/test_it.py::test_{n}" for n in range(together)]
    pytest_runs = Pytest(tests, tests[:alone])
    monkeypatch.setattr(script.subprocess, "call", pytest_runs.call)
    most_alone = script.MOST_ALONE_IF_QUIET if quiet else script.MOST_ALONE
    assert script.run_tests(["-k", "it"], tmp_path, most_alone) == code
    printed = capsys.readouterr().out
    assert all(command[-2:] == ["-k", "it"] for command in pytest_runs.commands)
    if listed is None:
        assert printed == "" and len(pytest_runs.commands) == 1
    else:
        assert f"passed only when run alone: {listed}\n" in printed
        assert printed.count("tests/test_it.py::") == listed


@pytest.mark.parametrize(("idle", "quiet"), [(190, True), (120, False)])
def test_a_machine_is_quiet_when_its_cores_are_idle(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, idle: int, quiet: bool
) -> None:
    """One busy core of two is not quiet, and neither is a machine of which nothing is known (RUN-2)."""
    ticks = iter([(1000, 5000), (1000 + idle, 5200)])
    monkeypatch.setattr(script.time, "sleep", lambda _: None)
    monkeypatch.setattr(script, "idle_and_total", lambda: next(ticks))
    assert script.is_quiet() is quiet
    monkeypatch.setattr(script, "KERNEL_FIGURES", tmp_path / "none")
    assert script.is_quiet() is False


def test_no_test_is_run_when_a_static_check_fails(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CI trusts begins with format, lint, types and imports (RUN-2)."""
    assert list(script.static_steps()) == ["format", "lint", "types", "imports"]
    monkeypatch.setattr(script, "static_steps", lambda: {"lint": ["false"]})
    monkeypatch.setattr(script, "run_tests", lambda *_: pytest.fail("tests were run"))
    assert script.test(["--version"]) == 1


@pytest.mark.parametrize("user", [0, 1000])
def test_system_packages_are_named_with_the_command(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], user: int
) -> None:
    """Nothing is installed unsaid; whoever is not root gets the command (RUN-2)."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(script.shutil, "which", lambda name, path=None: name if name == "apt-get" else None)
    monkeypatch.setattr(script.os, "geteuid", lambda: user)
    monkeypatch.setattr(script.subprocess, "run", run)
    script.install_servers()
    packages = "chromium faketime pgbouncer prometheus rabbitmq-server"
    command = f"apt-get update && apt-get install -y --no-install-recommends {packages}"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and command in said
    assert ran == ([["sh", "-c", command]] if user == 0 else [])


def test_processes_may_keep_bytecode(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it each of the hundreds of processes that tests start compiles everything it imports (RUN-2)."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in script.clean_environment()


@pytest.mark.slow
def test_failed_tests_are_written_and_run_again(tmp_path: Path) -> None:
    """Every phase counts, and only what is listed is run again (RUN-2)."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken():\n    yield\n    assert False\n"
        "def test_good(): pass\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_bad(n): assert n == 1\n"
        "def test_late(broken): pass\n"
    )

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.alone", "-p", "no:cacheprovider", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60).stdout

    run("--failed-to", "failed")
    assert (tmp_path / "failed").read_text().splitlines() == ["test_it.py::test_bad[2]", "test_it.py::test_late"]
    assert "2 deselected" in run("--only-from", "failed", "--failed-to", "again")
    assert (tmp_path / "again").read_text() == (tmp_path / "failed").read_text()


def test_shares() -> None:
    """What shares a server or a database stays together, per version; the rest is handed out one by one (RUN-2)."""
    assert share_of("tests/http/test_django.py::test_one[pg18-wsgi]") == "tests/http/test_django.py pg18"
    assert share_of("tests/unit/test_dev.py::test_shares") == "tests/unit/test_dev.py"
    alone = "tests/worker/test_crashes.py::test_frozen_worker_is_fenced[pg15]"
    assert share_of(alone) == alone


def test_the_budgets_of_all_folders_are_a_run_of_thirteen_minutes() -> None:
    """Who adds seconds to one takes seconds from another; each folder has one (RUN-2)."""
    assert sum(BUDGET.values()) <= 6 * 12.25 * 60
    folders = {file.parent.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py")}
    assert set(BUDGET) == folders


@pytest.mark.parametrize(("free", "expected"), [(64 * 2**20, None), (24 * 2**30, "/dev/shm")])  # noqa: S108
def test_servers_live_in_memory_where_there_is_room(
    script: Any, monkeypatch: pytest.MonkeyPatch, free: int, expected: str | None
) -> None:
    """A container with a small /dev/shm uses the disk (RUN-2)."""
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(script.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(script, "ROOM", 2**30)
    assert script.memory_with_room() == expected
    monkeypatch.setenv("TMPDIR", "/var/tmp")  # noqa: S108
    assert script.memory_with_room() is None


# --- the environment ---

PIP = """
import sys, time
from pathlib import Path

packages, lock = Path(sys.argv[1]), sys.argv[2]
last = None if sys.argv[3] == "all" else sys.argv[3]
print("Ignoring pywin32: markers 'sys_platform == win32' don't match your environment")
for number, name in enumerate(("one", "two", "three"), start=1):
    there = (packages / f"{name}-1.dist-info").exists()
    print(f"{'Requirement already satisfied' if there else 'Collecting'}: {name} (from -r {lock} (line {number}))")
print("Installing collected packages: one, two, three")
for name in ("one", "two", "three"):
    folder = packages / f"{name}-1.dist-info"
    if folder.exists():
        continue
    folder.mkdir()
    (folder / "RECORD").write_text(f"{name}.py,,\\n")
    if name == last:
        sys.exit(1)  # ended in the middle of a package
    (folder / "RECORD").write_text(f"{name}.py,,\\n{folder.name}/INSTALLER,,\\n")
"""


@pytest.fixture
def checkout(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script in a checkout of its own, with a pip that installs three packages; `venvs` are those it has made."""
    venv = tmp_path / ".venv"
    (tmp_path / "requirements.lock").write_text("".join(f"{name}==1\n" for name in ("one", "two", "three", "pywin32")))
    (tmp_path / "pyproject.toml").write_text("")
    names = {"ROOT": ".", "VENV": ".venv", "PYTHON": ".venv/bin/python", "STAMP": ".venv/.installed"}
    names |= {"MADE": ".venv/.made", "INSTALL_LOG": ".venv/install.log"}
    names |= {"REQUIREMENTS": "requirements.lock", "PYPROJECT": "pyproject.toml"}
    for name, path in names.items():
        monkeypatch.setattr(script, name, tmp_path / path)
    packages = venv / "lib" / "python3" / "site-packages"
    found = SimpleNamespace(script=script, venv=venv, packages=packages, venvs=[], ends_at="all")

    def make_venv() -> None:
        found.venvs.append(venv)
        script.shutil.rmtree(venv, ignore_errors=True)
        packages.mkdir(parents=True)
        (venv / "bin").mkdir()
        (venv / "bin" / "python").symlink_to(sys.executable)

    def pip(verb: str, *_: str) -> list[str]:
        if verb == "list":
            return [sys.executable, "-c", "print('[]')"]
        if "-r" not in _:
            return [sys.executable, "-c", ""]
        return [sys.executable, "-c", PIP, str(packages), "requirements.lock", found.ends_at]

    monkeypatch.setattr(script, "make_venv", make_venv)
    monkeypatch.setattr(script, "pip", pip)
    return found


def test_an_interrupted_installation_goes_on(checkout: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What is installed stays; what pip was interrupted with is installed anew, as is a broken .venv (RUN-2)."""
    checkout.ends_at = "two"
    with pytest.raises(SystemExit):
        checkout.script.ensure_environment()
    assert sorted(each.name for each in checkout.packages.iterdir()) == ["one-1.dist-info", "two-1.dist-info"]
    one = (checkout.packages / "one-1.dist-info").stat().st_mtime_ns
    checkout.ends_at = "all"
    checkout.script.ensure_environment()
    assert len(checkout.venvs) == 1
    assert "going on with an installation that was interrupted" in capsys.readouterr().err
    assert (checkout.packages / "one-1.dist-info").stat().st_mtime_ns == one
    for name in ("one", "two", "three"):
        assert "INSTALLER" in (checkout.packages / f"{name}-1.dist-info" / "RECORD").read_text()
    checkout.script.ensure_environment()
    assert len(checkout.venvs) == 1 and capsys.readouterr().err == ""

    spoils: list[Callable[[], object]] = [
        lambda: (checkout.venv / ".made").write_text("3.1"),
        lambda: (checkout.venv / "bin" / "python").unlink(),
        lambda: (checkout.venv / ".made").unlink(),
    ]
    for spoil in spoils:
        (checkout.venv / ".installed").unlink()
        before = len(checkout.venvs)
        spoil()
        checkout.script.ensure_environment()
        assert len(checkout.venvs) == before + 1


@pytest.mark.parametrize("terminal", [True, False])
def test_an_installation_says_how_far_it_is(
    checkout: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    """In one line that is rewritten on a terminal, in lines of their own elsewhere (RUN-2)."""
    script = checkout.script
    monkeypatch.setattr(script, "PLAIN_INTERVAL", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    checkout.script.make_venv()
    script.INSTALL_LOG.write_text("Collecting old (from -r requirements.lock (line 9))\n")
    count = script.PackageCount()
    script.INSTALL_LOG.write_text(
        script.INSTALL_LOG.read_text()
        + "Ignoring pywin32: markers don't match\nCollecting one==1 (from -r requirements.lock (line 1))\n"
    )
    assert count() == "1 of 3 fetched"
    with script.INSTALL_LOG.open("a") as log:
        log.write("Collecting two==1\n  Downloading two-1-py3-none-any.whl\n")  # as older releases of pip say it
    assert count() == "2 of 3 fetched"
    with script.INSTALL_LOG.open("a") as log:
        log.write("Installing collected packages: one, two, three\n")
    (checkout.packages / "one-1.dist-info").mkdir()
    assert count() == "1 of 3 installed"

    counts = iter(("1 of 3 fetched", "3 of 3 installed"))
    waits = iter((None, None, 0))
    monkeypatch.setattr(script, "ended", lambda process: (process.wait(), next(waits))[1])
    script.step("installing", [sys.executable, "-c", ""], lambda: next(counts))
    told = capsys.readouterr().err
    if terminal:
        assert told.count("\n") == 1
        assert "\r\x1b[Kdev: installing ... 1 of 3 fetched\r\x1b[Kdev: installing ... 3 of 3 installed\r" in told
    else:
        assert re.fullmatch(
            r"dev: installing \.\.\. \ndev: installing \.\.\. 1 of 3 fetched\n"
            r"dev: installing \.\.\. 3 of 3 installed, \d+\.\d s\n",
            told,
        )
