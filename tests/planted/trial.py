"""Which tests run for a fault, in which order, and whether one of them notices it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.planted.copies import Copy, TestRun
from tests.planted.faults import Fault
from tests.planted.reach import Reach

BATCH = 60.0  # seconds that the tests of one run took without the fault
LIMIT = 100.0  # seconds after which a run is killed
LONGEST = 25.0  # seconds of a test, where shorter ones reach the fault too
RUNS = 3  # at most, in a turn of a fault
_NO_START, _HANGS = "does not start", "hangs"


@dataclass
class Trial:
    """A fault, the tests that are still to run for it, and the one that has noticed it."""

    fault: Fault
    left: list[str]
    reached: int
    found_by: str = ""
    how: str = ""
    ran: int = 0
    seconds: float = 0.0
    # Tests that failed, and fail without the fault too, or only once.
    set_aside: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        return "found" if self.found_by else "survived" if self.reached else "not reached"

    def step(self, copy: Copy, reach: Reach) -> None:
        """Run the next tests in a copy of the tree that has the fault, until one fails."""
        batch = self._next(reach)
        run = self._run_with(copy, batch, "-x")
        passed = {each.test for each in run.ended.get("main", []) if not each.failed}
        suspect, how = _suspect(run, batch, reach)
        useless = _unknown(run)
        if suspect and self._is_noticed(copy, suspect, how, batch):
            self.found_by, self.how = suspect, how
        elif suspect:
            useless.add(suspect)
        elif not (passed or useless):
            useless = {each.test for each in run.unfinished}  # a test that takes longer than a run may
        self.ran += len(passed)
        self.set_aside += sorted(useless)
        self.left = [test for test in self.left if test not in passed | useless]

    def _is_noticed(self, copy: Copy, suspect: str, how: str, batch: list[str]) -> bool:
        """Return whether the test passes without the fault, and fails with it once more."""
        if how == _NO_START:
            return self._counted(_run(copy, batch, "--collect-only")).code == 0
        if self._counted(_run(copy, [suspect])).code != 0:
            return False
        return how == _HANGS or self._run_with(copy, [suspect]).code != 0

    def _run_with(self, copy: Copy, tests: list[str], *options: str) -> TestRun:
        with copy.changed(self.fault.path, self.fault.planted(copy.read(self.fault.path))):
            return self._counted(_run(copy, tests, *options))

    def _counted(self, run: TestRun) -> TestRun:
        self.seconds += run.seconds
        return run

    def _next(self, reach: Reach) -> list[str]:
        batch, seconds = [], 0.0
        for test in self.left:
            if batch and seconds + reach.seconds[test] > BATCH:
                continue
            batch.append(test)
            seconds += reach.seconds[test]
        # The tests of a file together, because they share what it sets up.
        files: defaultdict[str, list[str]] = defaultdict(list)
        for test in batch:
            files[test.partition("::")[0]].append(test)
        return [test for tests in files.values() for test in tests]

    def to_json(self) -> dict[str, Any]:
        found = {"result": self.result, "found_by": self.found_by, "how": self.how, "seconds": round(self.seconds, 1)}
        counts = {"tests_reaching": self.reached, "tests_run": self.ran, "set_aside": self.set_aside}
        return asdict(self.fault) | found | counts


def _run(copy: Copy, tests: Iterable[str], *options: str) -> TestRun:
    chosen = copy.root.parent / "chosen"
    chosen.write_text("".join(f"{test}\n" for test in tests))
    return copy.run(["-q", "--tb=line", "--timeout=60", *options, f"@{chosen}"], LIMIT, lambda temporary: None)


def _suspect(run: TestRun, batch: list[str], reach: Reach) -> tuple[str, str]:
    """Return the test that noticed the fault and how, if one did."""
    ended, unfinished = run.ended.get("main", []), run.unfinished
    for each in ended:
        if each.failed:
            return each.test, f"fails at {each.failed}"
    if run.code == 0 or _unknown(run):
        return "", ""
    if not ended and not unfinished:
        return batch[0], _NO_START
    for each in unfinished:
        if not run.killed:
            return each.test, "ends the tests' process"
        if each.end - each.start > 10 + 3 * reach.seconds[each.test]:
            return each.test, _HANGS
    return "", ""


def _unknown(run: TestRun) -> set[str]:
    """Return the tests that pytest has not found: those whose id is another in each run."""
    return set(re.findall(r"^ERROR: not found: .*?(tests/.*)$", run.output, re.MULTILINE))


# --- the order of the tests -------------------------------------------------------------------------------


def trial_of(fault: Fault, reach: Reach, root: Path) -> Trial:
    reaching = reach.tests[fault.number]
    short = {test for test in reaching if reach.seconds[test] <= LONGEST}
    return Trial(fault, in_order(fault, short or reaching, reach.seconds, root), len(reaching))


def in_order(fault: Fault, tests: Iterable[str], seconds: dict[str, float], root: Path) -> list[str]:
    """Sort tests: those that name the function, class or file first; then the shortest of every file in turn."""
    *classes, function = fault.function.split(".")
    names = (function, *classes, Path(fault.path).stem.strip("_"))
    wanted = [re.compile(rf"(?<![a-z]){re.escape(name.strip('_'))}(?![a-z])") for name in names]
    by_file: defaultdict[str, list[str]] = defaultdict(list)
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        by_file[test.partition("::")[0]].append(test)
    ranked = []
    for file, here in by_file.items():
        text = _text(root / file)
        distance = next((number for number, name in enumerate(wanted, 1) if name.search(text)), len(wanted) + 1)
        for rank, test in enumerate(here):
            named = wanted[0].search(_body(text, test))
            ranked.append((0 if named else distance, rank, seconds[test], test))
    return [test for *_, test in sorted(ranked)]


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _body(text: str, test: str) -> str:
    """Return the code of a test, by its id."""
    name = test.split("::")[-1].partition("[")[0]
    match = re.search(
        rf"^( *)(?:async )?def {re.escape(name)}\(.*?(?=^\1\S(?!\s*->)|\Z)", text, re.MULTILINE | re.DOTALL
    )
    return match[0] if match else ""
