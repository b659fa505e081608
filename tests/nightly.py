"""The nightly tier: what takes too long for every run, in parts.

@pytest.mark.nightly(KIND)          A usual run takes one test of each kind, another one every day.
@pytest.mark.matrix(ONE, OTHER)     A usual run takes each value of both parameters once, in other pairs every day.
@pytest.mark.search, @given         A usual run takes as many examples as it is told, a nightly one all that it finds in
                                    SECONDS.
--nightly PART/PARTS                Run that part of the tier: its tests, whole matrices, searches.
--nightly-of DATE                   Take what a usual run takes on that day, or with `all` on any day.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections import defaultdict
from collections.abc import Generator, Sequence
from datetime import UTC, date, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

SECONDS = 120.0
TIMEOUT = 1_800


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", type=part, metavar="PART/PARTS", help="run that part of the nightly tier, such as 1/8"
    )
    parser.addoption("--nightly-of", type=day, metavar="DATE", help="the day of a usual run that is made again, or all")


def part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} names no part: write PART/PARTS, such as 1/8")
    return int(number), int(parts)


def day(text: str) -> date | str:
    if text == "all":
        return text
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date: write it as 2030-12-31, or write all") from None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Set before other processes of the run are started, which would otherwise find out for themselves at midnight.
    config.option.nightly_of = config.option.nightly_of or datetime.now(UTC).date()
    # On a busy machine to make an example may take long, which says nothing about the property.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
    if config.option.nightly:
        # Each of many passes has to be another one.
        settings.register_profile("nightly", parent=settings.get_profile("busy"), derandomize=False)
        settings.load_profile("nightly")
        config.option.timeout = config.option.timeout or TIMEOUT


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.only_from:
        return  # chosen by the run in which these tests have failed
    if config.option.nightly:
        number, parts = config.option.nightly
        tier = [item for item in items if kind_of(item) or item.get_closest_marker("matrix") or searches(item)]
        # Tests of a kind take about as long, so that they are dealt out like cards.
        chosen = set(sorted(tier, key=lambda item: (kind_of(item), item.nodeid))[number - 1 :: parts])
    elif config.option.nightly_of == "all":
        chosen = set(items)
    else:
        chosen = usual(items, config.option.nightly_of)
    for item in chosen:
        if kind := kind_of(item):
            item.user_properties.append(("nightly", kind))  # for the table at the end
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def kind_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("nightly")
    return marker.args[0] if marker else ""


def usual(items: Sequence[pytest.Item], day: date) -> set[pytest.Item]:
    """Return what a usual run takes on that day."""
    tables: defaultdict[str, list[Any]] = defaultdict(list)
    kinds: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    chosen = set(items)
    for item in items:
        if kind := kind_of(item):
            kinds[kind].append(item)
        if item.get_closest_marker("matrix"):
            tables[item.nodeid.partition("[")[0]].append(item)
    for kind in kinds.values():
        one = sorted(kind, key=lambda item: item.nodeid)[day.toordinal() % len(kind)]
        chosen.difference_update(each for each in kind if each is not one)
    for name, cells in tables.items():
        chosen.difference_update(
            beside_the_diagonal(cells, zlib.crc32(name.partition("::")[0].encode()) + day.toordinal())
        )
    return chosen


def beside_the_diagonal(cells: Sequence[Any], shift: int) -> list[pytest.Item]:
    """Return the cells without which each value of both parameters is still there."""
    one, other = cells[0].get_closest_marker("matrix").args
    rows, columns = (numbered([cell.callspec.params[name] for cell in cells]) for name in (one, other))
    if max(rows) > max(columns):
        rows, columns = columns, rows
    count = max(rows) + 1
    return [cell for cell, row, column in zip(cells, rows, columns, strict=True) if (column + shift - row) % count]


def numbered(values: Sequence[object]) -> list[int]:
    """Number the different values in the order in which they come."""
    different = list(dict.fromkeys(map(repr, values)))
    return [different.index(repr(value)) for value in values]


def searches(item: pytest.Item) -> bool:
    return is_hypothesis_test(getattr(item, "obj", None)) or item.get_closest_marker("search") is not None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Have a search go on until the time is over, whatever it finds in so many examples."""
    end = time.monotonic() + SECONDS
    result = yield
    if pyfuncitem.config.option.nightly and searches(pyfuncitem):
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        while time.monotonic() < end:
            pyfuncitem.obj(**arguments)
    return result
