"""Broker servers as processes that tests kill, freeze and start again on the same port; each ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

_START_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server that listens on one port of this machine."""

    def __init__(self, command: Sequence[str], port: int, folder: Path) -> None:
        self.command = list(command)
        self.port = port
        self.folder = folder
        self.address = ""
        self.environment: Mapping[str, str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        self.spawn()
        self.wait_until_listening()

    def spawn(self) -> None:
        """Start the process from the main thread: the kernel ends it with the thread that has started it."""
        with (self.folder / f"{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                process_group=0,  # so that Ctrl-C reaches only the parent
                preexec_fn=die_with_parent,
            )

    def wait_until_listening(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self._process is not None and self._process.poll() is None, self.log()
            time.sleep(0.02)
        raise AssertionError(f"no server on port {self.port}: {self.log()}")

    def log(self) -> str:
        return (self.folder / f"{self.port}.log").read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """End the server at once, as `kill -9` does, also when it is frozen."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._process.wait(timeout=10)

    def restart(self) -> None:
        self.kill()
        self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        freeze(self.pid)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


def freeze(pid: int) -> None:
    """Stop a process, and return when all its threads stand still: they may answer for a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5.0
    while not all(_stands_still(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} does not stop")
        time.sleep(0.001)


def _stands_still(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
