"""A group of workers: one for each of several databases, in one process and on one event loop.

    def worker(database: str) -> Worker:
        return Worker(ADDRESSES[database], registry, observers=(LogObserver(database=database),))

    await WorkerGroup(ADDRESSES, worker).run()

They share nothing but the process and the handlers: each has connections, leases, breakers, threads and outages of its
own. A database that is away is waited for, and one that refuses its worker, because its schema is old or the login has
no rights, is tried again; the others go on. What a handler writes with `tx` is in the database of its event.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from holdfast.checks import function
from holdfast.context import current_database
from holdfast.errors import ConfigurationError
from holdfast.failure import describe
from holdfast.measurements import Measurements
from holdfast.names import database_name
from holdfast.observability.health import Health, State, together
from holdfast.observability.logging import log_fact
from holdfast.telemetry import Notice, Observer
from holdfast.worker.process import stopped_by_signals
from holdfast.worker.worker import Worker

# Until a database that refused its worker is tried again.
_FIRST_WAIT = 1.0
_LONGEST_WAIT = 30.0


@dataclass(slots=True)
class _Member:
    """The worker of one database."""

    database: str
    worker: Worker
    refusal: Exception | None = None  # why the last worker has not started
    used: bool = False  # it has run: the next time there is a new one
    entered: asyncio.Event = field(default_factory=asyncio.Event)  # it has started, waits, or was refused

    @property
    def refused(self) -> bool:
        return self.refusal is not None and self.worker.health().state != "running"

    def health(self, ending: bool) -> Health:
        found = self.worker.health()
        if not self.refused or self.refusal is None or ending:
            return replace(found, database=self.database)
        problem = f"it refuses the worker, and is tried again: {describe(self.refusal).text}"
        return Health("starting", not_ready=(problem,), name=found.name, pid=found.pid, database=self.database)


class WorkerGroup:
    """Runs a worker for each database until it is stopped. `make` returns the worker of a database, by its name.

    The group ends by itself, with the error of the first, only when every database refuses its worker.
    """

    def __init__(
        self, databases: Iterable[str], make: Callable[[str], Worker], *, observe: Observer = log_fact
    ) -> None:
        function("make", make, "pass a function of a database's name that returns its Worker")
        names = [database_name("databases", name) for name in databases]
        if not names or len(set(names)) < len(names):
            problem = "has a name twice" if names else "is empty"
            raise ConfigurationError("databases", problem, "name each database once, at least one")
        self._make = make
        self._observe = observe
        self._members = [_Member(name, make(name)) for name in names]
        self._stopping = asyncio.Event()
        self._all_refuse = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._state: State = "new"

    async def run(self, *, signals: bool = False) -> None:
        """Work until `stop` is called. With `signals`, SIGTERM and SIGINT stop it; a second one exits at once."""
        self._state = "starting"
        signalled = stopped_by_signals(self.stop, self._stopping.is_set) if signals else contextlib.nullcontext()
        with signalled:
            serving = [asyncio.create_task(self._serve(member)) for member in self._members]
            refused = asyncio.create_task(self._all_refuse.wait())
            try:
                await asyncio.wait((asyncio.gather(*serving), refused), return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.stop()
                refused.cancel()
                await asyncio.gather(*serving)
                self._state = "stopped"
        first = self._members[0].refusal
        if self._all_refuse.is_set() and first is not None:
            raise first

    async def _serve(self, member: _Member) -> None:
        """Run the worker of a database, and another one after each that was refused."""
        current_database.set(member.database)
        wait = _FIRST_WAIT
        while not self._stopping.is_set():
            try:
                if member.used:
                    member.worker = self._make(member.database)
                member.used = True
                await self._run(member)
                return
            except Exception as error:
                self._refuse(member, error, wait)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stopping.wait()
                    return
            wait = min(2 * wait, _LONGEST_WAIT)

    async def _run(self, member: _Member) -> None:
        running = asyncio.create_task(member.worker.run())
        entering = asyncio.create_task(member.worker.entered())
        entering.add_done_callback(lambda _: self._entered(member, running))
        try:
            await running
        finally:
            entering.cancel()

    def _entered(self, member: _Member, running: asyncio.Task[None]) -> None:
        """Note that a worker has ended, has started, or waits for its database, which is no refusal."""
        if not running.done():
            member.refusal = None
        member.entered.set()

    def _refuse(self, member: _Member, error: Exception, wait: float) -> None:
        member.refusal = error
        details: dict[str, object] = {"database": member.database, "error": describe(error).text, "retry_in_s": wait}
        self._observe(Notice("error", "database_refused", details))
        if all(each.refused for each in self._members):
            self._all_refuse.set()

    def stop(self) -> None:
        """Stop all workers at once: each finishes what runs within its grace. `run` then returns."""
        self._stopping.set()
        for member in self._members:
            member.worker.stop()

    async def __aenter__(self) -> Self:
        """Start the workers, and wait until each has started, waits for its database, or was refused."""
        self._running = asyncio.create_task(self.run())
        entered = asyncio.gather(*(member.entered.wait() for member in self._members))
        await asyncio.wait((entered, self._running), return_when=asyncio.FIRST_COMPLETED)
        entered.cancel()
        if self._running.done():
            self._running.result()
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._running is not None:
            await self._running

    def health(self) -> Health:
        """How the workers are now. Any thread may call it, at any time."""
        found = [member.health(self._stopping.is_set()) for member in self._members]
        state = self._state
        if state == "starting":
            started = any(each.state == "running" for each in found)
            state = "draining" if self._stopping.is_set() else "running" if started else "starting"
        return together(Health(state, name=found[0].name, pid=os.getpid(), generation=found[0].generation), found)

    def measurements(self) -> Measurements:
        """Return what the workers have done since they started, and their state, by database."""
        return Measurements(databases={each.database: each.worker.measurements() for each in self._members})
