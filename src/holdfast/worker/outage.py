"""Waiting out a database that is not there: told once, tried with backoff and jitter, told when it is over."""

import asyncio
import random
import time

from holdfast.redact import redact_dsn
from holdfast.telemetry import Notice, Observer

FIRST_WAIT = 1.0
LONGEST_WAIT = 3.5  # with the jitter on top, a claim follows within five seconds of the database's return


class Outage:
    """One loop's view of its connection."""

    def __init__(self, loop: str, observe: Observer, *, longest_wait: float = LONGEST_WAIT) -> None:
        self._loop = loop
        self._observe = observe
        self._longest_wait = longest_wait
        self._since: float | None = None
        self._tries = 0

    def begin(self, fault: BaseException) -> float:
        """Note a fault and return how long to wait before the next try."""
        if self._since is None:
            self._since = time.monotonic()
            details = {
                "loop": self._loop,
                "error": redact_dsn(f"{type(fault).__name__}: {fault}")[:500],
                "action": "reconnecting; leases keep the events, nothing is lost",
            }
            self._observe(Notice("error", "database_unavailable", dict(details)))
        self._tries += 1
        ceiling = min(FIRST_WAIT * 2 ** min(self._tries - 1, 10), self._longest_wait)
        # At most one try a second, and not all workers of a fleet at once.
        return float(ceiling * random.uniform(1.0, 1.25))

    async def wait(self, fault: BaseException) -> None:
        await asyncio.sleep(self.begin(fault))

    def over(self) -> None:
        if self._since is not None:
            details: dict[str, object] = {
                "loop": self._loop,
                "after_s": round(time.monotonic() - self._since, 3),
            }
            self._observe(Notice("info", "database_back", details))
            self._since = None
            self._tries = 0
