"""Several worker processes under one parent: started, started again when they die, stopped together.

Each child holds the reading end of a pipe whose other end only the parent has. When the parent is gone, for
whatever reason, the pipe ends, and `end_with_parent` in the child stops the worker. It needs no signal and works on
every POSIX system.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence

from holdfast.telemetry import Notice, Observer
from holdfast.worker.process import exit_now

FIRST_WAIT = 1.0
LONGEST_WAIT = 30.0
STEADY_AFTER = 60.0  # a child that lived this long did not die of its start

# The command of a child, given its number and the descriptor of its end of the pipe.
Command = Callable[[int, int], Sequence[str]]


class Supervisor:
    """Keeps `processes` children running until SIGTERM or SIGINT; a second signal kills them."""

    def __init__(
        self, command: Command, processes: int, observe: Observer, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = command
        self._processes = processes
        self._observe = observe
        self._environment = environment
        self._children: dict[int, Process] = {}
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Run until every child has ended after a signal."""
        reading, writing = os.pipe()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        self._notice("info", "supervisor_started", processes=self._processes, pid=os.getpid())
        try:
            await asyncio.gather(*(self._keep(number, reading) for number in range(1, self._processes + 1)))
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            os.close(writing)
            os.close(reading)
        self._notice("info", "supervisor_stopped")

    def _signalled(self, number: int) -> None:
        if self._stopping.is_set():
            for child in self._children.values():
                _signal(child, signal.SIGKILL)
            exit_now(number)
        self._stopping.set()
        for child in self._children.values():
            _signal(child, signal.SIGTERM)

    async def _keep(self, number: int, lifeline: int) -> None:
        wait = FIRST_WAIT
        while not self._stopping.is_set():
            started = time.monotonic()
            code = await self._run_child(number, lifeline)
            if self._stopping.is_set():
                return
            lived = time.monotonic() - started
            if lived >= STEADY_AFTER:
                wait = FIRST_WAIT
            self._notice(
                "error", "worker_died", number=number, lived_s=round(lived, 1), restart_in_s=wait, **_end(code)
            )
            try:
                async with asyncio.timeout(wait):
                    await self._stopping.wait()
            except TimeoutError:
                wait = min(2 * wait, LONGEST_WAIT)

    async def _run_child(self, number: int, lifeline: int) -> int:
        child = await asyncio.create_subprocess_exec(
            *self._command(number, lifeline),
            stdin=DEVNULL,
            env=self._environment,
            pass_fds=(lifeline,),
            # A Ctrl-C goes to the terminal's whole group: without this, children would get the signal twice.
            process_group=0,
        )
        self._children[number] = child
        try:
            if self._stopping.is_set():  # while it was being started
                _signal(child, signal.SIGTERM)
            return await child.wait()
        finally:
            del self._children[number]

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
