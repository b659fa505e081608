"""What the worker processes of one supervisor have done, as each reports it over its lifeline.

A process reports everything since its start once a second, and as the last thing before it ends. The parent keeps what
a process had reported when it died, so that no sum ever gets smaller; what it did in its last second may be missing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from asyncio import StreamReader
from collections.abc import Callable

from holdfast.measurements import Measurements

INTERVAL = 1.0
# Of one report. A thousand handlers take less than a megabyte.
LONGEST = 64 * 1024 * 1024


class ProcessReports:
    """The latest report of each process, and the sum of those that have ended. Any thread may read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = Measurements()
        self._latest: dict[int, Measurements] = {}
        self._deaths = 0

    async def read(self, number: int, reader: StreamReader) -> None:
        """Take the reports of one process until it closes its end. One that is cut short is left out."""
        with contextlib.suppress(ValueError, OSError):
            while (line := await reader.readline()).endswith(b"\n"):
                report = Measurements.loaded(line)
                with self._lock:
                    self._latest[number] = report

    def end(self, number: int) -> None:
        """Keep what a process has done, now that it has ended."""
        with self._lock:
            report = self._latest.pop(number, None)
            if report is not None:
                self._ended += report.ended()

    def died(self) -> None:
        """Count a process that has ended although nobody asked it to."""
        self._deaths += 1

    @property
    def deaths(self) -> int:
        """How many processes have died and were started again."""
        return self._deaths

    def measurements(self) -> Measurements:
        """Return the sum over all processes, those included that have ended."""
        with self._lock:
            return sum(self._latest.values(), self._ended)


class Reporter:
    """In a worker process: reports over the lifeline, from a thread of its own."""

    def __init__(self, lifeline: int, measure: Callable[[], Measurements]) -> None:
        self._lifeline = socket.socket(fileno=lifeline)
        self._measure = measure
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-reports", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last = ""
        while True:
            ending = self._ending.wait(INTERVAL)
            report = self._measure().dumped()
            if report != last:
                try:
                    self._lifeline.sendall(f"{report}\n".encode())
                except OSError:
                    return  # the parent is gone
                last = report
            if ending:
                return

    def close(self) -> None:
        """Report for the last time; without waiting long for a parent that does not read."""
        self._ending.set()
        self._thread.join(INTERVAL)
        self._lifeline.detach()
