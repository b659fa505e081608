"""The nightly tier: what a usual run takes of it on a day, and how its parts share it out."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentTypeError
from collections import Counter
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests import nightly

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
from hypothesis import given, strategies

@pytest.mark.nightly("demo")
@pytest.mark.parametrize("broker", ["nats", "redis", "kafka"])
def test_demo(broker): pass

@pytest.mark.nightly("power cut")
def test_power(): pass

@pytest.mark.matrix("level", "driver")
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("driver", ["a", "b", "c"])
def test_each(level, driver): pass

@given(strategies.none())
def test_property(value): pass

def test_usual(): pass
"""
DAY = date(2030, 1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tests")
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  nightly(kind): x\n  matrix(one, other): x\n  search: x\n"
    )
    return folder


@pytest.fixture(scope="module")
def days(folder: Path) -> list[list[str]]:
    """What usual runs take on three days, one after the other."""
    return [collected(folder, "--nightly-of", str(DAY + timedelta(days=n))) for n in range(3)]


def collected(folder: Path, *options: str) -> list[str]:
    """The names of the tests that a run with these options would take."""
    plugins = ["-p", "tests.alone", "-p", "tests.nightly", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "--collect-only", "-q", *options]
    run = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    return [line.partition("::")[2] for line in run.stdout.splitlines() if "::" in line]


def test_a_usual_run_takes_one_of_each_kind_and_another_the_next_day(days: list[list[str]]) -> None:
    """Each test of the tier has its day (RUN-2)."""
    for found in days:
        assert [name.partition("[")[0] for name in found].count("test_demo") == 1
        assert {"test_power", "test_usual", "test_property"} <= set(found)
    assert len({name for found in days for name in found if name.startswith("test_demo")}) == 3


def test_a_usual_run_has_each_value_of_a_matrix_and_every_pair_in_time(days: list[list[str]]) -> None:
    """The longer side gives the number of cells (RUN-2)."""
    for found in days:
        cells = [name.removeprefix("test_each[").rstrip("]").split("-") for name in found if "test_each" in name]
        assert sorted(driver for driver, _ in cells) == ["a", "b", "c"]
        assert {level for _, level in cells} == {"1", "2"}
    assert len({name for found in days for name in found if "test_each" in name}) == 6


@pytest.mark.slow
def test_the_parts_share_the_tier_out(folder: Path) -> None:
    """Each of its tests, each cell and each search is in one part, and nothing else is (RUN-2)."""
    parts = [collected(folder, "--nightly", f"{n}/3") for n in (1, 2, 3)]
    assert [len(part) for part in parts] == [4, 4, 3]
    counted = Counter(name.partition("[")[0] for part in parts for name in part)
    assert counted == {"test_demo": 3, "test_power": 1, "test_each": 6, "test_property": 1}
    assert len(collected(folder, "--nightly-of", "all")) == sum(counted.values()) + 1


@pytest.mark.parametrize("text", ["9/8", "0/8", "1", "1/", "a/b", ""])
def test_what_names_no_part_is_refused(text: str) -> None:
    """With the way to write it (RUN-2)."""
    with pytest.raises(ArgumentTypeError, match=r"write PART/PARTS, such as 1/8"):
        nightly.part(text)


def test_what_names_no_day_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"write it as 2030-12-31"):
        nightly.day("tomorrow")
