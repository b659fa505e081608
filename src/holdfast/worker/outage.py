"""Waiting out a database that is not there: told once, tried with backoff and jitter, told when it is over."""

import asyncio
import random
import threading
import time

from holdfast.redact import redact_dsn
from holdfast.telemetry import Notice, Observer

FIRST_WAIT = 1.0
# A loop that had nothing to ask meanwhile finds its connection dead when the outage is over. That is no new one.
_LATE = 60.0
LONGEST_WAIT = 3.5  # with the jitter on top, a claim follows within five seconds of the database's return


class Outages:
    """What the loops of a worker, each with a connection of its own, know about one database.

    An outage begins with the first loop that meets it and ends with the last one that is over it. It is told then, and
    not by every loop again.
    """

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self._lock = threading.Lock()  # the heartbeat has a thread of its own
        self._since: float | None = None
        self._met: set[str] = set()
        self.recovered_at = -_LATE  # when a loop last got over it

    def of(self, loop: str, *, longest_wait: float = LONGEST_WAIT) -> "Outage":
        return Outage(self, loop, longest_wait)

    def begin(self, loop: str, fault: BaseException, tries: int) -> None:
        with self._lock:
            self._met.add(loop)
            late = tries == 1 and time.monotonic() - self.recovered_at < _LATE
            if self._since is not None or late:
                return
            self._since = time.monotonic()
        details: dict[str, object] = {
            "loop": loop,
            "error": redact_dsn(f"{type(fault).__name__}: {fault}")[:500],
            "action": "reconnecting; leases keep the events, nothing is lost",
        }
        self._observe(Notice("error", "database_unavailable", details))

    def over(self, loop: str) -> None:
        self.recovered_at = time.monotonic()
        with self._lock:
            self._met.discard(loop)
            if self._met or self._since is None:
                return
            lasted, self._since = time.monotonic() - self._since, None
        self._observe(Notice("info", "database_back", {"loop": loop, "after_s": round(lasted, 3)}))


class Outage:
    """One loop's part in it."""

    def __init__(self, outages: Outages, loop: str, longest_wait: float) -> None:
        self._outages = outages
        self._loop = loop
        self._longest_wait = longest_wait
        self._tries = 0

    def begin(self, fault: BaseException) -> float:
        """Note a fault and return how long to wait before the next try."""
        self._tries += 1
        self._outages.begin(self._loop, fault, self._tries)
        ceiling = min(FIRST_WAIT * 2 ** min(self._tries - 1, 10), self._longest_wait)
        # Not all loops and all workers at once.
        return float(ceiling * random.uniform(1.0, 1.25))

    async def wait(self, fault: BaseException) -> None:
        """As long, or until another loop has got through."""
        began = time.monotonic()
        ends = began + self.begin(fault)
        # Not an event: the other loop may be in another thread.
        while (left := ends - time.monotonic()) > 0 and self._outages.recovered_at < began:  # noqa: ASYNC110
            await asyncio.sleep(min(left, 0.1))

    def over(self) -> None:
        if self._tries:
            self._tries = 0
            self._outages.over(self._loop)
