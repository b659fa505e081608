"""Runs the arms of a benchmark in turn, each as a process of its own on a database of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.benchmark import Arm
from benchmarks.databases import Databases, NoSpace
from benchmarks.systems.process import DSN_VARIABLE, arguments

ROOT = Path(__file__).resolve().parent.parent
LONGEST_RUN = 900


class Progress:
    """Told which arm is next, and what is done for it before it runs. This one keeps it to itself."""

    def begin(self, arm: Arm) -> None: ...

    def note(self, text: str) -> None: ...


class RunFailed(Exception):
    """A system's process did not end with a result; the text is what it said."""


def interleaved(
    databases: Databases, arms: Sequence[Arm], repeats: int, progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    """One run of each arm after the other, several times: a noisy minute hits all of them."""
    results: dict[str, list[dict[str, Any]]] = {arm.label: [] for arm in arms}
    for turn in range(repeats):
        # There and back: what an arm leaves behind is the next one's burden, and should not always be the same one's.
        for arm in arms if turn % 2 == 0 else reversed(arms):
            if turn % arm.every:
                continue
            progress.begin(arm)
            results[arm.label].append(run(databases, arm, progress))
    return results


def run(databases: Databases, arm: Arm, progress: Progress | None = None) -> dict[str, Any]:
    progress = progress or Progress()
    ours = arm.system not in environments.peers()
    python = sys.executable if ours else environments.interpreter(arm.system)
    kept = arm.options.get("kept", 0) if ours else None
    try:
        if arm.reads:
            dsn = databases.shared(kept or 0, progress.note)
        else:
            dsn = databases.fresh(arm.system, kept, progress.note)
        progress.note("")
        return process(python, arm, dsn)
    except NoSpace as refusal:
        raise RunFailed(str(refusal)) from None
    finally:
        databases.drop(arm.system)


def process(python: str, arm: Arm, dsn: str) -> dict[str, Any]:
    module = f"benchmarks.systems.{arm.system.replace('-', '_')}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", DSN_VARIABLE: dsn}
    with subprocess.Popen(
        [python, "-m", module, arm.verb, *arguments(arm.options)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            out, said = run.communicate(timeout=LONGEST_RUN)
        except BaseException as cause:
            # With the servers and workers that it has started: who is left would keep the pipes open, and us waiting.
            os.killpg(run.pid, signal.SIGKILL)
            _, said = run.communicate()
            if isinstance(cause, subprocess.TimeoutExpired):
                late = f"{arm.label} ({arm.system} {arm.verb}) did not end within {LONGEST_RUN} s"
                raise RunFailed(f"{late}:\n{said[-2000:]}") from None
            raise
    if run.returncode != 0:
        raise RunFailed(f"{arm.label} ({arm.system} {arm.verb}) failed:\n{said[-2000:]}")
    result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return result
