"""Two hundred tests as users write them, and what the plugin costs them (TST-1)."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docs.support import ROOT

pytestmark = [pytest.mark.nightly("project with the testing kit"), pytest.mark.slow]

DJANGO_PAGE = ROOT / "examples" / "django_orders" / "README.md"
# On two cores that nothing else uses; where they are shared, it takes as much longer as there are others.
OVERHEAD_MS, LONGEST = 10.0, 15.0


@pytest.mark.timeout(150)
def test_two_hundred_tests_in_four_processes(tmp_path: Path) -> None:
    """Green under `-n 4`, and at most ten milliseconds for each test beside what it does itself."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.testing.overhead"]
    variables = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    began = time.monotonic()
    run = subprocess.run(
        [*command, "-n", "4", "examples/bookings/tests"],
        cwd=ROOT,
        env={**variables, "HOLDFAST_OVERHEAD": str(tmp_path / "overhead")},
        capture_output=True,
        text=True,
        timeout=140,
    )
    took = time.monotonic() - began
    found = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and found and int(found[1]) >= 200, run.stdout + run.stderr
    overhead = json.loads((tmp_path / "overhead").read_text())
    print(f"{found[1]} tests in {took:.1f} s, median overhead {statistics.median(overhead):.1f} ms")
    shared = max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))
    assert statistics.median(overhead) < OVERHEAD_MS * shared
    assert took < LONGEST * shared


def test_the_tests_of_the_orders_demo() -> None:
    """Over HTTP with a key, with domain events, reactions, deliveries and faults (PUB-4)."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/orders/tests"]
    variables = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_tests_of_the_django_example(holdfast_dsn: str) -> None:
    """As its page shows, with Django's own runner, on a server that is there (LSN-13, TST-1)."""
    (shown,) = re.findall(r"^python (-m django test .*)$", DJANGO_PAGE.read_text(), re.MULTILINE)
    variables = {"DJANGO_SETTINGS_MODULE": "examples.django_orders.settings", "HOLDFAST_DSN": holdfast_dsn}
    command = [sys.executable, "-W", "error", *shown.split()]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=110
    )
    found = re.search(r"^Ran (\d+) tests", run.stderr, re.MULTILINE)
    assert run.returncode == 0 and found and int(found[1]) >= 6, run.stdout + run.stderr
