"""The directory of one server: its data, its password, its log, and what the processes in it are doing."""

from __future__ import annotations

import os
import re
import secrets
import shutil
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
    """`<root>/cluster` is Postgres' data directory; password and server.log stand beside it."""

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
        account.own(root)
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
        try:
            if not root.exists():
                root.mkdir(parents=True, mode=0o700)
                account.own(root)
            elif not cluster._password.exists():
                # Only an empty directory is taken over: giving somebody's files away is not repairable.
                if any(root.iterdir()):
                    raise EmbeddedPostgresError(
                        f"{root} holds files that are not ours. Name an empty or a new directory."
                    )
                root.chmod(0o700)
                account.own(root)
        except PermissionError as error:
            raise EmbeddedPostgresError(
                f"{root} cannot be used by this user ({error.strerror}). Name another directory."
            ) from error
        return cluster

    # --- making it ---

    def initialise(self, binaries: PostgresBinaries, *, sync: bool) -> None:
        """Run initdb once; a directory that is there already must be of the same major version."""
        if self.data.exists():
            found = (self.data / "PG_VERSION").read_text().strip()
            if found != str(binaries.major):
                raise EmbeddedPostgresError(
                    f"{self.root} was made by Postgres {found} and these programs are {binaries.version}. "
                    f"Pass binaries= of Postgres {found}, or remove the directory."
                )
            return
        self._write_secret(self._password, secrets.token_urlsafe(24))
        # An interrupted initdb leaves the partial directory, never a half-made cluster under the real name.
        partial = self.root / "cluster.partial"
        shutil.rmtree(partial, ignore_errors=True)
        command = [
            binaries.program("initdb"),
            *("--pgdata", str(partial), "--username", SUPERUSER, "--pwfile", str(self._password)),
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
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.account.own(self.log)
        return descriptor

    def log_tail(self, lines: int = 20) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"

    # --- what it remembers ---

    @property
    def password(self) -> str:
        return self._password.read_text().strip()

    @property
    def last_port(self) -> int | None:
        try:
            return int(self._port.read_text())
        except (OSError, ValueError):
            return None

    def remember_port(self, port: int) -> None:
        self._port.write_text(str(port))

    def _write_secret(self, path: Path, text: str) -> None:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        self.account.own(path)

    # --- who runs in it ---

    def postmaster(self) -> tuple[int, str] | None:
        """Process id and state ("starting", "ready", ...) as the server wrote them, or None."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return int(lines[0]), lines[7].strip() if len(lines) > 7 else "starting"
        except (OSError, ValueError, IndexError):
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
        recorded = self.postmaster()
        if recorded is None:
            return
        left = self.processes()
        if recorded[0] not in left:
            left = self.wait_until_empty(5.0)
        if left:
            raise EmbeddedPostgresError(
                f"A server is already running in {self.root} (process {left[0]}). "
                "Stop it first, or use another directory."
            )
        (self.data / "postmaster.pid").unlink(missing_ok=True)


def server_environment() -> dict[str, str]:
    """Nothing of the caller's PG* variables or locale may reach the server."""
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def _state(process: Path) -> str:
    match = re.search(r"\) (\S)", (process / "stat").read_text())
    return match[1] if match else "Z"
