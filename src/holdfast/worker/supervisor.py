"""Several worker processes under one parent: started, started again when they die, stopped together.

Each child holds one end of a socket pair whose other end only the parent has, its lifeline. When the parent is gone,
for whatever reason, the lifeline ends, and `end_with_parent` in the child stops the worker. It needs no signal and
works on every POSIX system. In the other direction the child may report over it what it has done.
"""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence

from holdfast.telemetry import Notice, Observer
from holdfast.worker.process import exit_now
from holdfast.worker.process_reports import LONGEST, ProcessReports

FIRST_WAIT = 1.0
LONGEST_WAIT = 30.0
_LAST_REPORT = 1.0
PATIENCE = 45.0
STEADY_AFTER = 60.0  # a child that lived this long did not die of its start

# The command of a child, given its number and the descriptor of its lifeline.
Command = Callable[[int, int], Sequence[str]]


class Supervisor:
    """Keeps `processes` children running until SIGTERM or SIGINT.

    A second signal kills them, and so does the end of `patience` seconds after the first: one that is frozen would
    never end. `killed` says how many those were.
    """

    def __init__(
        self,
        command: Command,
        processes: int,
        observe: Observer,
        *,
        environment: Mapping[str, str] | None = None,
        name: str = "",
        when_stopping: Callable[[], object] = lambda: None,
        patience: float = PATIENCE,
    ) -> None:
        self._command = command
        self._processes = processes
        self._observe = observe
        self._environment = environment
        self._name = name
        self._when_stopping = when_stopping
        self._patience = patience
        self.killed = 0
        self.reports = ProcessReports()
        self._children: dict[int, Process] = {}
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Run until every child has ended after a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        self._notice("info", "supervisor_started", processes=self._processes, pid=os.getpid())
        try:
            await asyncio.gather(*(self._keep(number) for number in range(1, self._processes + 1)))
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        self._notice("info", "supervisor_stopped")

    def _signalled(self, number: int) -> None:
        if self._stopping.is_set():
            for child in self._children.values():
                _signal(child, signal.SIGKILL)
            exit_now(number)
        self._stopping.set()
        self._when_stopping()
        asyncio.get_running_loop().call_later(self._patience, self._kill_the_rest)
        for child in self._children.values():
            _signal(child, signal.SIGTERM)

    def _kill_the_rest(self) -> None:
        left = {number: child for number, child in self._children.items() if child.returncode is None}
        for number, child in left.items():
            self.killed += 1
            self._notice(
                "error",
                "worker_killed",
                number=number,
                pid=child.pid,
                after_s=self._patience,
                remedy="it did not end in time, as if it was frozen; its events are due again when their leases expire",
            )
            _signal(child, signal.SIGKILL)

    async def _keep(self, number: int) -> None:
        wait = FIRST_WAIT
        while not self._stopping.is_set():
            started = time.monotonic()
            pid, code = await self._run_child(number)
            if self._stopping.is_set():
                return
            self.reports.died()
            lived = time.monotonic() - started
            if lived >= STEADY_AFTER:
                wait = FIRST_WAIT
            died = {"number": number, "worker": f"{self._name}/{number}", "pid": pid, "lived_s": round(lived, 1)}
            self._notice("error", "worker_died", **died, restart_in_s=wait, **_end(code))
            try:
                async with asyncio.timeout(wait):
                    await self._stopping.wait()
            except TimeoutError:
                wait = min(2 * wait, LONGEST_WAIT)

    async def _run_child(self, number: int) -> tuple[int, int]:
        """Run a child until it ends; its process id and exit code."""
        ours, lifeline = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST)
        reading = asyncio.create_task(self.reports.read(number, reader))
        try:
            child = await self._start(number, lifeline)
            self._children[number] = child
            if self._stopping.is_set():  # while it was being started
                _signal(child, signal.SIGTERM)
            code = await child.wait()
            # What it has reported is there by now, unless a process that it has started holds the lifeline too.
            await asyncio.wait((reading,), timeout=_LAST_REPORT)
            return child.pid, code
        finally:
            self._children.pop(number, None)
            reading.cancel()
            writer.close()
            self.reports.end(number)

    async def _start(self, number: int, lifeline: socket.socket) -> Process:
        with lifeline:
            return await asyncio.create_subprocess_exec(
                *self._command(number, lifeline.fileno()),
                stdin=DEVNULL,
                env=self._environment,
                pass_fds=(lifeline.fileno(),),
                # A Ctrl-C goes to the terminal's whole group: without this, children would get the signal twice.
                process_group=0,
            )

    def _notice(self, level: str, name: str, **details: object) -> None:
        self._observe(Notice(level, name, details))


def _signal(child: Process, number: signal.Signals) -> None:
    if child.returncode is None:
        child.send_signal(number)


def _end(code: int) -> dict[str, object]:
    return {"exit_code": code} if code >= 0 else {"signal": signal.Signals(-code).name}


def end_with_parent(lifeline: int, stop: Callable[[], None], patience: float) -> None:
    """In the child: call `stop` when the parent is gone, and exit when that has not helped after `patience` seconds."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)  # nothing is ever written: it returns when the other end is closed
        stop()
        time.sleep(patience)
        os._exit(1)

    threading.Thread(target=watch, name="holdfast-lifeline", daemon=True).start()
