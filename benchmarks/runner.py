"""Runs the arms of a benchmark in turn, each as a process of its own on a database of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.suites import Arm
from benchmarks.systems.process import DSN_VARIABLE
from holdfast.embedded import EmbeddedPostgres

ROOT = Path(__file__).resolve().parent.parent
LONGEST_RUN = 900


class RunFailed(Exception):
    """A system's process did not end with a result; the text is what it said."""


def interleaved(
    server: EmbeddedPostgres, arms: Sequence[Arm], repeats: int, progress: Callable[[Arm], None]
) -> dict[str, list[dict[str, Any]]]:
    """One run of each arm after the other, several times: a noisy minute hits all of them."""
    results: dict[str, list[dict[str, Any]]] = {arm.label: [] for arm in arms}
    for turn in range(repeats):
        # The first of a turn has a colder cache; take turns at that as well.
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            progress(arm)
            results[arm.label].append(run(server, arm))
    return results


def run(server: EmbeddedPostgres, arm: Arm) -> dict[str, Any]:
    database = f"bench_{arm.system.replace('-', '_')}"
    server.drop_database(database)
    dsn = server.create_database(database)
    try:
        return process(interpreter(arm.system), arm, dsn)
    finally:
        server.drop_database(database)


def interpreter(system: str) -> str:
    """Peers have an environment of their own; Holdfast and the control run in ours."""
    return environments.interpreter(system) if system in environments.peers() else sys.executable


def process(python: str, arm: Arm, dsn: str) -> dict[str, Any]:
    module = f"benchmarks.systems.{arm.system.replace('-', '_')}"
    command = [python, "-m", module, arm.verb]
    for name, value in arm.options.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", DSN_VARIABLE: dsn}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST_RUN, check=False
    )
    if done.returncode != 0:
        raise RunFailed(f"{arm.label} ({arm.system} {arm.verb}) failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
