"""One virtual environment per peer under `.bench`, made from its pinned requirements and kept until they change."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / ".bench"
PEERS = Path(__file__).resolve().parent / "peers"
# What a peer needs beyond the Python that runs the benchmarks.
NEEDS = {"oban": (3, 12)}
NEWEST = 15


class EnvironmentFailed(Exception):
    """A peer's environment could not be made; the text says why and where the log is."""


def peers() -> list[str]:
    return sorted(lock.parent.name for lock in PEERS.glob("*/requirements.txt"))


def interpreter(peer: str) -> str:
    """The peer's Python."""
    return interpreter_for(peer, PEERS / peer / "requirements.txt")


@cache
def interpreter_for(peer: str, lock: Path) -> str:
    """A Python with what a lock file pins; makes the environment first if it is missing or the pins have changed."""
    home = STORE / peer
    python, stamp = home / "bin" / "python", home / ".installed"
    found = base_python(peer)
    wanted = hashlib.sha256(lock.read_bytes() + found.encode()).hexdigest()
    if not installed(stamp, wanted, python):
        with only_one_installer():
            if not installed(stamp, wanted, python):
                install(peer, found, home, lock)
                stamp.write_text(wanted)
    return str(python)


def installed(stamp: Path, wanted: str, python: Path) -> bool:
    # The stamp is written last: an interrupted install is never taken for a finished one.
    return stamp.exists() and stamp.read_text() == wanted and python.exists()


@contextlib.contextmanager
def only_one_installer() -> Iterator[None]:
    STORE.mkdir(exist_ok=True)
    with (STORE / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(peer: str, base: str, home: Path, lock: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    log = home / "install.log"
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    with log.open("wb") as output:
        for command in (
            [base, "-m", "venv", str(home)],
            # Each lock is complete, so nothing is resolved: what was published since has no part in it.
            [*pip, "install", "--require-hashes", "--no-deps", "-r", str(lock)],
        ):
            if subprocess.call(command, stdout=output, stderr=output, env=clean_environment()) != 0:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise EnvironmentFailed(f"{peer}: {log.relative_to(ROOT)} ends with\n{tail}")


def base_python(peer: str) -> str:
    """This Python, or for a peer that needs a later one the first that is found and runs."""
    needed = NEEDS.get(peer, (3, 11))
    if sys.version_info >= needed:
        return sys.executable
    for minor in range(needed[1], NEWEST + 1):
        name = f"python3.{minor}"
        # Version managers keep their Pythons side by side, and put shims on the path that may not run.
        beside = sorted(map(str, Path(sys.base_prefix).parent.glob(f"*/bin/{name}")))
        for candidate in [*filter(None, [shutil.which(name)]), *beside]:
            if subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
                return candidate
    name = f"python{needed[0]}.{needed[1]}"
    raise EnvironmentFailed(f"{peer} needs Python {needed[0]}.{needed[1]} or later: put a {name} on the path")


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")}
