"""Who the server runs as. Postgres refuses to run as root, so root hands it to an account of its own, else to `nobody`.

Root trusts nothing that this account can write: it opens, owns and signals only what the account cannot replace.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.embedded.errors import EmbeddedPostgresError

STATE_DIR = Path("/var/lib/holdfast")
NAME = "holdfast"
_USERADD_SECONDS = 5.0
_TRY_AGAIN = (1, 10)  # useradd's: another program holds the password or the group file


@dataclass(frozen=True, slots=True)
class Account:
    """The user and group of the server's processes and files; None means our own."""

    uid: int | None = None
    gid: int | None = None

    def popen_arguments(self) -> dict[str, Any]:
        if self.uid is None:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, directory: Path) -> None:
        """Give a directory, never what a symbolic link names, to the server's user."""
        if self.uid is None or self.gid is None:
            return
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(descriptor, self.uid, self.gid)
        finally:
            os.close(descriptor)

    def let_read(self, descriptor: int) -> None:
        """Let the server's user read an open file of ours, and change nothing in it."""
        if self.gid is not None:
            os.fchown(descriptor, -1, self.gid)
            os.fchmod(descriptor, 0o640)

    def can_replace(self, directory: Path) -> Path | None:
        """Return the directory above this one in which the server's user can rename or remove, if there is one."""
        if self.uid is None:
            return None
        for parent in directory.resolve().parents:
            if parent.exists() and self._may_rename_in(os.stat(parent)):
                return parent
        return None

    def _may_rename_in(self, status: os.stat_result) -> bool:
        if status.st_uid == self.uid:
            return True  # an owner can give itself every right
        if status.st_mode & stat.S_ISVTX:
            return False
        return bool(status.st_mode & (stat.S_IWGRP if status.st_gid == self.gid else stat.S_IWOTH))

    def can_enter(self, directory: Path) -> bool:
        """Whether the server may walk down to this directory (or to its nearest existing parent)."""
        if self.uid is None:
            return True
        directory = directory.resolve()
        return all(self._may_search(os.stat(d)) for d in (directory, *directory.parents) if d.exists())

    def _may_search(self, status: os.stat_result) -> bool:
        if status.st_uid == self.uid:
            return bool(status.st_mode & stat.S_IXUSR)
        if status.st_gid == self.gid:
            return bool(status.st_mode & stat.S_IXGRP)
        return bool(status.st_mode & stat.S_IXOTH)


def server_account(data: Path | None = None) -> Account:
    """Return the account for a new server, or the one that a server's existing data directory belongs to."""
    if os.geteuid() != 0:
        return Account()
    nobody = _named("nobody") or Account(65534, 65534)
    if data is not None and data.is_dir() and data.lstat().st_uid == nobody.uid:
        return nobody
    return _own_account() or nobody


def _named(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(entry.pw_uid, entry.pw_gid)


@functools.cache
def _own_account() -> Account | None:
    """Return the account that only servers of ours run as; made with useradd where the machine has none yet."""
    found = _named(NAME)
    if found is None:
        try:
            with _only_one_maker():
                found = _named(NAME) or _make_account()
        except OSError:
            return None
    if found is not None and (found.uid == 0 or found.gid == 0):
        raise EmbeddedPostgresError(f"The account {NAME!r} is root's. Remove it or give it an id of its own.")
    return found


@contextlib.contextmanager
def _only_one_maker() -> Iterator[None]:
    """Let one process at a time make the account.

    useradd reads the password file before it locks it: two at once both succeed, and the second replaces the account of
    the first by one with another id.
    """
    STATE_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(STATE_DIR / ".account.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_account() -> Account | None:
    useradd = shutil.which("useradd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    if useradd is None:
        return None
    options = ("--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/bin/false")
    deadline = time.monotonic() + _USERADD_SECONDS
    while subprocess.run([useradd, *options, NAME], capture_output=True).returncode in _TRY_AGAIN:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return _named(NAME)


def usable_data_dir(preferred: Path) -> Path:
    """The preferred directory, or, when the server's user cannot reach it, one of its own under /var/lib.

    Root with a checkout in its closed home directory is the usual case: the server's user cannot get there, and
    opening a home directory is not ours to do.
    """
    preferred = preferred.absolute()
    if server_account().can_enter(preferred.parent):
        return preferred
    digest = hashlib.sha256(os.fsencode(preferred)).hexdigest()[:8]
    return STATE_DIR / f"{preferred.name.lstrip('.')}-{digest}"
