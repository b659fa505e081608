"""Notes that a place in the code was reached. `reach` copies this file into the package, with the path of the notes.

At most one note is written in 20 ms for the same place and test.
"""

from __future__ import annotations

import contextlib
import os
import time

NOTES = ""
_last: dict[int, tuple[str, float]] = {}


def reached(number: int) -> None:
    test, now = os.environ.get("PYTEST_CURRENT_TEST", ""), time.time()
    before = _last.get(number)
    if before is not None and before[0] == test and abs(now - before[1]) < 0.02:
        return
    _last[number] = test, now
    with contextlib.suppress(OSError), open(NOTES, "a") as notes:
        notes.write(f"{number}\t{os.environ.get('PLANTED_PROCESS', '')}\t{now}\t{test.rpartition(' (')[0]}\n")
