"""The sums: over a run of faults, what was begun is delivered, a duplicate, failed, expired, cancelled or open."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.balance import problems
from holdfast.operator import Balance

pytestmark = pytest.mark.observability

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
def test_counts_add_up_over_a_run_of_faults() -> None:
    """OBS-2: from the counts alone, and against the rows; handlers end their process, fail, are retried and published
    twice."""
    command = [sys.executable, "-m", "chaos", "--scenario", "exit_poison", "--seed", "11", "--for", "6", "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    found = json.loads(run.stdout.splitlines()[-1])
    counted = found["counted"]
    assert not [each for each in found["problems"] if "counted" in each or "counts" in each], found["problems"]
    assert counted["begun"] == sum(counted.values()) - counted["begun"]
    assert found["struck"] and counted["failed"] and counted["duplicate"] and counted["delivered"] > 500
    assert found["lost"] == found["effect_duplicates"] == 0


def test_a_delivery_that_is_counted_twice_or_not_at_all_is_a_problem() -> None:
    """OBS-2."""
    even = Balance(begun=10, delivered=6, duplicate=1, failed=1, expired=1, cancelled=0, open=1)
    assert problems(even, 10) == []
    assert len(problems(even, 11)) == 1
    assert "+1" in problems(Balance(10, 6, 1, 1, 1, 0, 0), 10)[0]
    assert "-1" in problems(Balance(10, 7, 1, 1, 1, 0, 1), 10)[0]
