"""`python -m tests.planted [--in FOLDERS] [--faults N] [--from FILE] [--json FILE]`: plants faults, one at a time.

Prints for each the test that notices it and after how many seconds, and the differences that no test has noticed when
--minutes are over. What it finds out about the tests is not an error: the exit code is 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.planted import faults
from tests.planted.copies import Copy, stopped
from tests.planted.faults import BadInput, Fault
from tests.planted.reach import Reach, reach_of
from tests.planted.trial import LIMIT, RUNS, Trial, trial_of

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    try:
        options = parse()
        found_before: set[int] = set()
        if options.from_:
            asked, found_before = faults.read(options.from_)
            planted, gone = faults.found_again(ROOT, asked[: options.faults])
        else:
            planted, gone = faults.choose(ROOT, options.folders, options.faults or 30), []
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for fault in gone:
        print(f"{fault.number:>3}  {fault.kind:<26} {fault.place:<60} no longer exists")
    if options.list:
        for fault in planted:
            print(f"{fault.number:>3}  {fault.kind:<26} {fault.place}\n{fault.difference()}")
        return 0
    # Tests press Ctrl-C, which programs do not hear that were started in the background of a script.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-planted-", dir=developers_script().memory_with_room()))
    folder.chmod(0o755)  # servers run under another account where the tests run as root
    try:
        book = Book(options.json, gone, found_before)
        run(options, planted, book, folder)
        return 0
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    add = parser.add_argument
    add("--in", dest="folders", default=",".join(faults.FOLDERS), help="folders of src/holdfast (default: %(default)s)")
    add("--faults", type=int, metavar="N", help="how many (default: 30; with --from, all of the file)")
    add("--from", dest="from_", type=Path, metavar="FILE", help="plant the faults of a file written with --json")
    add("--json", type=Path, metavar="FILE", help="write the faults and what was found")
    add("--map", type=Path, metavar="FILE", help="keep here which test reaches what, for the same faults and tree")
    add("--minutes", type=float, default=60.0, metavar="N", help="for the whole run (default: 60)")
    add("--list", action="store_true", help="print the faults, and plant none")
    add("tests", nargs="*", default=["tests"], help="tests that may find the faults (default: all)")
    options = parser.parse_args()
    options.folders = options.folders.split(",")
    if options.faults is not None and options.faults < 1:
        raise BadInput(f"--faults {options.faults}: is no number of faults. Ask for one at least.")
    for name, file in (("--json", options.json), ("--map", options.map)):
        if file and not file.absolute().parent.is_dir():
            raise BadInput(f"{name} {file}: {file.parent} is no folder. Make it, or name another file.")
    for path in options.tests:
        if not (ROOT / path.partition("::")[0]).exists():
            raise BadInput(f"{path}: is not there. Name folders, files or tests, such as tests/operator.")
    return options


def run(options: argparse.Namespace, planted: Sequence[Fault], book: Book, folder: Path) -> None:
    started = time.monotonic()
    deadline = started + 60 * options.minutes - RUNS * LIMIT  # as long as the last turn may take
    # All copies first, so that nobody has to leave the tree alone for an hour.
    processes = min(4, os.cpu_count() or 1)
    probed, *copies = [Copy(ROOT, folder / f"copy{number}") for number in range(1 + processes)]
    reach = reach_from(options, planted, probed, folder)
    minutes = (time.monotonic() - started) / 60
    say(f"{len(reach.seconds)} tests ran with probes, {minutes:.1f} min; {len(reach.failed)} failed and are left out")
    book.begin([trial_of(fault, reach, ROOT) for fault in planted], minutes)
    waiting: queue.SimpleQueue[Trial] = queue.SimpleQueue()
    for trial in book.trials:
        waiting.put(trial)

    def work(copy: Copy) -> None:
        while time.monotonic() < deadline and not stopped.is_set():
            try:
                trial = waiting.get_nowait()
            except queue.Empty:
                return
            if trial.left:
                trial.step(copy, reach)
            if trial.found_by or not trial.left:
                book.decided(trial)
            else:
                waiting.put(trial)  # its other tests run when each fault has had its turn

    with ThreadPoolExecutor(processes) as pool:
        try:
            for each in as_completed([pool.submit(work, copy) for copy in copies]):
                each.result()
        except BaseException:
            stopped.set()
            raise
    book.close((time.monotonic() - started) / 60)


def reach_from(options: argparse.Namespace, planted: Sequence[Fault], copy: Copy, folder: Path) -> Reach:
    """Return which tests reach the faults: as the file of --map has it, or by a run with probes."""
    about = digest(copy.root, planted, options.tests)
    if options.map and options.map.exists():
        try:
            found = json.loads(options.map.read_text())
            if found["of"] == about:
                return Reach.from_json(found)
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"--map {options.map}: was not written by this program. Name another file.") from error
    say(f"{len(planted)} probes planted; the suite runs once with them")
    processes = developers_script().test_processes()
    reach = reach_of(planted, copy, folder, options.tests, processes, lambda n: say(f"{n} tests have run with probes"))
    if options.map:
        options.map.write_text(json.dumps({"of": about} | reach.to_json()))
    return reach


def digest(root: Path, planted: Sequence[Fault], tests: Sequence[str]) -> str:
    """Return what tells a tree, faults and tests from others."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src", "tests"]
    names = subprocess.run(listed, cwd=root, capture_output=True, check=True, text=True).stdout.split()
    found = hashlib.sha256(repr((planted, tests)).encode())
    for name in names:
        if not name.startswith("tests/planted/"):
            found.update(name.encode() + (root / name).read_bytes())
    return found.hexdigest()


def developers_script() -> ModuleType:
    """Return ./dev, which knows how many processes and where files are fast on this machine."""
    loader = SourceFileLoader("dev", str(ROOT / "dev"))
    spec = spec_from_loader("dev", loader)
    assert spec is not None
    script = module_from_spec(spec)
    sys.modules["dev"] = script
    loader.exec_module(script)
    return script


class Book:
    """The table on the screen, a line for each fault as it is decided, and the file of --json."""

    def __init__(self, file: Path | None, gone: Sequence[Fault], found_before: set[int]) -> None:
        self.trials: list[Trial] = []
        self._file = file
        self._gone = gone
        self._found_before = found_before
        self._minutes: dict[str, float] = {}
        self._decided: set[int] = set()
        self._lock = threading.Lock()

    def begin(self, trials: list[Trial], minutes: float) -> None:
        self.trials = trials
        self._minutes["probes"] = round(minutes, 1)

    def decided(self, trial: Trial) -> None:
        with self._lock:
            self._decided.add(trial.fault.number)
            self._print(trial)
            say(f"{len(self._decided)} of {len(self.trials)}")
            self._write()

    def close(self, minutes: float) -> None:
        """Print those that time has left, the differences that no test has noticed, and the summary."""
        for trial in self.trials:
            if trial.fault.number not in self._decided:
                self._print(trial)
        survivors = [trial.fault for trial in self.trials if not trial.found_by]
        for fault in survivors:
            print(f"\n{fault.number}: {fault.kind}, {fault.place}\n{fault.difference()}")
        self._minutes["all"] = round(minutes, 1)
        self._write()
        summary = [f"{len(self.trials) - len(survivors)} of {len(self.trials)} faults found in {minutes:.1f} min"]
        for title, some in (
            ("survived", survivors),
            ("no longer exist", self._gone),
            ("found by the other commit, and not here", [f for f in survivors if f.number in self._found_before]),
        ):
            if some:
                summary.append(f"{title}: {' '.join(str(fault.number) for fault in some)}")
        print("\n" + "; ".join(summary), flush=True)

    def _print(self, trial: Trial) -> None:
        fault = trial.fault
        if trial.found_by:
            verdict = f"{trial.seconds:4.0f} s  {trial.how}: {trial.found_by}"
        elif trial.reached:
            verdict = f"{trial.seconds:4.0f} s  survived {trial.ran} of {trial.reached} tests"
        else:
            verdict = "        survived: no test reaches it"
        print(f"{fault.number:>3}  {fault.kind:<26} {fault.place:<60} {verdict}", flush=True)

    def _write(self) -> None:
        if self._file is None:
            return
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        found: dict[str, Any] = {"commit": commit, "seed": faults.SEED, "minutes": self._minutes}
        found["faults"] = [trial.to_json() for trial in self.trials]
        found["gone"] = [asdict(fault) for fault in self._gone]
        self._file.write_text(json.dumps(found, indent=1) + "\n")


def say(text: str) -> None:
    print(f"planted: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
