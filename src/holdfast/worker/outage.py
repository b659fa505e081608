"""Waits out a database that cannot be reached: reported once, tried with backoff and jitter, reported when over.

A refused login is reported although the outage was: what cut the connections before it does not say what to do.
"""

import asyncio
import random
import threading
import time
from dataclasses import dataclass

import asyncpg

from holdfast import telemetry
from holdfast.observing import ObserverGroup
from holdfast.postgres.faults import LoginRefused, TransactionsAway, remedy_of
from holdfast.redact import redact_dsn, redact_secrets
from holdfast.retry import sqlstate_of
from holdfast.telemetry import Notice

START = "start"  # the loop that tries to connect when a worker starts
FIRST_WAIT = 1.0
# A loop that was idle during an outage finds its connection dead when it is over. That is no new outage.
_LATE = 60.0
_GRANT = "as an administrator: GRANT holdfast_worker TO the login of this worker"
LONGEST_WAIT = 3.5  # with the jitter on top, a claim follows within five seconds of the database's return


@dataclass(frozen=True, slots=True)
class Fault:
    """What one loop meets."""

    error: str
    since: float

    @property
    def lasted(self) -> float:
        return time.monotonic() - self.since


def _words(fault: BaseException) -> str:
    # The driver met the end of the connection in the middle of an answer, and names a state of its own.
    if isinstance(fault, asyncpg.InternalClientError):
        return "the connection was lost"
    # A time limit that has passed has no words of its own.
    text = str(fault) or ("the server did not answer in time" if isinstance(fault, TimeoutError) else "no reason given")
    return redact_secrets(f"{type(fault).__name__}: {text}")[:500]


class Outages:
    """The outages of one database, as the loops of a worker meet them, each on a connection of its own.

    An outage begins with the first loop that meets it and ends with the last one that has recovered. Both are reported
    once, and not by every loop; so is each reason for which the server refuses a login meanwhile.
    """

    def __init__(self, observe: ObserverGroup, dsn: str = "") -> None:
        self._observe = observe
        self._wants = observe.wants(telemetry.Outage)
        self._address = redact_dsn(dsn.partition("?")[0])
        self._lock = threading.Lock()  # the lease keeper has a thread of its own
        self._since: float | None = None
        self._met: dict[str, Fault] = {}  # by loop
        self._refusals: set[str | None] = set()  # SQLSTATEs that were reported in this outage
        self.recovered_at = -_LATE  # when a loop last recovered

    def of(self, loop: str, *, longest_wait: float = LONGEST_WAIT) -> "Outage":
        return Outage(self, loop, longest_wait)

    @property
    def met(self) -> dict[str, Fault]:
        """What the loops that have not recovered meet, by their names. Safe in another thread."""
        with self._lock:
            return dict(self._met)

    def begin(self, loop: str, fault: BaseException, tries: int) -> None:
        refused = isinstance(fault, LoginRefused | asyncpg.TooManyConnectionsError)
        state = sqlstate_of(fault) if refused else None
        error = _words(fault)
        with self._lock:
            earlier = self._met.get(loop)
            self._met[loop] = Fault(error, earlier.since if earlier else time.monotonic())
            late = tries == 1 and time.monotonic() - self.recovered_at < _LATE
            known = state in self._refusals if refused else self._since is not None or late
            if known:
                return
            if refused:
                self._refusals.add(state)
            self._since = self._since or time.monotonic()
        if self._wants:
            self._observe(telemetry.Outage(loop, False, error))
        if isinstance(fault, asyncpg.InsufficientPrivilegeError):
            denied: dict[str, object] = {"loop": loop, "error": error, "remedy": _GRANT}
            self._observe(Notice("error", "permission_denied", denied))
            return
        if isinstance(fault, asyncpg.LockNotAvailableError):
            remedy = fault.hint or "holdfast doctor names the session that has the lock"
            blocked: dict[str, object] = {"loop": loop, "error": error, "action": "trying again", "remedy": remedy}
            self._observe(Notice("error", "delivery_blocked", blocked))
            return
        details: dict[str, object] = {
            "loop": loop,
            "error": error,
            "action": "reconnecting; leases keep the events, nothing is lost",
        }
        if refused:
            details["sqlstate"] = state
            details["remedy"] = remedy_of(fault.__cause__ or fault) or "check the login in the worker's HOLDFAST_DSN"
        elif isinstance(fault, TransactionsAway):
            details["remedy"] = remedy_of(fault, "the engine or pool that was passed as transactions")
        elif loop == START and (remedy := remedy_of(fault, "the worker's address")):
            # It was never reached: the address may be wrong.
            details |= {"address": self._address, "remedy": remedy}
        self._observe(Notice("error", "database_unavailable", details))

    def over(self, loop: str) -> None:
        self.recovered_at = time.monotonic()
        with self._lock:
            self._met.pop(loop, None)
            if self._met or self._since is None:
                return
            lasted, self._since = time.monotonic() - self._since, None
            self._refusals.clear()
        if self._wants:
            self._observe(telemetry.Outage(loop, True, lasted=lasted))
        self._observe(Notice("info", "database_back", {"loop": loop, "after_s": round(lasted, 3)}))


class Outage:
    """One loop's part in the outages."""

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
        """Note a fault, and wait as long, or until another loop has recovered."""
        began = time.monotonic()
        ends = began + self.begin(fault)
        # Not an event: the other loop may be in another thread.
        while (left := ends - time.monotonic()) > 0 and self._outages.recovered_at < began:  # noqa: ASYNC110
            await asyncio.sleep(min(left, 0.1))

    def over(self) -> None:
        if self._tries:
            self._tries = 0
            self._outages.over(self._loop)
