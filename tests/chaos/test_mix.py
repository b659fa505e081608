"""A short run of everything at once, as a part of every test session. Long ones are behind docs/reliability.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def chaos(*arguments: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chaos", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
@pytest.mark.nightly("mix of faults")
@pytest.mark.timeout(120)
def test_nothing_is_lost_by_a_mix_of_faults() -> None:
    """No event lost, none unexpected, no effect twice, nothing left behind (P1, P2, P8)."""
    run = chaos("--seed", "20", "--for", "10", "--json")
    found = json.loads(run.stdout.splitlines()[-1])
    assert run.returncode == 0, f"{found['problems']}\n{run.stderr}"
    assert found["acknowledged"] > 500
    assert found["strikes"] >= 5
    assert found["acknowledged"] + found["recovered"] == found["delivered"] + found["put_aside"]
    must_be_zero = ("lost", "unexpected", "effect_duplicates", "stuck_in_flight", "leaked_connections")
    assert {name: found[name] for name in must_be_zero} == dict.fromkeys(must_be_zero, 0)


def test_every_scenario_names_its_promise() -> None:
    """The list says what can be run here, and what each scenario proves (RUN-2)."""
    run = chaos("--list")
    assert run.returncode == 0, run.stderr
    for name in (
        "mix",
        "kill_workers",
        "restart_postgres",
        "half_open",
        "poison",
        "failover",
        "clock_steps",
        "slow_neighbours",
    ):
        assert f" {name} " in run.stdout


def test_an_unknown_scenario_is_refused() -> None:
    run = chaos("--scenario", "kill_worker")
    assert run.returncode == 2
    assert "'kill_worker'" in run.stderr
