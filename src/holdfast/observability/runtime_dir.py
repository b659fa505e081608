"""The sockets on which the workers of one user on one machine tell how they are, and asking them.

A worker that runs has a socket in the directory. A probe needs neither a port nor the database to ask it, and the
kernel says so when the process is gone. This module is imported by a probe, with every probe: it imports little.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import stat
from dataclasses import dataclass

from holdfast.observability.health import Health, from_data

PAGE = "/health"
_LONGEST_PATH = 70  # with the name of a socket it must stay below 104, the limit of some systems
_LONGEST_ANSWER = 1_000_000
_SOCKET = re.compile(r"(?P<kind>worker|process)-(?P<pid>[0-9]{1,10})(-[0-9]+)?\.sock")


class NoAnswer(Exception):
    """The process has the socket, and did not answer in time."""


@dataclass(frozen=True, slots=True)
class RuntimeDir:
    """A directory that only its user may enter."""

    path: str

    def prepare(self) -> None:
        """Make the directory, refuse one that another user could enter, and remove the sockets of killed workers."""
        if len(os.fsencode(self.path)) > _LONGEST_PATH:
            raise OSError(errno.ENAMETOOLONG, f"{self.path} is too long for the path of a socket")
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        if not self.private:
            raise PermissionError(f"{self.path} is not a directory of this user alone")
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(f"{self.path} cannot be written to")
        for name in os.listdir(self.path):
            if named := _SOCKET.fullmatch(name):
                _forget(os.path.join(self.path, name), int(named["pid"]))

    @property
    def private(self) -> bool:
        """Whether it is a directory of this user alone, or nothing yet. Raises OSError when that cannot be seen."""
        try:
            found = os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077

    def of_worker(self, pid: int) -> str:
        """The socket of a worker, or of the parent of several processes."""
        return os.path.join(self.path, f"worker-{pid}.sock")

    def of_process(self, parent: int, number: int) -> str:
        """The socket of one process of several."""
        return os.path.join(self.path, f"process-{parent}-{number}.sock")

    def workers(self) -> list[tuple[int, str]]:
        """The process ids and sockets of the workers that run, or were killed."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        found = [each for each in map(_SOCKET.fullmatch, names) if each is not None and each["kind"] == "worker"]
        return sorted((int(each["pid"]), os.path.join(self.path, each[0])) for each in found)


def _forget(path: str, pid: int) -> None:
    """Remove a socket that nothing answers at, unless its process is about to listen there."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
        line.settimeout(0.1)
        try:
            line.connect(path)
        except ConnectionRefusedError:
            if not os.path.exists(f"/proc/{pid}"):
                os.unlink(path)


def ask(path: str, timeout: float = 2.0) -> Health | None:
    """Ask the process at a socket for its health; None when there is no such process. Raises NoAnswer."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(timeout)
        try:
            line.connect(path)
            line.sendall(f"GET {PAGE} HTTP/1.1\r\n\r\n".encode())
            answer = b""
            while (part := line.recv(65_536)) and len(answer) < _LONGEST_ANSWER:
                answer += part
            return from_data(json.loads(answer.partition(b"\r\n\r\n")[2]))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except TimeoutError:
            raise NoAnswer(f"it does not answer within {timeout:g} s: it is stopped, or too busy") from None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise NoAnswer(f"its answer cannot be read: {type(error).__name__}") from None
