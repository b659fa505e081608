"""The directory of one server: its data, its password, its log, and what the processes in it are doing.

    <root>            ours: the server's user may enter it and change nothing in it
      password, port  ours
      server.log      ours: the server writes to the descriptor that it inherits
      cluster/        the server's: Postgres' data directory
      socket/         the server's

As root, what stands in the last two is a claim of the server's user: it is read without following links, and never
tells whom to signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from holdfast.embedded.account import Account, usable_data_dir
from holdfast.embedded.binaries import PostgresBinaries
from holdfast.embedded.errors import EmbeddedPostgresError

SUPERUSER = "postgres"
# The kernel's limit for a socket's path is 107 bytes; Postgres appends ".s.PGSQL.65535".
_LONGEST_SOCKET_DIR = 107 - len("/.s.PGSQL.65535.lock")
_LARGEST_LOG = 16 * 1024 * 1024


class Cluster:
    """The files of one server."""

    def __init__(self, root: Path, account: Account) -> None:
        self.root = root
        self.account = account
        self.data = root / "cluster"
        self.log = root / "server.log"
        self._password = root / "password"
        self._port = root / "port"

    @classmethod
    def temporary(cls, account: Account) -> Cluster:
        root = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))
        root.chmod(_mode(account))
        if not account.can_enter(root):
            root.rmdir()
            raise EmbeddedPostgresError(
                f"The server must run as another user, who cannot reach the temporary directory "
                f"{root.parent}. Set TMPDIR to one that everybody may enter, such as /tmp."
            )
        return cls(root, account)

    @classmethod
    def at(cls, root: Path, account: Account) -> Cluster:
        root = root.absolute()
        cluster = cls(root, account)
        if not account.can_enter(root.parent):
            raise EmbeddedPostgresError(
                f"The server must run as another user, who cannot reach {root}. "
                f"Use holdfast.embedded.usable_data_dir(), here {usable_data_dir(root)}."
            )
        if (writable := account.can_replace(root)) is not None:
            raise EmbeddedPostgresError(
                f"The server's user can rename what is in {writable}, and could put files of its own in the place of "
                f"{root}. Use a directory below one that only root can write to."
            )
        try:
            if not root.exists():
                root.mkdir(parents=True, mode=0o700)
            elif not os.path.lexists(cluster._password) and any(root.iterdir()):
                # Only an empty directory is taken over: giving somebody's files away is not repairable.
                raise EmbeddedPostgresError(f"{root} holds files that are not ours. Name an empty or a new directory.")
            cluster._take_root()
        except PermissionError as error:
            raise EmbeddedPostgresError(
                f"{root} cannot be used by this user ({error.strerror}). Name another directory."
            ) from error
        return cluster

    def _take_root(self) -> None:
        """Take the directory from the server's user, if it is that user's, and refuse what was put into it."""
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if self.account.uid is not None:
                os.fchown(descriptor, os.geteuid(), os.getegid())
            os.fchmod(descriptor, _mode(self.account))
        finally:
            os.close(descriptor)
        directories = (self.data, self.root / "socket")
        for path in (*directories, self._password, self._port, self.log):
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                expected = stat.S_ISDIR if path in directories else stat.S_ISREG
                if not expected(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink > 1):
                    raise EmbeddedPostgresError(
                        f"{path} is a link or a special file, which this server has not made. Remove it, and look "
                        "into who did."
                    )

    # --- making it ---

    def initialise(self, binaries: PostgresBinaries, *, sync: bool) -> None:
        """Run initdb once; a directory that is there already must be of the same major version."""
        if self.data.exists():
            found = (_claimed(self.data / "PG_VERSION") or "").strip()
            if not found.isdigit():
                raise EmbeddedPostgresError(f"{self.data} is not a data directory of Postgres. Remove {self.root}.")
            if found != str(binaries.major):
                raise EmbeddedPostgresError(
                    f"{self.root} was made by Postgres {found} and these programs are {binaries.version}. "
                    f"Pass binaries= of Postgres {found}, or remove the directory."
                )
            return
        password = secrets.token_urlsafe(24)
        self._write(self._password, password)
        lent = self.root / "password.partial"
        self._write(lent, password, readable=True)
        # An interrupted initdb leaves the partial directory, never a half-made cluster under the real name.
        partial = self.root / "cluster.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        self.account.own(partial)
        command = [
            binaries.program("initdb"),
            *("--pgdata", str(partial), "--username", SUPERUSER, "--pwfile", str(lent)),
            *("--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C"),
            *([] if sync else ["--no-sync"]),
        ]
        run = subprocess.run(
            command,
            cwd="/",
            env=server_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **self.account.popen_arguments(),
        )
        lent.unlink()
        if run.returncode != 0:
            tail = run.stdout.decode(errors="replace").strip()[-2000:]
            raise EmbeddedPostgresError(f"initdb failed in {self.root}:\n{tail}")
        partial.rename(self.data)

    def socket_dir(self) -> Path:
        """Where the Unix socket goes: beside the data, unless that path is too long for a socket."""
        directory = self.root / "socket"
        if len(os.fsencode(directory)) > _LONGEST_SOCKET_DIR:
            directory = Path(tempfile.mkdtemp(prefix="holdfast-"))
        directory.mkdir(mode=0o700, exist_ok=True)
        self.account.own(directory)
        return directory

    def open_log(self) -> int:
        if self.log.exists() and self.log.stat().st_size > _LARGEST_LOG:
            self.log.replace(self.log.with_suffix(".log.1"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(self.log, flags, 0o600)
        except OSError as error:
            raise EmbeddedPostgresError(f"{self.log} cannot be written ({error.strerror}). Remove it.") from error

    def log_tail(self, lines: int = 20) -> str:
        text = _claimed(self.log, _LARGEST_LOG)
        return "(no log)" if text is None else "\n".join(text.splitlines()[-lines:])

    # --- what it remembers ---

    @property
    def password(self) -> str:
        return (_claimed(self._password) or "").strip()

    @property
    def last_port(self) -> int | None:
        try:
            return int(_claimed(self._port) or "")
        except ValueError:
            return None

    def remember_port(self, port: int) -> None:
        self._write(self._port, str(port))

    def _write(self, path: Path, text: str, *, readable: bool = False) -> None:
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.write(text + "\n")
            if readable:
                self.account.let_read(file.fileno())

    # --- who runs in it ---

    def postmaster(self) -> tuple[int, str] | None:
        """Process id and state ("starting", "ready", ...) as the server's user wrote them, or None."""
        try:
            lines = (_claimed(self.data / "postmaster.pid") or "").splitlines()
            return int(lines[0]), lines[7].strip() if len(lines) > 7 else "starting"
        except (ValueError, IndexError):
            return None

    def processes(self) -> list[int]:
        """Server processes of this cluster that still live: every one has the data directory as its own."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "cwd") == str(self.data.resolve()) and _state(entry) != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue  # ended meanwhile, or somebody else's
        return found

    def wait_until_empty(self, seconds: float) -> list[int]:
        """Wait for the last process to leave; returns those that stayed."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def clear_stale_pid(self) -> None:
        """Remove what a killed server left, so that a process that got its id is not taken for it.

        Backends may outlive a killed postmaster for a moment. Removing the file while one lives would let two
        servers write the same data, so this waits for them first.
        """
        if not Path("/proc/self").exists():
            return  # without /proc Postgres' own, more cautious check has to do
        file = self.data / "postmaster.pid"
        if not os.path.lexists(file):
            return
        recorded = self.postmaster()
        left = self.processes()
        if recorded is None or recorded[0] not in left:
            left = self.wait_until_empty(5.0)
        if left:
            raise EmbeddedPostgresError(
                f"A server is already running in {self.root} (process {left[0]}). "
                "Stop it first, or use another directory."
            )
        file.unlink(missing_ok=True)


def server_environment() -> dict[str, str]:
    """Nothing of the caller's PG* variables or locale may reach the server."""
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def _mode(account: Account) -> int:
    return 0o700 if account.uid is None else 0o711


def _claimed(path: Path, most: int = 65_536) -> str | None:
    """Return the last bytes of a plain file that another user may have put there; None if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        file.seek(max(0, status.st_size - most))
        return file.read(most).decode(errors="replace")


def _state(process: Path) -> str:
    match = re.search(r"\) (\S)", (process / "stat").read_text())
    return match[1] if match else "Z"
