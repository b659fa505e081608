"""Copies of the working tree, each with an environment of its own, and runs of tests in them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.planted import plugin, sql
from tests.planted.faults import PACKAGE
from tests.servers import SUPPORTED_MAJORS

_EDITABLE = "_holdfast_outbox.pth"  # tells the environment where the package is
# Set when the program is to end: runs of tests are killed then.
stopped = threading.Event()


@dataclass(frozen=True)
class Ended:
    """A test that has ended, when it began and ended, and the phase in which it failed, if it did."""

    test: str
    start: float
    end: float
    failed: str


class Copy:
    """The files of a working tree in another folder, and an environment whose `holdfast` they are."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.root = folder / "tree"
        self._folder = folder
        self._written = 0
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=tree, capture_output=True, check=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (tree / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, self.root / name)
        # Tests ask git which files there are.
        for command in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", *command], cwd=self.root, check=True, capture_output=True)
        _link_environment(tree / ".venv", self.root / ".venv", self.root / "src")

    def read(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8")

    def write(self, path: str, text: str) -> None:
        """Write a file, with a time at which no compiled form of it was made.

        The fingerprints of SQL functions follow, or every fault in SQL would be found by doctor, as a changed function.
        """
        if path.endswith(".sql"):
            self._write_fingerprints(self.read(path), text)
        (self.root / path).write_text(text, encoding="utf-8")
        self._written += 1
        at = time.time() + 10 * self._written
        os.utime(self.root / path, (at, at))

    def _write_fingerprints(self, before: str, after: str) -> None:
        bodies = zip(sql.bodies(before), sql.bodies(after), strict=True)
        changed = [(_fingerprint(old), _fingerprint(new)) for old, new in bodies if old != new]
        for file in (self.root / PACKAGE).rglob("schema.json"):
            text = file.read_text()
            for old, new in changed:
                text = text.replace(old, new)
            file.write_text(text)

    @contextlib.contextmanager
    def changed(self, path: str, text: str) -> Iterator[None]:
        """Have another text in a file for the time of the block."""
        usual = self.read(path)
        self.write(path, text)
        try:
            yield
        finally:
            self.write(path, usual)

    def run(self, arguments: Sequence[str], seconds: float | None, watch: Callable[[Path], None]) -> TestRun:
        """Run tests, and kill what is left of them after so many seconds; `watch` is called several times a second."""
        self._written += 1
        here = self._folder / f"run{self._written}"
        temporary = here / "tmp"
        temporary.mkdir(parents=True)
        for each in (self._folder, here, temporary):
            each.chmod(0o1777 if each is temporary else 0o755)
        command = [str(self.root / ".venv" / "bin" / "python"), "-m", "pytest", "-p", "tests.planted.plugin"]
        command += ["-p", "no:cacheprovider", "--postgres", str(SUPPORTED_MAJORS[0]), *arguments]
        started = time.time()
        with (here / "output").open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self._environment(here),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                while process.poll() is None and not stopped.is_set():
                    if seconds is not None and time.time() - started > seconds:
                        break
                    watch(temporary)
                    time.sleep(0.1)
                killed = process.poll() is None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        run = TestRun(here, process.returncode, killed, time.time() - started)
        shutil.rmtree(here, ignore_errors=True)
        return run

    def _environment(self, here: Path) -> dict[str, str]:
        foreign = ("PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTEST_CURRENT_TEST")
        environment = {name: value for name, value in os.environ.items() if name not in foreign}
        venv = self.root / ".venv"
        path = f"{venv / 'bin'}{os.pathsep}{environment.get('PATH', os.defpath)}"
        return environment | {
            "VIRTUAL_ENV": str(venv),
            "PATH": path,
            "TMPDIR": str(here / "tmp"),
            plugin.RUN: str(here),
        }


class TestRun:
    """What a run of tests has left: its exit code, what it printed, and which tests began and ended."""

    __test__ = False  # for pytest: not a test, in spite of its name

    def __init__(self, folder: Path, code: int, killed: bool, seconds: float) -> None:
        self.output = (folder / "output").read_text(errors="replace")
        self.code = code
        self.killed = killed  # by us, when its time was over
        self.seconds = seconds
        self.ended: dict[str, list[Ended]] = {}  # by the process that ran them, in their order
        self.unfinished: list[Ended] = []
        for file in sorted(folder.glob("*.jsonl")):
            lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
            self.ended[file.stem] = [Ended(**line) for line in lines if "end" in line]
            if lines and "end" not in lines[-1]:
                self.unfinished.append(Ended(lines[-1]["test"], lines[-1]["start"], time.time(), "killed"))


def _fingerprint(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _link_environment(source: Path, venv: Path, code: Path) -> None:
    """Make an environment of links to another one's packages, with scripts and a path of its own."""
    packages = next(source.glob("lib/python*/site-packages"))
    own = venv / packages.relative_to(source)
    own.mkdir(parents=True)
    for entry in packages.iterdir():
        if entry.name != _EDITABLE:
            (own / entry.name).symlink_to(entry)
    (own / _EDITABLE).write_text(f"{code}\n")
    (venv / "bin").mkdir()
    for script in (source / "bin").iterdir():
        with script.open("rb") as file:
            is_script = file.read(2) == b"#!"
        if is_script and not script.is_symlink():
            text = script.read_text().replace(f"{source}/", f"{venv}/")
            (venv / "bin" / script.name).write_text(text)
            shutil.copymode(script, venv / "bin" / script.name)
        else:
            (venv / "bin" / script.name).symlink_to(os.readlink(script) if script.is_symlink() else script)
    shutil.copy2(source / "pyvenv.cfg", venv / "pyvenv.cfg")
